"""A request on its way: its sequences, their place in the queue, and what was sent of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from agentspec.draft_length import DraftLength
from agentspec.engine.metrics import Meter, outcome_of
from agentspec.engine.request import Delta
from agentspec.errors import RequestFailedError, RequestTimeoutError, cut
from agentspec.models.pass_cost import PassCost
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.sequence import FinishReason, Sequence
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import StepStats


class RequestState:
    """A request on its way: its sequences, and where their deltas go. Its time runs from its construction.

    Args:
        sequences: samples of the request.
        emit: takes deltas, or the exception that ended the request; called on the worker thread.
        meter: of the engine that serves the request.
        timeout_s: seconds that the request may take; None for no limit.
        priority: requests of a higher one leave the queue first.
        every_s: least seconds between deltas of a sample; its first and its last come at once. A caller that waits
            for the end alone need not be woken by every round. An error discards what was not sent before it.
        spent_s: part of ``timeout_s`` that is over already.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        emit: Callable[[Delta | BaseException], None],
        meter: Meter,
        timeout_s: float | None = None,
        priority: int = 0,
        every_s: float = 0.0,
        spent_s: float = 0.0,
    ) -> None:
        self.meter = meter
        self.priority = priority
        self.every_s = every_s
        self.timeout_s = timeout_s
        self.deadline = math.inf if timeout_s is None else time.perf_counter() + timeout_s - spent_s
        """End of its time, on the clock of ``time.perf_counter``."""
        self.sequences = [SequenceState(self, index, sequence) for index, sequence in enumerate(sequences)]
        self._emit = emit
        self.is_over = False
        self._unfinished = len(self.sequences)
        self._is_counted = False
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """What ended it, also where it could not be sent."""

    @property
    def is_done(self) -> bool:
        """Whether all its samples are finished, or it is over."""
        return self.is_over or not self._unfinished

    def cancel(self) -> None:
        """Cancel: the sequences leave before the next round. Thread-safe."""
        self.is_over = True

    def expire(self) -> None:
        """End the request with an error if its time is up."""
        if time.perf_counter() > self.deadline:
            self.fail(self.timeout_error())

    def timeout_error(self) -> RequestTimeoutError:
        """Return the error of a request whose time is up."""
        emitted = sum(state.sequence.length for state in self.sequences)
        return RequestTimeoutError(
            f"The request took longer than its timeout of {self.timeout_s:g} s; {emitted} tokens were emitted."
        )

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self.count("cancelled" if self.is_over else outcome_of(error))
        if not self.is_over:
            self.error = _raisable(error)
            self.emit(self.error)
        self.is_over = True

    def count(self, outcome: str) -> None:
        """Count the request, once. Thread-safe."""
        with self._lock:
            is_first, self._is_counted = not self._is_counted, True
        if is_first:
            self.meter.add_request(outcome)

    def count_sample(self, reason: FinishReason) -> None:
        """Count a finished sample, and the request with its last one."""
        self.meter.add_sample(reason)
        self._unfinished -= 1
        if not self._unfinished:
            self.count("completed")

    def emit(self, item: Delta | BaseException) -> None:
        """Send an item; a receiver that raises (its event loop is closed, say) cancels its own request alone."""
        try:
            self._emit(item)
        except BaseException as error:
            self.error = self.error or _raisable(error)
            self.cancel()


