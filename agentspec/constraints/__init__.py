"""The constraint seam: what a grammar is, and the only masks that p and q ever see.

A ``Grammar`` is a description (hashable, serialisable, part of a request). A ``GrammarCompiler`` makes matchers of it
for one vocabulary. A ``Walk`` goes along a draft and hands out one mask object per position, to the drafter and to
the target alike.

Local masking is not conditioning: the law is that of the step-by-step decoder which masks every position, not the
model's law given that the whole text fits the grammar.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from torch import Tensor

from agentspec.constraints.thinking import BudgetedMatcher
from agentspec.errors import GrammarError
from agentspec.grammar import Grammar
from agentspec.masks import Masks, TokenMask
from agentspec.sampling import Prefix
from agentspec.sequence import Batch, Matcher
from agentspec.sequence import Sequence as TokenSequence

__all__ = [
    "GRAMMAR_ENGINES",
    "AutoCompiler",
    "Grammar",
    "GrammarCompiler",
    "GrammarEngine",
    "Matcher",
    "Walk",
    "begin",
    "compiler",
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
        raise GrammarError(f"Unknown grammar engine {engine!r}; expected one of {', '.join(GRAMMAR_ENGINES)}.")
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


def begin(grammar: Grammar, grammars: GrammarCompiler, tokenizer: Any) -> Matcher:
    """A matcher at the start of a grammar, which keeps its thinking budget.

    Raises:
        GrammarError: where the grammar cannot be compiled.
    """
    matcher = grammars.matcher(grammar)
    if grammar.thinking is None:
        return matcher
    closing = tokenizer.encode(grammar.thinking.closing, add_special_tokens=False)
    return BudgetedMatcher(matcher, grammar.thinking, closing, tokenizer.decode)


class Walk:
    """A walk along a batch's drafts that collects the mask of every position.

    It stands, in every row, behind the row's context and what has been drafted so far. The matchers of the batch's
    sequences move with it; ``settle`` puts them back where they stood.
    """

    def __init__(self, batch: Batch, vocab_size: int) -> None:
        self.vocab_size = vocab_size  # ids that the target scores
        self._rows = [_RowWalk(sequence) for sequence in batch.sequences]
        self._device = batch.device
        self._forced_reserved = False
        self.seconds = 0.0  # spent on masks so far

    def drafted(self, row: int) -> int:
        """How many tokens have been walked in this row."""
        return len(self._rows[row].tokens)

    def context(self, row: int) -> list[int]:
        """The row's context with the drafted prefix behind it."""
        return self._rows[row].sequence.context + self._rows[row].tokens

    def prefix(self, row: int) -> Prefix:
        """What stands before the position where the walk stands."""
        sequence = self._rows[row].sequence
        return Prefix(self.context(row), sequence.prompt_length, 1, sequence.end_tokens)

    def is_open(self, row: int) -> bool:
        """Whether a drafter may go on here.

        False behind a token that ends the sequence or cannot be accepted, and at forced tokens once reserved.
        """
        self.mask(row)  # which may find that the grammar is over here
        return self._rows[row].is_open and not (self._forced_reserved and self.forced(row) is not None)

    def reserve_forced(self) -> None:
        """From now on forced tokens are drafted by the caller; the drafters it asks stop at them."""
        self._forced_reserved = True

    def mask(self, row: int) -> TokenMask | None:
        """The tokens that are legal where the walk stands; None where all are."""
        walk = self._rows[row]
        if walk.is_known:
            return walk.masks[-1]
        started = time.perf_counter()
        mask = walk.mask()
        self.seconds += time.perf_counter() - started
        return mask

    def forced(self, row: int) -> int | None:
        """The only legal token where the walk stands; None where there is a choice, or nothing to go on with."""
        mask = self.mask(row)
        return mask.only if mask is not None and self._rows[row].is_open else None

    def advance(self, row: int, token: int) -> None:
        """Walk on over a drafted token."""
        started = time.perf_counter()
        self._rows[row].advance(token)
        self.seconds += time.perf_counter() - started

    def stack(self, rows: Sequence[int]) -> Tensor | None:
        """``[len(rows), 1, V]`` bool: the masks where the walk stands; None where all tokens are legal in all rows."""
        masks = Masks([[self.mask(row)] for row in rows], self._device)
        started = time.perf_counter()
        stacked = masks.tensor
        self.seconds += time.perf_counter() - started
        return stacked

    def masks(self, spans: Sequence[list[int]]) -> Masks:
        """``[B, K+1]``: the mask before each drafted token and behind the last.

        Behind a token that cannot be accepted everything is legal: no token is ever drawn there.
        """
        for row, span in enumerate(spans):
            for token in span[self.drafted(row) :]:
                self.advance(row, token)
            self.mask(row)
        rows = [row.masks[: len(span) + 1] for row, span in zip(self._rows, spans, strict=True)]
        return Masks(rows, self._device)

    def choices(self, row: int, count: int) -> list[bool]:
        """For each of the first ``count`` walked tokens, whether its mask left a choice."""
        return [mask is None or mask.only is None for mask in self._rows[row].masks[:count]]

    def constrained(self, row: int, count: int) -> int:
        """How many of a row's first ``count`` positions were under a mask."""
        return sum(mask is not None for mask in self._rows[row].masks[:count])

    def settle(self) -> None:
        """Put every matcher back to the start of the walk."""
        for row in self._rows:
            row.settle()


class _RowWalk:
    """One row's walk: ``masks[k]`` was legal before ``tokens[k]``."""

    def __init__(self, sequence: TokenSequence) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.masks: list[TokenMask | None] = []
        self.is_open = True
        self._matcher = sequence.matcher
        self._advanced = 0  # how far the matcher stands from where it was

    @property
    def is_known(self) -> bool:
        """Whether the mask is, where the walk stands."""
        return len(self.masks) > len(self.tokens)

    def mask(self) -> TokenMask | None:
        if not self.is_known:
            mask = self._legal()
            if mask is not None and mask.is_empty:
                self.is_open = False  # a dead end: an error, but only for a text that gets here
            self.masks.append(mask)
        return self.masks[-1]

    def advance(self, token: int) -> None:
        mask = self.mask()
        self.tokens.append(token)
        if token in self.sequence.end_tokens or (mask is not None and token not in mask):
            self.is_open = False
        elif self.is_open and self._matcher is not None:
            if not self._matcher.advance(token):
                raise GrammarError(f"The grammar engine refuses token {token}, which its mask allows.")
            self._advanced += 1

    def settle(self) -> None:
        if self._matcher is not None and self._advanced:
            self._matcher.rewind(self._advanced)
            self._advanced = 0

    def _legal(self) -> TokenMask | None:
        if self._matcher is None or not self.is_open:
            return None
        mask = self._matcher.allowed()
        is_complete = self._matcher.is_complete()
        if is_complete and mask.is_empty:
            self.is_open = False
            return None  # the grammar is over: the commit ends the sequence before anything is drawn here
        return mask.but(self.sequence.end_tokens, legal=is_complete)
