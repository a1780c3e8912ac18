"""The engine of this process."""

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
from agentspec.engine.request import Completion, Delta, Request
from agentspec.engine.scheduler import MOST_WAITING, Scheduler
from agentspec.engine.state import RequestState
from agentspec.engine.validation import Check
from agentspec.engine.waiting import AsyncMailbox, Mailbox, Watch
from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import GrammarEngine
from agentspec.models import LanguageModel
from agentspec.speculative import SpeculativeDecoder


class LocalEngine:
    """An engine over a decoder in this process, with one worker thread that owns the models.

    Args:
        decoder: target, drafter and their defaults.
        tokenizer: gives text, end tokens and grammars; None for an engine of ids alone.
        end_tokens: ids that end every sequence; None for those of the tokenizer and the checkpoint.
        max_running: most sequences that share a round; None for as many as the target keeps cached.
        grammar_engine: computes the masks of grammars, unless a request names its own.
        max_waiting: most samples that wait for a batch slot; more raise ``EngineBusyError``.
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
            # The checkpoint's end tokens count only beside its tokenizer: an engine of ids decodes to max_tokens.
            end_tokens = () if tokenizer is None else {*_end_tokens(tokenizer), *decoder.target.end_token_ids}
        vocab_size = _vocab_size(decoder.target, tokenizer)
        self._admission = Admission(decoder, tokenizer, end_tokens, grammar_engine, vocab_size)
        running = decoder.target.max_running if max_running is None else max_running
        self._scheduler = Scheduler(decoder, running, max_waiting=max_waiting, vocab_size=vocab_size)
        self.identity = uuid.uuid4().hex
        """Distinguishes this engine's answers from those of any other, in this process or another."""
        self._finalizer = weakref.finalize(self, self._scheduler.close)

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode all requests together; return the samples of each, in order.

        Raises:
            InvalidRequestError: for a request that cannot be served; before any is started.
            EngineBusyError: for more samples than may wait; before any is started.
            EngineStuckError: if the worker does not end a request whose time is up.
            EngineClosedError: if the engine is closed.
        """
        if isinstance(requests, Request):
            raise InvalidRequestError("generate takes a list of requests, got a single one; put it into a list.")
        self._scheduler.check_room(sum(request.n for request in requests))
        # Prepare all before the first begins: the time of one request is not spent on the grammar of another.
        prepared = [_Prepared(self._admission, request) for request in requests]
        boxes = [Mailbox() for _ in requests]
        states = [self._begin(one, box.put, math.inf) for one, box in zip(prepared, boxes, strict=True)]
        watch = Watch(self._scheduler, states)
        try:
            self._scheduler.submit(*states)
            return [_collect(*parts, watch) for parts in zip(prepared, states, boxes, strict=True)]
        finally:
            for state in states:
                state.cancel()

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Yield deltas as they settle, of all samples in the order they come. Closing the iterator cancels the request.

        Args:
            request: description of what to decode.
            every_s: least seconds between deltas of a sample; its first and its last come at once. Each delta wakes
                its reader, on a processor that the model could use.

        Raises:
            InvalidRequestError: for a request that cannot be served; at the call, before any compute.
        """
        _check_seconds(every_s)
        self._scheduler.check_room(request.n)
        return self._stream(_Prepared(self._admission, request), every_s)

    def _stream(self, prepared: _Prepared, every_s: float) -> Iterator[Delta]:
        box = Mailbox()
        state = self._begin(prepared, box.put, every_s)
        self._scheduler.submit(state)
        watch = Watch(self._scheduler, [state])
        try:
            unfinished = prepared.request.n
            while unfinished:
                delta = prepared.check(box.get(state, watch))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            state.cancel()

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of ``stream`` without ever blocking the event loop. Cancelling the task cancels the request.

        Raises:
            InvalidRequestError: for a request that cannot be served; with the first delta, before any compute.
        """
        _check_seconds(every_s)
        return self._astream(request, every_s)

    async def _astream(self, request: Request, every_s: float) -> AsyncGenerator[Delta, None]:
        self._scheduler.check_room(request.n)
        box = AsyncMailbox()
        prepared = await asyncio.to_thread(_Prepared, self._admission, request)  # compiling a grammar takes its time
        state = self._begin(prepared, box.put, every_s)
        self._scheduler.submit(state)
        watch = Watch(self._scheduler, [state])
        try:
            unfinished = request.n
            while unfinished:
                delta = await prepared.check.in_thread(await box.get(state, watch))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            state.cancel()

    def _begin(
        self, prepared: _Prepared, emit: Callable[[Delta | BaseException], None], every_s: float
    ) -> RequestState:
        """Let the time of a request run."""
        request = prepared.request
        return RequestState(
            prepared.sequences,
            emit,
            self._scheduler.meter,
            request.timeout_s,
            request.priority,
            every_s,
            prepared.seconds,
        )

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was made (see ``agentspec.engine.prometheus``). Thread-safe."""
        return self._scheduler.metrics()

    def close(self) -> None:
        """End the worker thread; requests on their way end with ``EngineClosedError``. May be called again.

        A worker that is stuck is left after ``scheduler.CLOSE_S`` seconds, with a logged warning.
        """
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        """Whether the engine refuses requests: after ``close``, or in a child forked while it served some."""
        return not self._finalizer.alive or self._scheduler.is_closed


class _Prepared:
    """A request with its sequences and its check, and the seconds that making them took: they count for its timeout.

    Raises:
        InvalidRequestError: for a request that cannot be served.
        EngineStuckError: for a grammar that takes longer to compile than the request may take.
    """

    def __init__(self, admission: Admission, request: Request) -> None:
        began = time.perf_counter()
        self.request = request
        self.check = Check(request)
        self.sequences = admission(request)
        self.seconds = time.perf_counter() - began


def _check_seconds(every_s: float) -> None:
    if not isinstance(every_s, int | float) or not every_s >= 0:
        raise InvalidRequestError(f"every_s must be a number of seconds >= 0, got {shown(every_s)}.")


def _vocab_size(target: LanguageModel, tokenizer: Any) -> int:
    """Return how many ids are tokens: a padded head has logits of more than the tokenizer knows."""
    known = target.vocab_size if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
    return min(known, target.vocab_size)


def _end_tokens(tokenizer: Any) -> list[int]:
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [end]


def _collect(prepared: _Prepared, state: RequestState, box: Mailbox, watch: Watch) -> list[Completion]:
    """Wait for all samples of a request."""
    unfinished = prepared.request.n
    deltas: list[list[Delta]] = [[] for _ in range(unfinished)]
    while unfinished:
        delta = prepared.check(box.get(state, watch))
        deltas[delta.index].append(delta)
        unfinished -= delta.finish_reason is not None
    return [_completion(parts, prepared.request.params.logprobs is not None) for parts in deltas]


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
