"""The engine seam: requests in, completions or deltas out; and the engine of this process."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

from agentspec.engine.admission import Admission
from agentspec.engine.metrics import EngineMetrics
from agentspec.engine.request import Completion, Request
from agentspec.engine.scheduler import MOST_WAITING, Scheduler
from agentspec.engine.state import Delta, RequestState
from agentspec.engine.validation import Check
from agentspec.engine.waiting import AsyncMailbox, Mailbox, Watch
from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import GrammarEngine
from agentspec.models import CachingModel, PaddedModel
from agentspec.models import end_tokens as model_end_tokens
from agentspec.sequence import Sequence
from agentspec.speculative import SpeculativeDecoder

UNCACHED_ROWS = 64
"""Sequences that share a round of a target without a cache."""


class LocalEngine:
    """An engine over a decoder in this process, with one worker thread that owns the models.

    Args:
        decoder: target, drafter and their defaults.
        tokenizer: gives text, end tokens and grammars; None where only ids are asked for.
        end_tokens: ids that end every sequence; None for those of the tokenizer and the checkpoint.
        max_running: most sequences that share a round; None for as many as the target keeps cached.
        grammar_engine: makes the masks of grammars, where a request does not name its own.
        max_waiting: most samples that wait for a place in a round; more raise ``EngineBusyError``.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: Any = None,
        *,
        end_tokens: Collection[int] | None = None,
        max_running: int | None = None,
        grammar_engine: GrammarEngine = "auto",
        max_waiting: int = MOST_WAITING,
    ) -> None:
        if not isinstance(max_waiting, int) or max_waiting < 1:
            raise InvalidRequestError(f"max_waiting is a number of sequences, 1 or more; got {shown(max_waiting)}.")
        self.decoder = decoder
        self.tokenizer = tokenizer
        if end_tokens is None:
            # The model's own count only beside its tokenizer: without one nobody asked for an end.
            end_tokens = () if tokenizer is None else {*_end_tokens(tokenizer), *model_end_tokens(decoder.target)}
        if tokenizer is not None and isinstance(decoder.target, PaddedModel):
            decoder.target.narrow(min(decoder.target.vocab_size, max(tokenizer.get_vocab().values()) + 1))
        self._admission = Admission(decoder, tokenizer, end_tokens, grammar_engine)
        rows = decoder.target.max_rows if isinstance(decoder.target, CachingModel) else UNCACHED_ROWS
        self._scheduler = Scheduler(decoder, rows if max_running is None else max_running, max_waiting=max_waiting)
        self.identity = uuid.uuid4().hex
        """Tells this engine's answers from those of any other, in this process or another."""
        self._finalizer = weakref.finalize(self, self._scheduler.close)

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode all requests together; per request, its samples in order.

        Raises:
            InvalidRequestError: for a request that cannot be served; before any is started.
            EngineBusyError: where more samples would wait than the engine lets wait; before any is started.
            EngineStuckError: where the worker does not end a request whose time is up.
            EngineClosedError: where the engine is closed.
        """
        if isinstance(requests, Request):
            raise InvalidRequestError("generate takes a list of requests, got a single one; put it into a list.")
        self._scheduler.check_room(sum(request.n for request in requests))
        checks, boxes = [Check(request) for request in requests], [Mailbox() for _ in requests]
        jobs = [self._job(request, box.put, math.inf) for request, box in zip(requests, boxes, strict=True)]
        for job in jobs:
            job.begin()  # together: the time of one is not spent on the grammar of another
        watch = Watch(self._scheduler, jobs)
        try:
            self._scheduler.submit(*jobs)
            return [_collect(*waiting, watch) for waiting in zip(requests, jobs, boxes, checks, strict=True)]
        finally:
            for job in jobs:
                job.cancel()

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Deltas as they settle; of all samples, in the order they come. Closing the iterator cancels the request.

        Args:
            request: what is asked for.
            every_s: seconds between deltas of a sample, at least; its first and its last come at once. Each wakes
                whoever reads them, on a processor that the model could use.

        Raises:
            InvalidRequestError: for a request that cannot be served; at the call, before any compute.
        """
        _expect_seconds(every_s)
        self._scheduler.check_room(request.n)
        box = Mailbox()
        return self._stream(self._job(request, box.put, every_s), box, Check(request))

    def _stream(self, job: RequestState, box: Mailbox, check: Check) -> Iterator[Delta]:
        job.begin()
        self._scheduler.submit(job)
        watch = Watch(self._scheduler, [job])
        try:
            unfinished = len(job.members)
            while unfinished:
                delta = check(box.get(job, watch))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            job.cancel()

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """``stream`` for an event loop, which is never blocked. Cancelling the task cancels the request.

        Raises:
            InvalidRequestError: for a request that cannot be served; with the first delta, before any compute.
        """
        _expect_seconds(every_s)
        return self._astream(request, every_s)

    async def _astream(self, request: Request, every_s: float) -> AsyncGenerator[Delta, None]:
        self._scheduler.check_room(request.n)
        box, check = AsyncMailbox(), Check(request)
        job = await asyncio.to_thread(self._job, request, box.put, every_s)  # compiling a grammar takes its time
        self._scheduler.submit(job)
        watch = Watch(self._scheduler, [job])
        try:
            unfinished = len(job.members)
            while unfinished:
                delta = await check.in_thread(await box.get(job, watch))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            job.cancel()

    def _job(self, request: Request, emit: Callable[[Delta | BaseException], None], every_s: float) -> RequestState:
        """A request as a job. Its time begins with this call: making its sequences counts."""
        began = time.perf_counter()
        sequences = self._sequences(request)
        spent = time.perf_counter() - began
        return RequestState(sequences, emit, request.timeout_s, request.priority, every_s, spent)

    def metrics(self) -> EngineMetrics:
        """What this engine did since it was made; see ``agentspec.engine.prometheus``. From any thread."""
        return self._scheduler.metrics()

    def close(self) -> None:
        """End the worker thread; requests on their way end with ``EngineClosedError``. May be called again.

        A worker that is stuck is waited for ``scheduler.CLOSE_S`` seconds, and then left, with a logged warning.
        """
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests: after ``close``, or in a child that was forked while it served some."""
        return not self._finalizer.alive or self._scheduler.is_closed

    def _sequences(self, request: Request) -> list[Sequence]:
        """The samples of a request, at their start. All that can be wrong with it is found here."""
        return self._admission(request)


def _expect_seconds(every_s: float) -> None:
    if not isinstance(every_s, int | float) or not every_s >= 0:
        raise InvalidRequestError(f"every_s must be a number of seconds >= 0, got {shown(every_s)}.")


def _end_tokens(tokenizer: Any) -> list[int]:
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [end]


def _collect(request: Request, job: RequestState, box: Mailbox, check: Check, watch: Watch) -> list[Completion]:
    """Wait for all samples of a request."""
    deltas: list[list[Delta]] = [[] for _ in range(request.n)]
    unfinished = request.n
    while unfinished:
        delta = check(box.get(job, watch))
        deltas[delta.index].append(delta)
        unfinished -= delta.finish_reason is not None
    return [_completion(parts, request.params.logprobs is not None) for parts in deltas]


def _completion(parts: list[Delta], with_logprobs: bool) -> Completion:
    last = parts[-1]
    if last.finish_reason is None or last.stats is None:
        raise RuntimeError(f"The last delta of a sample must carry its finish reason and stats, got {last}.")
    return Completion(
        last.index,
        tuple(token for part in parts for token in part.tokens),
        "".join(part.text for part in parts),
        last.finish_reason,
        tuple(entry for part in parts for entry in part.logprobs) if with_logprobs else None,
        last.stats,
        last.invalid,
    )
