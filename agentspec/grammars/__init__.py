"""The constraint seam: what a grammar is, and who is asked what is legal, for p and for q.

A ``Grammar`` is a description (hashable, serialisable, part of a request). A ``GrammarCompiler`` makes matchers of it
for one vocabulary. A ``GrammarCursor`` goes along a draft and asks what is legal at every position, for drafter and
target alike.

Local masking is not conditioning: the law is that of the step-by-step decoder which masks every position, not the
model's law given that the whole text fits the grammar.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

from agentspec.errors import GrammarError, shown
from agentspec.grammars.cursor import GrammarCursor
from agentspec.grammars.grammar import Grammar
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.schema_tools import arguments_schema, checked, closed, in_json_form, to_json
from agentspec.grammars.schema_tools.leniency import expressible, left_open, repeatable
from agentspec.grammars.thinking_budget import BudgetedMatcher
from agentspec.runtime.spelling import spell

__all__ = [
    "GRAMMAR_ENGINES",
    "AutoCompiler",
    "Grammar",
    "GrammarCompiler",
    "GrammarCursor",
    "GrammarEngine",
    "Matcher",
    "begin",
    "compiler",
    "expressible_parameters",
    "inexpressible_parts",
]


GrammarEngine = Literal["llguidance", "outlines", "auto"]
"""Names of the engines; ``"auto"`` takes the first that can express a grammar."""

GRAMMAR_ENGINES: tuple[GrammarEngine, ...] = get_args(GrammarEngine)

_IN_ORDER: tuple[GrammarEngine, ...] = ("llguidance", "outlines")


class GrammarCompiler(Protocol):
    """Makes matchers for one vocabulary. Compiled grammars are cached inside."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of ``grammar``.

        Raises:
            GrammarError: where the grammar cannot be compiled; says why.
        """
        ...


def compiler(tokenizer: Any, vocab_size: int, engine: GrammarEngine = "llguidance") -> GrammarCompiler:
    """The named grammar engine for a tokenizer of transformers.

    Raises:
        GrammarError: for an engine of another name, or a tokenizer that it cannot read.
    """
    if engine not in GRAMMAR_ENGINES:
        raise GrammarError(f"Unknown grammar engine {shown(engine)}; expected one of {', '.join(GRAMMAR_ENGINES)}.")
    if engine == "auto":
        return AutoCompiler({name: functools.partial(compiler, tokenizer, vocab_size, name) for name in _IN_ORDER})
    made: GrammarCompiler = importlib.import_module(f"{__name__}.{engine}").Compiler(tokenizer, vocab_size)
    return made


class AutoCompiler:
    """Asks one engine after the other. Each is made when it is first asked.

    Args:
        engines: what makes each, by name and in their order.
    """

    def __init__(self, engines: Mapping[str, Callable[[], GrammarCompiler]]) -> None:
        self._engines = {name: functools.cache(make) for name, make in engines.items()}

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher of the first engine that can express ``grammar``.

        Raises:
            GrammarError: where none can; holds the reasons of all.
        """
        reasons = []
        for name, engine in self._engines.items():
            try:
                return engine().matcher(grammar)
            except GrammarError as error:
                reasons.append(f"{name}: {error}")
        raise GrammarError("No grammar engine can express this grammar. " + " ".join(reasons))


def expressible_parameters(tool: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parameters of a tool as a grammar of calls can express them, and what these lack.

    Args:
        tool: an OpenAI tool dict.

    Raises:
        GrammarError: for parameters that are no bounded JSON Schema; names the tool.
    """
    function = tool["function"]
    parameters = {} if function.get("parameters") is None else function["parameters"]
    try:
        source = to_json(parameters)
    except (TypeError, ValueError, RecursionError):
        source = to_json(arguments_schema({"function": function}))  # says what is wrong
    lenient, left_out = _expressible_parameters(str(function.get("name")), source)
    return (json.loads(lenient) if left_out else parameters), left_out


@functools.lru_cache(maxsize=1024)  # agents send the same tools at every step
def _expressible_parameters(name: str, source: str) -> tuple[str, tuple[str, ...]]:
    arguments = arguments_schema({"function": {"name": name, "parameters": json.loads(source)}})
    lenient, left_out = _expressible(to_json(arguments))
    return to_json(left_open(json.loads(lenient))), (*left_out, *repeatable(arguments))


def inexpressible_parts(schema: dict[str, Any] | bool) -> tuple[str, ...]:
    """Return which keywords of a schema no grammar beside tools or thoughts can express, and where they stand."""
    return _expressible(to_json(closed(checked(schema))))[1]


@functools.lru_cache(maxsize=1024)
def _expressible(source: str) -> tuple[str, tuple[str, ...]]:
    why_inexpressible = importlib.import_module(f"{__name__}.llguidance").why_inexpressible

    def why_not(tried: Any) -> str | None:
        reason: str | None = why_inexpressible(in_json_form(tried))
        return reason

    schema, left_out = expressible(json.loads(source), why_not)
    return to_json(schema), left_out


def begin(grammar: Grammar, grammars: GrammarCompiler, tokenizer: Any) -> Matcher:
    """A matcher at the start of a grammar, which keeps its thinking budget.

    Raises:
        GrammarError: where the grammar cannot be compiled.
    """
    matcher = grammars.matcher(grammar)
    if grammar.thinking is None:
        return matcher
    closing = spell(tokenizer, grammar.thinking.closing)
    return BudgetedMatcher(matcher, grammar.thinking, closing, tokenizer.decode)
