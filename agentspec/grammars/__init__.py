"""The grammar seam: what a grammar is, and which engine makes its matchers.

A ``Grammar`` is a description (hashable, serialisable, part of a request). A ``GrammarCompiler`` makes matchers of it
for one vocabulary. A ``GrammarCursor`` moves along drafts, so that drafter and target see the same masks.

Masking is local: the distribution of a text is that of a decoder which masks every position, not the model's
distribution conditioned on the whole text being in the language.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

from agentspec.errors import GrammarError, shown
from agentspec.grammars.cursor import GrammarCursor
from agentspec.grammars.expressible import expressible_parameters, inexpressible_parts
from agentspec.grammars.grammar import Grammar
from agentspec.grammars.matcher import Matcher
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
    """An engine for one vocabulary. Compiled grammars are cached inside."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of ``grammar``.

        Raises:
            GrammarError: where the grammar cannot be compiled; names the reason.
        """
        ...


def compiler(tokenizer: Any, vocab_size: int, engine: GrammarEngine = "llguidance") -> GrammarCompiler:
    """Return an engine for a tokenizer of transformers.

    Args:
        tokenizer: a fast tokenizer.
        vocab_size: number of the target's logits.
        engine: its name.

    Raises:
        GrammarError: for an unknown name, or a tokenizer that the engine cannot read.
    """
    if engine not in GRAMMAR_ENGINES:
        raise GrammarError(f"Unknown grammar engine {shown(engine)}; expected one of {', '.join(GRAMMAR_ENGINES)}.")
    if engine == "auto":
        return AutoCompiler({name: functools.partial(compiler, tokenizer, vocab_size, name) for name in _IN_ORDER})
    made: GrammarCompiler = importlib.import_module(f"{__name__}.{engine}").Compiler(tokenizer, vocab_size)
    return made


class AutoCompiler:
    """The first of several engines that can express a grammar. Each is made when it is first needed.

    Args:
        engines: by name, in the order in which they are tried, a function that makes the engine.
    """

    def __init__(self, engines: Mapping[str, Callable[[], GrammarCompiler]]) -> None:
        self._engines = {name: functools.cache(make) for name, make in engines.items()}

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher of the first engine that can express ``grammar``.

        Raises:
            GrammarError: where no engine can; holds the reason of each.
        """
        reasons = []
        for name, engine in self._engines.items():
            try:
                return engine().matcher(grammar)
            except GrammarError as error:
                reasons.append(f"{name}: {error}")
        raise GrammarError("No grammar engine can express this grammar. " + " ".join(reasons))


def begin(grammar: Grammar, grammars: GrammarCompiler, tokenizer: Any) -> Matcher:
    """Return a matcher at the start of a grammar that enforces its thinking budget.

    Args:
        grammar: the description.
        grammars: the engine.
        tokenizer: of the same vocabulary; spells the text that ends the reasoning.

    Raises:
        GrammarError: where the grammar cannot be compiled.
    """
    matcher = grammars.matcher(grammar)
    if grammar.thinking is None:
        return matcher
    closing = spell(tokenizer, grammar.thinking.closing)
    return BudgetedMatcher(matcher, grammar.thinking, closing, tokenizer.decode)