class SequenceState:
    """One sequence of a request, with the account of its time.

    Between the queue and its rounds the models compute its context, some tokens at a time. A sequence that returns to
    the queue goes on later from where it was.

    Args:
        request: that the sequence is a sample of.
        index: of the sample.
        sequence: at its start.
    """

    def __init__(self, request: RequestState, index: int, sequence: Sequence) -> None:
        self.request = request
        self.index = index
        self.sequence = sequence
        self.stats = StepStats(prompt_tokens=sequence.prompt_length)
        self.is_ready = False  # for rounds
        self._arrived = self._queued = time.perf_counter()
        self._read = 0  # tokens of the context that the models were given
        self._is_known = False  # to the models: their cached tokens of it were looked up
        self._sent_at = -math.inf
        self._sent_tokens = 0
        self._sent_text = 0  # characters

    def leave_queue(self) -> None:
        """Account for the time in the queue."""
        self._add_seconds(queue_s=time.perf_counter() - self._queued)

    def return_to_queue(self) -> None:
        """Give up the place for a request without one; the models may lose what they have cached of the sequence."""
        self.is_ready, self._read = False, 0
        self._queued = time.perf_counter()

    def prefill(self, decoder: SpeculativeDecoder, tokens: int) -> int:
        """Let the models compute up to ``tokens`` more of the context; return the number of tokens computed.

        The last token of the context is left to the first round, which feeds it.
        """
        started = time.perf_counter()
        context = self.sequence.context[:-1]
        cached = decoder.target.cached_tokens(context)
        if not self._is_known:
            self.stats.cached_tokens, self._is_known = cached, True
            self.stats.draft_cached_tokens = _draft_cached_tokens(decoder, context)
            self.request.meter.add_prompt(self.stats.prompt_tokens, cached)
        # A model without a cache reports no cached tokens: `_read` alone advances there.
        self._read = min(len(context), max(cached, self._read) + tokens)
        draft_s = decoder.prefill([context[: self._read]])["draft_prefill_s"]
        self.is_ready = self._read == len(context)
        target_s = time.perf_counter() - started - draft_s
        self._add_seconds(prefill_s=target_s, draft_prefill_s=draft_s)
        return self._read - cached

    def _add_seconds(self, **phases: float) -> None:
        """Account for seconds outside of rounds."""
        for phase, seconds in phases.items():
            self.stats.seconds[phase] += seconds
        self.request.meter.add_seconds(**phases)

    def report(self, draft_length: DraftLength) -> None:
        """Send what is new and settled, no more often than the request wants it.

        Args:
            draft_length: of the decoder that plays the rounds; its costs and remarks complete the last delta's stats.
        """
        sequence, finish_reason, now = self.sequence, self.sequence.finish_reason, time.perf_counter()
        if finish_reason is None and now - self._sent_at < self.request.every_s:
            return
        begin, (end, text) = self._sent_tokens, self._settled()
        tokens = sequence.context[sequence.prompt_length + begin : sequence.prompt_length + end]
        if not tokens and finish_reason is None:
            return
        self._sent_at = now
        self.stats.ttft_s = self.stats.ttft_s or now - self._arrived
        if finish_reason is not None:
            self._finish(finish_reason, draft_length, now)
        self.request.emit(
            Delta(
                self.index,
                tuple(tokens),
                text[self._sent_text :],
                tuple(sequence.logprobs[begin:end]),
                finish_reason,
                None if finish_reason is None else self.stats,  # complete: nothing is written to it from here on
                acceptance_rate=self.stats.acceptance_rate,
            )
        )
        self._sent_tokens, self._sent_text = end, len(text)

    def _settled(self) -> tuple[int, str]:
        """Return the number of settled tokens and their text; account for the time of decoding them."""
        timer = PhaseTimer()
        with timer("detokenize"):
            settled = self.sequence.settled_length, self.sequence.settled_text
        self._add_seconds(**timer.seconds)
        return settled

    def _finish(self, reason: FinishReason, draft_length: DraftLength, now: float) -> None:
        """Complete the stats and count the sample."""
        self.stats.total_s, self.stats.new_tokens = now - self._arrived, self.sequence.length
        self.stats.ended_at = time.time()
        cost = draft_length.target
        self.stats.plain_pass_s = None if cost is None else _plain_pass_s(self.stats, cost)
        self.stats.remarks = draft_length.remarks() if self.sequence.gamma is None else ()
        self.request.count_sample(reason)


def _raisable(error: BaseException) -> BaseException:
    """Return the error, or one that has it as its cause where it would end more than its request.

    ``SystemExit`` would end the caller's process. Generators and tasks give ``StopIteration`` another meaning.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    failed = RequestFailedError(
        f"The request was ended by {cut(repr(error))}, raised by what it runs (a logits_processor, a grammar, a "
        "model); other requests go on. Raise an ordinary exception there."
    )
    failed.__cause__ = error
    return failed


def _draft_cached_tokens(decoder: SpeculativeDecoder, context: list[int]) -> int | None:
    """Return how many tokens of the context every draft model has cached; None without a draft model."""
    return min((model.cached_tokens(context) for model in decoder.draft_models), default=None)


def _plain_pass_s(stats: StepStats, cost: PassCost) -> float | None:
    """Return the seconds of a target pass over one token at the pace of this step; None without passes.

    Each pass of the step counts with its seconds over the multiple of a plain pass that ``cost`` has for its width.
    """
    plain = sum(width_cost.seconds * cost(1, 1) / cost(1, width) for width, width_cost in stats.verify_costs.items())
    return plain / stats.rounds if stats.rounds else None
