"""Rows that share rounds, one of which is in trouble: a seam raises for it, at a place that the test chooses.

The loop is turned by hand (``Scheduler.step``), without a worker thread: what happens is the same every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from enumeration import AutomatonMatcher, TableModel
from torch import Tensor

from agentspec import (
    Batch,
    Cascade,
    Draft,
    Fixed,
    GrammarError,
    InvalidRequestError,
    ModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec import Sequence as TokenSequence
from agentspec.drafters import DraftBudget
from agentspec.engine.request import Delta
from agentspec.engine.scheduler import Scheduler
from agentspec.engine.state import RequestState
from agentspec.grammars import GrammarCursor
from agentspec.runtime.detokenizer import Detokenizer
from agentspec.runtime.phase_timer import PhaseTimer

VOCABULARY, MARK, END = 8, 7, 6
ROWS = 3
TOKENS = 5
PLACES = [(row, at) for at in (0, 2) for row in range(ROWS)]
"""Which row is in trouble, and after how many emitted tokens."""


class Panic(BaseException):
    """What a library in Rust raises: no ``Exception``."""


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("trouble"),
    "KeyError": lambda: KeyError("trouble"),
    "RuntimeError": lambda: RuntimeError("trouble"),
    "MemoryError": lambda: MemoryError("trouble"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("trouble"),
    "InvalidRequestError": lambda: InvalidRequestError("trouble"),
    "GrammarError": lambda: GrammarError("trouble"),
    "StopIteration": lambda: StopIteration("trouble"),
    "SystemExit": lambda: SystemExit("trouble"),
    "CancelledError": lambda: asyncio.CancelledError("trouble"),
    "Panic": lambda: Panic("trouble"),
}


@dataclass
class Trouble:
    """Raises at a seam for the row whose prompt begins with ``MARK``, from a number of emitted tokens on."""

    seam: str
    error: Callable[[], BaseException]
    at: int = 0
    once: bool = False
    fired: int = 0

    def strike(self, seam: str, emitted: int) -> None:
        if seam == self.seam and emitted >= self.at and not (self.once and self.fired):
            self.fired += 1
            raise self.error()


def _emitted(context: Sequence[int]) -> int:
    return len(context) - 2 if context[0] == MARK else -9


class Target(TableModel):
    """A table that calls itself caching, so that prompts are read before rounds; it remembers its passes."""

    max_context, max_rows = 10_000, 64

    def __init__(self, trouble: Trouble, seed: int = 1, seam: str = "target", prefill: str = "prefill") -> None:
        super().__init__(VOCABULARY, seed=seed)
        self._trouble, self._seams = trouble, (seam, prefill)
        self.passes: list[int] = []  # rows of each
        self.device = torch.device("cpu")

    def cached_tokens(self, context: list[int]) -> int:
        return 0

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        is_round = any(last)
        if is_round:
            self.passes.append(len(contexts))
        for context, count in zip(contexts, last, strict=True):
            # A prompt is read without its last token.
            self._trouble.strike(self._seams[not is_round], _emitted(context) + (1 - count if is_round else 1 + TOKENS))
        return super().next_logits(contexts, last) if is_round else torch.zeros(len(contexts), 0, self.vocab_size)


class TroubledDrafter(Cascade):
    """Look-up and a model; in trouble before or after it has drafted."""

    def __init__(self, trouble: Trouble) -> None:
        draft = Target(trouble, 2, "draft model", "draft prefill")
        super().__init__([PromptLookupDrafter(min_ngram=1), ModelDrafter(draft)])
        self._trouble = trouble

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        self._strike("drafter", batch)
        draft = super().propose(batch, budget, cursor)
        self._strike("drafter, done", batch)
        return draft

    def _strike(self, seam: str, batch: Batch) -> None:
        for sequence in batch.sequences:
            self._trouble.strike(seam, _emitted(sequence.context))


class TroubledLength(Fixed):
    """A gamma of 3."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(3)
        self._trouble = trouble

    def __call__(self, batch: Batch) -> Any:
        self._strike("draft length", batch)
        return super().__call__(batch)

    def trim(self, batch: Batch, proposed: Draft) -> Draft:
        self._strike("draft length, trim", batch)
        return proposed

    def learn(self, batch: Batch, *others: Any) -> None:
        self._strike("draft length, learn", batch)

    def _strike(self, seam: str, batch: Batch) -> None:
        for sequence in batch.sequences:
            self._trouble.strike(seam, _emitted(sequence.context))


class TroubledMatcher(AutomatonMatcher):
    """A grammar of everything but one token after another; each method may raise, before or after it moved."""

    def __init__(self, trouble: Trouble | None) -> None:
        edges = {0: dict.fromkeys(range(END), 0) | {3: 1}, 1: {t: 0 for t in range(END) if t != 2}}
        super().__init__(edges, {0, 1}, VOCABULARY)
        self._trouble = trouble

    def _strike(self, seam: str) -> None:
        if self._trouble is not None:
            self._trouble.strike(seam, len(self.path) - 1)

    def token_mask(self) -> Any:
        self._strike("grammar, token_mask")
        return super().token_mask()

    def forced(self) -> int | None:
        self._strike("grammar, forced")
        return super().forced()

    def accept_token(self, token: int) -> bool:
        self._strike("grammar, accept_token")
        taken = super().accept_token(token)
        self._strike("grammar, accept_token, done")
        return taken

    def rollback(self, count: int) -> None:
        self._strike("grammar, rollback")
        super().rollback(count)
        self._strike("grammar, rollback, done")

    def is_accepting(self) -> bool:
        self._strike("grammar, is_accepting")
        return super().is_accepting()

    def is_terminated(self) -> bool:
        self._strike("grammar, is_terminated")
        return super().is_terminated()


