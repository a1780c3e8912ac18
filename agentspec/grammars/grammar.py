"""The description of a language: hashable, serialisable, part of a request. Engines make matchers of it elsewhere."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.errors import GrammarError, shown
from agentspec.grammars.from_types import is_pydantic_v1
from agentspec.grammars.from_types import schema_of as schema_of
from agentspec.grammars.schema_tools import MAX_BYTES, check_size, checked, to_json
from agentspec.grammars.tool_calls import HERMES, ReasoningFormat, ToolCallFormat

Kind = Literal["json_schema", "regex", "choice", "lark"]

_MAX_BYTES = {"regex": 200_000, "lark": 8 * MAX_BYTES}  # a grammar of tools holds a schema for each


@dataclass(frozen=True)
class ThinkingBudget:
    """How long a thought may be, beside a grammar that knows what one is.

    Args:
        tokens: of the thought; then ``closing`` is the only legal text.
        opener: the thought begins behind it; "" for at once.
        ends: texts with any of which it is over.
        closing: ends it.
    """

    tokens: int
    opener: str
    ends: tuple[str, ...]
    closing: str


@dataclass(frozen=True)
class Grammar:
    """The description of a language. Build one with the class methods; equal descriptions are equal grammars.

    Args:
        kind: what ``source`` is written in.
        source: text; for a choice, a JSON array.
        thinking: the budget of the thought that the language begins with; None for no limit.
        lenient: leave out what an engine cannot express of a JSON Schema, in place of refusing it: for texts that are
            checked afterwards (``Request.validate``).
        is_free: whether a text is free until a call begins: it reads then as the tokenizer decodes it, which may leave
            out a leading space. Other texts are exact to the byte.
    """

    kind: Kind
    source: str
    thinking: ThinkingBudget | None = None
    lenient: bool = False
    is_free: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.thinking, dict):  # what was written as JSON
            known = ThinkingBudget(**{**self.thinking, "ends": tuple(self.thinking["ends"])})
            object.__setattr__(self, "thinking", known)
        check_size(self.source, f"The {self.kind} grammar", _MAX_BYTES.get(self.kind, MAX_BYTES))

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """JSON values that satisfy a JSON Schema, written with the separators ``", "`` and ``": "``.

        A key that the schema does not declare may be repeated: no grammar remembers it. ``Request.validate`` finds it.

        Raises:
            GrammarError: where the schema is not JSON, is too large, or has a keyword of a wrong type.
        """
        # Key order is part of the language (properties are written in their order), so it is kept.
        return cls("json_schema", to_json(checked(schema)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that a regular expression matches from end to end.

        The outlines engine reads it as Python's ``re`` does, and refuses by name what an automaton cannot say.
        """
        if not isinstance(pattern, str) or not pattern:
            raise GrammarError(f"A regular expression is a non-empty string, got {shown(pattern)}.")
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Grammar:
        """One of several texts.

        Raises:
            GrammarError: for no option, an empty one, or one that is not text.
        """
        given = [] if isinstance(options, str) else list(options)
        listed = list(dict.fromkeys(given)) if all(isinstance(option, str) for option in given) else []
        if not listed or not all(isinstance(option, str) and option for option in listed):
            raise GrammarError(f"A choice needs at least one option, all non-empty strings; got {shown(options)}.")
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
        form: ToolCallFormat = HERMES,
        thought: ReasoningFormat | None = None,
        thinking_budget: int | None = None,
    ) -> Grammar:
        """Answers that may be calls of tools, valid against their parameters.

        Args:
            tools: OpenAI tool dicts; may be empty where ``final`` or ``thought`` says what an answer is.
            required: whether an answer must be a call. If not, free text turns into a call where the opener is
                written, and an answer that begins with one in another spelling (``grammars.call_openers``) is one: from
                there on only a valid call is legal.
            parallel: the most calls in one answer.
            final: JSON Schema of an answer that is no call, in place of free text; closed like parameters.
            form: how a call is written.
            thought: free text that goes before the answer; a call ends it too.
            thinking_budget: the most tokens of a thought, which is then ended; None for no limit.

        Raises:
            GrammarError: for nothing to say, ``parallel`` below 1, a budget below 0 or without a thought, a tool
                without a name, a name that the form cannot write, or a schema that ``json_schema`` refuses.
        """
        if parallel < 1 or not (tools or final is not None or thought is not None):
            raise GrammarError(f"Expected at least one tool and one call, got {len(tools)} tools, parallel={parallel}.")
        if not all(isinstance(tool.get("function", {}).get("name"), str) for tool in tools):
            raise GrammarError(
                "Every tool must be an OpenAI tool dict: {'type': 'function', 'function': {'name': ...}}."
            )
        budget = None
        if thinking_budget is not None:
            if thought is None or thinking_budget < 0:
                raise GrammarError(
                    f"A thinking budget is a number of tokens, 0 or more, of a model that thinks; got {thinking_budget}"
                    f"{'' if thought else ' for one that does not'}."
                )
            ends = (thought.end, *([form.opener] if tools and form.opens_anywhere else []))
            budget = ThinkingBudget(thinking_budget, thought.opener, ends, thought.closing)
        final = None if final is None else checked(final, "The schema of the answer")
        asked = (form, required, parallel, thought, budget is not None)
        try:
            source = _answers(to_json([list(tools), final]), *asked)  # agents offer the same tools at every step
        except (TypeError, ValueError, RecursionError):  # no JSON: what is wrong with it is said by name
            source = _answers.__wrapped__([tools, final], *asked)
        return cls("lark", source, budget, is_free=not required and final is None)

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
            f"Schema, OpenAI tool or response format, or an outlines type; got {shown(description)}. "
            "For patterns say Grammar.regex(...), for grammars Grammar.lark(...)."
        )


