"""The description of a language: hashable, serialisable, part of a request. Engines make matchers of it elsewhere."""

from __future__ import annotations

import enum
import importlib
import json
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, create_model

from agentspec.errors import GrammarError

Kind = Literal["json_schema", "regex", "choice", "lark"]

JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as ``json.dumps`` and chat templates write it, with fixed separators: most structural tokens are then
forced, no model can loop in white space, and the next turn of a conversation renders to the same ids."""


@dataclass(frozen=True)
class CallForm:
    """How a family of models writes a tool call.

    Args:
        opener: what free text cannot hold, for a call begins there.
        before_arguments: what follows it, ``{name}`` being the tool's name as a JSON string.
        closer: what ends the call.
        between: what stands between parallel calls.
    """

    opener: str = "<tool_call>"
    before_arguments: str = '\n{{"name": {name}, "arguments": '
    closer: str = "}\n</tool_call>"
    between: str = "\n"

    def opening(self, tool_name: str) -> str:
        """What stands between the opener and the arguments of a call."""
        return self.before_arguments.format(name=to_json(tool_name))

    def call(self, tool_name: str, arguments: dict[str, Any]) -> str:
        """A whole call, exactly as the model is made to write it."""
        return self.opener + self.opening(tool_name) + to_json(arguments) + self.closer


HERMES = CallForm()


@dataclass(frozen=True)
class Grammar:
    """The description of a language. Build one with the class methods; equal descriptions are equal grammars.

    Args:
        kind: what ``source`` is written in.
        source: text; for a choice, a JSON array.
    """

    kind: Kind
    source: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """JSON values that satisfy a JSON Schema, written with the separators ``", "`` and ``": "``.

        Raises:
            GrammarError: where the schema is not JSON.
        """
        if not isinstance(schema, dict | bool):
            raise GrammarError(f"A JSON Schema is a dict or a bool, got {type(schema).__name__}: {schema!r}.")
        try:
            # Key order is part of the language (properties are written in their order), so it is kept.
            return cls("json_schema", to_json(schema))
        except (TypeError, ValueError) as error:
            raise GrammarError(f"The JSON Schema must consist of JSON values: {error}.") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression matches from end to end."""
        if not isinstance(pattern, str) or not pattern:
            raise GrammarError(f"A regular expression is a non-empty string, got {pattern!r}.")
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Grammar:
        """One of several texts.

        Raises:
            GrammarError: for no option, an empty one, or one that is not text.
        """
        listed = list(dict.fromkeys(options))
        if not listed or not all(isinstance(option, str) and option for option in listed):
            raise GrammarError(f"A choice needs at least one option, all non-empty strings; got {listed!r}.")
        return cls("choice", to_json(listed))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A context-free grammar in llguidance's variant of Lark."""
        return cls("lark", source)

    @classmethod
    def tools(
        cls,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool = True,
        parallel: int = 1,
        final: dict[str, Any] | bool | None = None,
        form: CallForm = HERMES,
    ) -> Grammar:
        """Answers that may be calls of tools, valid against their parameters.

        Args:
            tools: OpenAI tool dicts.
            required: whether an answer must be a call. If not, free text turns into a call where the opener is
                written; from there on only a valid call is legal.
            parallel: the most calls in one answer.
            final: JSON Schema of an answer that is no call, in place of free text; closed like parameters.
            form: how a call is written.

        Raises:
            GrammarError: for no tools, ``parallel`` below 1, or a tool without a name.
        """
        if not tools or parallel < 1:
            raise GrammarError(f"Expected at least one tool and one call, got {len(tools)} tools, parallel={parallel}.")
        if not all(isinstance(tool.get("function", {}).get("name"), str) for tool in tools):
            raise GrammarError(
                "Every tool must be an OpenAI tool dict: {'type': 'function', 'function': {'name': ...}}."
            )
        opener, closer, between = to_json(form.opener), to_json(form.closer), to_json(form.between)
        names = [f"tool_{index}" for index in range(len(tools))]
        more = f" ({between} {opener} call){{0,{parallel - 1}}}" if parallel > 1 else ""
        if required:
            start = f"start: {opener} call{more}"
        elif final is not None:
            start = f"start: {opener} call{more} | %json {_in_json_form(closed(final))}"
        else:
            start = f"start: TEXT | opened call{more}\nopened[lazy]: TEXT {opener}\nTEXT: /(.|\\n)*/"
        rules = [
            f"{name}: {to_json(form.opening(tool['function']['name']))} %json {_in_json_form(_arguments(tool))}"
            for name, tool in zip(names, tools, strict=True)
        ]
        return cls.lark("\n".join([start, f"call: ({' | '.join(names)}) {closer}", *rules]) + "\n")

    @classmethod
    def of(cls, description: Any) -> Grammar:
        """The grammar that a description in one of the usual forms means.

        Takes pydantic classes (v2 and v1), TypedDicts, dataclasses, enums, ``Literal`` and other types that pydantic
        can describe, lists of strings (a choice), JSON Schema dicts, OpenAI's tool dicts (or a list of them) and
        response formats, outlines' types and terms, and grammars. Enums and literals whose values are all strings are
        choices of plain text, as in outlines.

        Raises:
            GrammarError: for anything else.
        """
        for matches, read in _FORMS:
            if matches(description):
                return read(description)
        raise GrammarError(
            "A grammar can be made of a pydantic class, TypedDict, dataclass, enum, Literal, list of strings, JSON "
            f"Schema, OpenAI tool or response format, or an outlines type; got {description!r}. "
            "For patterns say Grammar.regex(...), for grammars Grammar.lark(...)."
        )


