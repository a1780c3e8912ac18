"""One request on its way: its sequences, what they are waiting for, and what has been told of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from agentspec.draft_length import DraftLength
from agentspec.drafters import Drafter
from agentspec.engine.metrics import Meter, outcome_of
from agentspec.errors import RequestFailedError, RequestTimeoutError, cut
from agentspec.models import cached_tokens
from agentspec.models.pass_cost import PassCost
from agentspec.sequence import FinishReason, Sequence, TokenLogprob
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import StepStats


@dataclass(frozen=True)
class Delta:
    """What a round, or several, added to one sample of a request.

    Args:
        index: of the sample.
        tokens: ids emitted since the last delta, settled: no later delta takes them back.
        text: their text.
        logprobs: one per token where they were asked for.
        finish_reason: set on the sample's last delta.
        stats: of the sample's whole step, on its last delta.
        invalid: on the last delta, why the whole text does not satisfy its schema, where that was to be checked.
        so_far: the account of the step that still goes on; the engine goes on writing to it.
    """

    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: StepStats | None = None
    invalid: str | None = None
    so_far: StepStats | None = field(default=None, compare=False, repr=False)


class RequestState:
    """A request on its way: its sequences, and where their deltas go.

    Args:
        sequences: the samples of the request.
        emit: takes deltas, or the exception that ended the request; called on the worker thread.
        timeout_s: seconds that the request may take from now on; None for no limit.
        priority: jobs of a higher one leave the queue first.
        every_s: seconds between deltas of a sample, at least; its first and its last come at once. Whoever only waits
            for the end need not be woken by every round. What was not sent before an error is lost.
        spent_s: of ``timeout_s``, seconds that are over already.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        emit: Callable[[Delta | BaseException], None],
        timeout_s: float | None = None,
        priority: int = 0,
        every_s: float = 0.0,
        spent_s: float = 0.0,
    ) -> None:
        self.priority = priority
        self.every_s = every_s
        self.timeout_s = timeout_s
        self._spent_s = spent_s
        self.deadline = math.inf
        """When its time is up, as ``time.perf_counter`` has it."""
        self.begin()
        self.members = [SequenceState(self, index, sequence) for index, sequence in enumerate(sequences)]
        self._emit = emit
        self.is_over = False
        self.meter = Meter()  # the scheduler's own, once the job is submitted
        self._unfinished = len(self.members)
        self._is_counted = False
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """What ended it, also where it could not be sent."""

    def begin(self) -> None:
        """Let its time run from now on: it may be queued later than it was made."""
        if self.timeout_s is not None:
            self.deadline = time.perf_counter() + self.timeout_s - self._spent_s

    @property
    def is_done(self) -> bool:
        """Whether all its samples are finished, or it is over."""
        return self.is_over or not self._unfinished

    def cancel(self) -> None:
        """Cancel: the sequences leave before the next round. Thread-safe."""
        self.is_over = True

    def expire(self) -> None:
        """End the request with an error where its time is up."""
        if time.perf_counter() > self.deadline:
            self.fail(self.timeout_error())

    def timeout_error(self) -> RequestTimeoutError:
        """Return the error of a request whose time is up."""
        emitted = sum(member.sequence.length for member in self.members)
        return RequestTimeoutError(
            f"The request took longer than its timeout of {self.timeout_s:g} s; {emitted} tokens were emitted."
        )

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        self.count("cancelled" if self.is_over else outcome_of(error))
        if not self.is_over:
            self.error = _raisable(error)
            self.send(self.error)
        self.is_over = True

    def count(self, outcome: str) -> None:
        """Count the request, once. Thread-safe."""
        with self._lock:
            is_first, self._is_counted = not self._is_counted, True
        if is_first:
            self.meter.add_request(outcome)

    def count_sample(self, reason: FinishReason) -> None:
        """Count a sample that is done, and the request with its last one."""
        self.meter.add_sample(reason)
        self._unfinished -= 1
        if not self._unfinished:
            self.count("completed")

    def send(self, item: Delta | BaseException) -> None:
        """Hand over; a receiver that raises (its event loop is closed, say) cancels its own job alone."""
        try:
            self._emit(item)
        except BaseException as error:
            self.error = self.error or _raisable(error)
            self.cancel()


