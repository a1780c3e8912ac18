"""`Grammar`: the description of a language. Hashable, serialisable, part of a request; engines make matchers of it."""

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
    """The most tokens of reasoning, and the texts around it, in a language that begins with reasoning.

    Args:
        tokens: the most tokens; then ``closing`` is the only legal text.
        opener: precedes the reasoning; "" where the text begins with it.
        ends: texts, each of which ends the reasoning.
        closing: is forced where the budget is spent.
    """

    tokens: int
    opener: str
    ends: tuple[str, ...]
    closing: str


@dataclass(frozen=True)
class Grammar:
    """The description of a language. Build one with the class methods; equal descriptions are equal grammars.

    Args:
        kind: the notation of ``source``.
        source: text; for a choice, a JSON array.
        thinking: the budget of the reasoning that the language begins with; None for no limit.
        lenient: whether an engine leaves out what it cannot express of a JSON Schema, in place of refusing it. For
            texts that are checked afterwards (``Request.validate``).
        is_free: whether a text is free until a call begins: its text is then what the tokenizer decodes, which may
            lack a leading space. Other texts are exact to the byte.
    """

    kind: Kind
    source: str
    thinking: ThinkingBudget | None = None
    lenient: bool = False
    is_free: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.thinking, dict):  # read from JSON
            known = ThinkingBudget(**{**self.thinking, "ends": tuple(self.thinking["ends"])})
            object.__setattr__(self, "thinking", known)
        check_size(self.source, f"The {self.kind} grammar", _MAX_BYTES.get(self.kind, MAX_BYTES))

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | bool) -> Grammar:
        """Describe the JSON values that satisfy a JSON Schema, with the separators ``", "`` and ``": "``.

        A key that the schema does not declare may be repeated, which no grammar can forbid; ``Request.validate`` does.

        Raises:
            GrammarError: for a schema that is not JSON, is too large, or has a keyword of a wrong type.
        """
        # Key order is part of the language (properties are written in their order), so it is kept.
        return cls("json_schema", to_json(checked(schema)))

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Describe the texts that a regular expression matches from end to end.

        The outlines engine reads it as Python's ``re`` does, and names what an automaton cannot express in an error.

        Raises:
            GrammarError: for an empty pattern, or one that is no string.
        """
        if not isinstance(pattern, str) or not pattern:
            raise GrammarError(f"A regular expression is a non-empty string, got {shown(pattern)}.")
        return cls("regex", pattern)

    @classmethod
    def choice(cls, options: Iterable[str]) -> Grammar:
        """Describe a choice of texts.

        Raises:
            GrammarError: for no option, an empty one, or one that is no string.
        """
        given = [] if isinstance(options, str) else list(options)
        listed = list(dict.fromkeys(given)) if all(isinstance(option, str) for option in given) else []
        if not listed or not all(isinstance(option, str) and option for option in listed):
            raise GrammarError(f"A choice needs at least one option, all non-empty strings; got {shown(options)}.")
        return cls("choice", to_json(listed))

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """Describe a language by a context-free grammar in llguidance's variant of Lark."""
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
        """Describe answers that may hold tool calls, with arguments valid against the tools' parameters.

        Args:
            tools: OpenAI tool dicts; may be empty where ``final`` or ``thought`` describes the answer.
            required: whether an answer must be a call. If not, free text becomes a call at the opener, or where the
                answer begins with an opener of another spelling (``grammars.call_openers``): from there on only a
                valid call is legal.
            parallel: the most calls in one answer.
            final: JSON Schema of an answer without calls, in place of free text; closed like parameters.
            form: the tool-call format.
            thought: the format of reasoning before the answer, which a call ends too; None for none.
            thinking_budget: the most tokens of reasoning, which is then ended; None for no limit.

        Raises:
            GrammarError: for no possible answer, ``parallel`` below 1, a budget below 0 or without reasoning, a tool
                without a name, a name that the format cannot write, or a schema that ``json_schema`` refuses.
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
        settings = (form, required, parallel, thought, budget is not None)
        try:
            source = _answer_grammar(to_json([list(tools), final]), *settings)  # the same tools come at every step
        except (TypeError, ValueError, RecursionError):  # no JSON: the error then names the tool
            source = _answer_grammar.__wrapped__([tools, final], *settings)
        return cls("lark", source, budget, is_free=not required and final is None)

    @classmethod
    def of(cls, description: Any) -> Grammar:
        """Return the grammar of a description in one of the usual forms.

        These are pydantic classes (v2 and v1), TypedDicts, dataclasses, enums, ``Literal`` and other types known to
        pydantic, lists of strings (a choice), JSON Schema dicts, OpenAI's tool dicts (or a list of them) and
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
def _answer_grammar(
    described: str | list[Any],
    form: ToolCallFormat,
    required: bool,
    parallel: int,
    thought: ReasoningFormat | None,
    is_budgeted: bool,
) -> str:
    """Return the Lark grammar of answers with these tools and final schema, given as JSON where they are JSON."""
    tools, final = json.loads(described) if isinstance(described, str) else described
    return form.answer_grammar(
        tools, required=required, parallel=parallel, final=final, thought=thought, is_budgeted=is_budgeted
    )


def _of_strings(values: Iterable[Any], otherwise: Any) -> Grammar:
    """Return a choice of the values if all are strings, else the grammar of the type ``otherwise``."""
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
    kind, description = importlib.import_module("agentspec.grammars.outlines.terms").describe(term)
    builders: dict[Kind, Callable[[Any], Grammar]] = {
        "json_schema": Grammar.json_schema,
        "lark": Grammar.lark,
        "choice": Grammar.choice,
        "regex": Grammar.regex,
    }
    return builders[kind](description)


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
"""The forms that ``Grammar.of`` reads; the first that matches counts."""