def to_json(value: Any) -> str:
    """JSON in the one form in which it is written everywhere here: ``", "``, ``": "``, raw UTF-8."""
    return json.dumps(value, ensure_ascii=False)


def _in_json_form(schema: dict[str, Any] | bool) -> str:
    """A JSON Schema for llguidance, its instances written in our form."""
    return to_json({**schema, "x-guidance": JSON_FORM} if isinstance(schema, dict) else schema)


def closed(schema: Any) -> Any:
    """A schema whose objects hold the properties they name and no others, where it leaves that open.

    A model has nothing to put into properties that are not there, and a small one does not stop inventing them. Every
    value of the closed schema is one of the open schema too. Objects that say what else they may hold, or that are put
    together of parts, stay as they are.
    """
    if not isinstance(schema, dict) or "allOf" in to_json(schema):
        return schema
    inner = {
        **{key: closed(schema[key]) for key in ("items",) if key in schema},
        **{key: [closed(part) for part in schema[key]] for key in ("anyOf", "prefixItems") if key in schema},
        **{key: _closed_values(schema[key]) for key in ("properties", "$defs", "definitions") if key in schema},
    }
    is_open = schema.get("properties") and not schema.keys() & _SAYS_WHAT_ELSE
    return {**schema, **inner, **({"additionalProperties": False} if is_open else {})}


_SAYS_WHAT_ELSE = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "dependentSchemas",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
}


def _closed_values(schemas: Any) -> Any:
    return {name: closed(part) for name, part in schemas.items()} if isinstance(schemas, dict) else schemas


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of its arguments."""
    schema: dict[str, Any] = closed({"type": "object", **(tool["function"].get("parameters") or {})})
    return (
        schema
        if schema.get("properties") or schema.keys() & _SAYS_WHAT_ELSE
        else {**schema, "additionalProperties": False}
    )


def _of_strings(values: Iterable[Any], otherwise: Any) -> Grammar:
    """A choice, where all values are strings; else a JSON Schema of a type."""
    listed = list(values)
    return Grammar.choice(listed) if all(isinstance(value, str) for value in listed) else _of_type(otherwise)


def _of_type(described: Any) -> Grammar:
    try:
        return Grammar.json_schema(TypeAdapter(_for_pydantic(described)).json_schema())
    except GrammarError:
        raise
    except Exception as error:  # pydantic raises several kinds for types without a schema
        raise GrammarError(f"{described!r} cannot be described by a JSON Schema: {error}") from error


def _for_pydantic(described: Any) -> Any:
    """The type itself, but for ``typing.TypedDict``, which pydantic does not take before Python 3.12."""
    if not typing.is_typeddict(described):
        return described
    hints = typing.get_type_hints(described, include_extras=True)
    fields = {name: (kind, ... if name in described.__required_keys__ else None) for name, kind in hints.items()}
    return create_model(described.__name__, __doc__=described.__doc__, **fields)  # type: ignore[call-overload]


def _of_response_format(description: dict[str, Any]) -> Grammar:
    if description["type"] == "json_object":
        return Grammar.json_schema({"type": "object"})
    schema = (description.get("json_schema") or {}).get("schema")
    if schema is None:
        raise GrammarError(
            f"A response format is {{'type': 'json_schema', 'json_schema': {{'schema': ...}}}}, got {description!r}."
        )
    return Grammar.json_schema(schema)


def _of_outlines(term: Any) -> Grammar:
    described: Grammar = importlib.import_module("agentspec.constraints.outlines").describe(term)
    return described


def _is_tool(description: Any) -> bool:
    return isinstance(description, dict) and description.get("type") == "function" and "function" in description


def _is_pydantic_v1(description: Any) -> bool:
    return (
        isinstance(description, type) and not issubclass(description, BaseModel) and hasattr(description, "__fields__")
    )


_FORMS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Grammar]], ...] = (
    (lambda x: isinstance(x, Grammar), lambda x: x),
    (lambda x: type(x).__module__.startswith("outlines."), _of_outlines),
    (lambda x: isinstance(x, type) and issubclass(x, enum.Enum), lambda x: _of_strings([m.value for m in x], x)),
    (_is_pydantic_v1, lambda x: Grammar.json_schema(x.schema())),
    (lambda x: typing.get_origin(x) is Literal, lambda x: _of_strings(typing.get_args(x), x)),
    (
        lambda x: isinstance(x, type | types.GenericAlias | types.UnionType) or typing.get_origin(x) is not None,
        _of_type,
    ),
    (_is_tool, lambda x: Grammar.tools([x])),
    (lambda x: isinstance(x, list) and bool(x) and all(map(_is_tool, x)), Grammar.tools),
    (lambda x: isinstance(x, list | tuple), Grammar.choice),
    (lambda x: isinstance(x, dict) and x.get("type") in ("json_object", "json_schema"), _of_response_format),
    (lambda x: isinstance(x, dict), Grammar.json_schema),
)
"""The forms that ``Grammar.of`` reads, the first that matches counts."""