@functools.lru_cache(maxsize=64)
def _answers(
    described: str | list[Any],
    form: ToolCallFormat,
    required: bool,
    parallel: int,
    thought: ReasoningFormat | None,
    is_budgeted: bool,
) -> str:
    """Return the Lark grammar of answers with the described tools and final schema."""
    tools, final = json.loads(described) if isinstance(described, str) else described
    return form.answers(
        tools, required=required, parallel=parallel, final=final, thought=thought, is_budgeted=is_budgeted
    )


def _of_strings(values: Iterable[Any], otherwise: Any) -> Grammar:
    """A choice, where all values are strings; else a JSON Schema of a type."""
    listed = list(values)
    return Grammar.choice(listed) if all(isinstance(value, str) for value in listed) else _of_type(otherwise)


def _of_type(described: Any) -> Grammar:
    return Grammar.json_schema(schema_of(described))


def _of_response_format(description: dict[str, Any]) -> Grammar:
    if description["type"] == "json_object":
        return Grammar.json_schema({"type": "object"})
    schema = (description.get("json_schema") or {}).get("schema")
    if schema is None:
        raise GrammarError(
            "A response format is {'type': 'json_schema', 'json_schema': {'schema': ...}}, got "
            f"{shown(description)}."
        )
    return Grammar.json_schema(schema)


def _of_outlines(term: Any) -> Grammar:
    described: Grammar = importlib.import_module("agentspec.grammars.outlines").describe(term)
    return described


def _is_tool(description: Any) -> bool:
    return isinstance(description, dict) and description.get("type") == "function" and "function" in description


_FORMS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Grammar]], ...] = (
    (lambda x: isinstance(x, Grammar), lambda x: x),
    (lambda x: type(x).__module__.startswith("outlines."), _of_outlines),
    (lambda x: isinstance(x, type) and issubclass(x, enum.Enum), lambda x: _of_strings([m.value for m in x], x)),
    (is_pydantic_v1, _of_type),
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