class TroubledSequence(TokenSequence):
    """Its commit may raise: before it, half-way, after it, or with its end."""

    trouble: Trouble | None = None

    def extend(self, tokens: Sequence[int], consumed: int = 0, timer: PhaseTimer | None = None) -> int:
        self._strike("commit")
        if self.trouble is not None and self.trouble.seam == "commit, half":
            self.context.append(tokens[0])
            self._strike("commit, half")
            self.context.pop()
        count = super().extend(tokens, consumed, timer)
        self._strike("commit, done")
        return count

    def finish(self, reason: Any) -> None:
        self._strike("commit, finish")
        super().finish(reason)

    def _strike(self, seam: str) -> None:
        if self.trouble is not None:
            self.trouble.strike(seam, self.length)


SEAMS = (
    "logits_processor",
    "target",
    "prefill",
    "drafter",
    "drafter, done",
    "draft model",
    "draft prefill",
    "draft length",
    "draft length, trim",
    "draft length, learn",
    "grammar, token_mask",
    "grammar, forced",
    "grammar, accept_token",
    "grammar, accept_token, done",
    "grammar, rollback",
    "grammar, rollback, done",
    "grammar, is_accepting",
    "grammar, is_terminated",
    "detokenizer",
    "detokenizer, stop strings",
    "commit",
    "commit, half",
    "commit, done",
    "commit, finish",
    "emit",
)

IN_COMMIT = {seam for seam in SEAMS if seam.startswith(("commit", "emit", "detokenizer"))}
"""Where a failure that happens once has its effect: there is no second time."""


@dataclass
class Told:
    """What the caller of one request was told."""

    deltas: list[Delta] = field(default_factory=list)
    error: BaseException | None = None
    trouble: Trouble | None = None

    def __call__(self, item: Delta | BaseException) -> None:
        if isinstance(item, BaseException):
            self.error = item
        else:
            if self.trouble is not None:
                self.trouble.strike("emit", sum(len(delta.tokens) for delta in self.deltas))
            self.deltas.append(item)

    @property
    def answer(self) -> Any:
        """Ids, text, log-probabilities and finish reason."""
        return (
            [token for delta in self.deltas for token in delta.tokens],
            "".join(delta.text for delta in self.deltas),
            [entry for delta in self.deltas for entry in delta.logprobs],
            self.deltas[-1].finish_reason if self.deltas else None,
        )


class Scene:
    """Rows of different settings over one decoder.

    Args:
        trouble: of the row that begins with ``MARK``.
        max_running: rows that share a round.
    """

    def __init__(self, trouble: Trouble, max_running: int = ROWS) -> None:
        self.trouble = trouble
        self.target = Target(trouble)
        self.decoder = SpeculativeDecoder(self.target, TroubledDrafter(trouble), TroubledLength(trouble))
        self.scheduler = Scheduler(self.decoder, max_running)

    def row(self, index: int, in_trouble: bool = False) -> tuple[RequestState, Told]:
        """Row ``index``; of any company, it is the same."""
        trouble = self.trouble if in_trouble else None

        def processor(prefix: list[int], logits: Tensor) -> Tensor:
            if trouble is not None:
                trouble.strike("logits_processor", _emitted(prefix))
            return logits + 0.1 * len(prefix)

        def decode(ids: list[int]) -> str:
            if trouble is not None and ids:
                trouble.strike("detokenizer", sequence.length)
                trouble.strike("detokenizer, stop strings", sequence.length)
            return "".join(chr(97 + i) for i in ids)

        stops = ("fffff",) if index % 2 or (trouble and "stop" in trouble.seam) else ()
        params = SamplingParams(
            temperature=(0, 1.0, 0.7)[index % 3],
            max_tokens=TOKENS + index,
            seed=index,
            stop=stops,
            logprobs=1 if index % 2 else None,
            logits_processor=(processor,),
        )
        sequence = TroubledSequence(
            [MARK if in_trouble else index % 5, 1],
            params,
            matcher=TroubledMatcher(trouble),
            end_tokens=[END],
            detokenizer=Detokenizer(decode, skip={END}),
            seed=100 + index,
            acceptance="coupled" if index % 4 == 3 else "rejection",
        )
        sequence.trouble = trouble
        told = Told(trouble=trouble)
        return RequestState([sequence], told, self.scheduler.meter), told

    def play(self, *requests: RequestState, most: int = 400) -> None:
        """Turn the loop until all are done."""
        self.scheduler._waiting.extend(state for request in requests for state in request.sequences)
        while self.scheduler._waiting or self.scheduler._running:
            self.scheduler.step()
            most -= 1
            assert most, "the loop never ends"


def alone(index: int, in_trouble: bool = False, seam: str = "none") -> Any:
    """What a row says by itself, without any trouble, among the settings of a seam."""
    scene = Scene(Trouble(seam, RuntimeError, at=10**6))
    request, told = scene.row(index, in_trouble)
    scene.play(request)
    assert told.error is None
    return told.answer