class SequenceState:
    """One sequence of a job, with the account of its time.

    Between the queue and its rounds it lets the models compute its context, some tokens at a time; a member that is
    sent back to the queue goes on later from where it was.
    """

    def __init__(self, job: RequestState, index: int, sequence: Sequence) -> None:
        self.job = job
        self.index = index
        self.sequence = sequence
        self.stats = StepStats(prompt_tokens=sequence.prompt_length)
        self.is_ready = False  # for rounds
        self._arrived = self._queued = time.perf_counter()
        self._read = 0  # tokens of the context that the models were given
        self._is_known = False  # to the models: what they had cached of it was looked up
        self._draft_length: DraftLength | None = None
        self._told_at = -math.inf
        self._told_tokens = 0
        self._told_text = 0

    def leave_queue(self) -> None:
        """Its turn has come."""
        self._book(queue_s=time.perf_counter() - self._queued)

    def return_to_queue(self) -> None:
        """Others need the place more; what the models have cached of it may be lost."""
        self.is_ready, self._read = False, 0
        self._queued = time.perf_counter()

    def prefill(self, decoder: SpeculativeDecoder, tokens: int) -> int:
        """Let the models compute up to ``tokens`` more of the context; how many there were to compute.

        The last token of the context is left to the first round, which feeds it.
        """
        started = time.perf_counter()
        context = self.sequence.context[:-1]
        cached = cached_tokens(decoder.target, context)
        if not self._is_known:
            self.stats.cached_tokens, self._is_known = cached, True
            self.stats.draft_cached_tokens = _draft_cached_tokens(decoder, context)
            self.job.meter.add_prompt(self.stats.prompt_tokens, cached)
        self._read = min(len(context), max(cached, self._read) + tokens)  # a model without a cache knows nothing of it
        of_draft = decoder.prefill([context[: self._read]])["draft_prefill_s"]
        self.is_ready = self._read == len(context)
        of_target = time.perf_counter() - started - of_draft
        self._book(prefill_s=of_target, draft_prefill_s=of_draft)
        self._draft_length = decoder.draft_length
        return self._read - cached

    def _book(self, **phases: float) -> None:
        """Count seconds outside of rounds."""
        for phase, seconds in phases.items():
            self.stats.seconds[phase] += seconds
        self.job.meter.add_seconds(**phases)

    def tell(self) -> None:
        """Send what is new and settled, as often as the job wants it."""
        sequence, finished, now = self.sequence, self.sequence.finish_reason is not None, time.perf_counter()
        if not finished and now - self._told_at < self.job.every_s:
            return
        before = sequence.detokenize_seconds
        begin, end, text = self._told_tokens, sequence.settled_length, sequence.settled_text
        self._book(detokenize_s=sequence.detokenize_seconds - before)
        tokens = sequence.context[sequence.prompt_length + begin : sequence.prompt_length + end]
        if not (tokens or finished):
            return
        self._told_at = now
        since_arrival = now - self._arrived
        self.stats.ttft_s = self.stats.ttft_s or since_arrival
        self.stats.total_s, self.stats.new_tokens = since_arrival, sequence.length
        self.stats.ended_at = time.time()
        if finished and self._draft_length is not None:
            cost = self._draft_length.target
            self.stats.plain_pass_s = None if cost is None else _plain_pass_s(self.stats, cost)
            self.stats.remarks = self._draft_length.remarks() if sequence.gamma is None else ()
        if sequence.finish_reason is not None:
            self.job.count_sample(sequence.finish_reason)
        self.job.send(
            Delta(
                self.index,
                tuple(tokens),
                text[self._told_text :],
                tuple(sequence.logprobs[begin:end]),
                sequence.finish_reason,
                self.stats if finished else None,
                so_far=self.stats,
            )
        )
        self._told_tokens = end
        self._told_text = len(text)


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
    """Tokens of the context that every draft model need not compute again; None without a draft model."""
    models = decoder.drafter.models().values() if isinstance(decoder.drafter, Drafter) else ()
    return min((cached_tokens(model, context) for model in models), default=None)


def _plain_pass_s(stats: StepStats, cost: PassCost) -> float | None:
    """Seconds of a target pass over one token at the pace of this step: its own passes, each over the multiple of a
    plain pass that the table gives for its width; None without passes."""
    plain = sum(width_cost.seconds * cost(1, 1) / cost(1, width) for width, width_cost in stats.verify_costs.items())
    return plain / stats.rounds if stats.rounds else None
