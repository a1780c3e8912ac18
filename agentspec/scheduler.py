"""The one worker loop: who is in the next round.

Sequences join and leave at round boundaries. Each belongs to a ``Job``, one request on its way, which hands what it
learns to whoever waits for it. Only the worker thread touches models and sequences.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from agentspec.errors import EngineClosedError, InvalidRequestError, RequestTimeoutError
from agentspec.models import cached_tokens
from agentspec.sequence import Batch, FinishReason, Sequence, TokenLogprob
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import RoundStats, StepStats


@dataclass(frozen=True)
class Delta:
    """What a round added to one sample of a request.

    Args:
        index: of the sample.
        tokens: ids emitted since the last delta, settled: no later delta takes them back.
        text: their text.
        logprobs: one per token where they were asked for.
        finish_reason: set on the sample's last delta.
        stats: of the sample's whole step, on its last delta.
        invalid: on the last delta, why the whole text does not satisfy its schema, where that was to be checked.
    """

    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: StepStats | None = None
    invalid: str | None = None


class Job:
    """A request on its way: its sequences, and where their deltas go.

    Args:
        sequences: the samples of the request.
        emit: takes deltas, or the exception that ended the request; called on the worker thread.
        timeout_s: seconds that the request may take from now on; None for no limit.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        emit: Callable[[Delta | BaseException], None],
        timeout_s: float | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._arrived = time.perf_counter()
        self.members = [_Member(self, index, sequence) for index, sequence in enumerate(sequences)]
        self._emit = emit
        self.is_over = False

    def cancel(self) -> None:
        """Nobody waits any more: the sequences leave before the next round. May be called from any thread."""
        self.is_over = True

    def expire(self) -> None:
        """End the request with an error where its time is up."""
        if self._timeout_s is not None and time.perf_counter() - self._arrived > self._timeout_s:
            emitted = sum(member.sequence.length for member in self.members)
            self.fail(
                RequestTimeoutError(
                    f"The request took longer than its timeout of {self._timeout_s:g} s; {emitted} tokens were emitted."
                )
            )

    def fail(self, error: BaseException) -> None:
        """End the request with an error."""
        if not self.is_over:
            self.send(error)
        self.is_over = True

    def send(self, item: Delta | BaseException) -> None:
        """Hand over; a receiver that is gone (its event loop closed, say) cancels the job, and nobody else."""
        try:
            self._emit(item)
        except Exception:
            self.cancel()


class _Member:
    """One sequence of a job, with the account of its time."""

    def __init__(self, job: Job, index: int, sequence: Sequence) -> None:
        self.job = job
        self.index = index
        self.sequence = sequence
        self.stats = StepStats(prompt_tokens=sequence.prompt_length)
        self._arrived = time.perf_counter()
        self._told_tokens = 0
        self._told_text = 0

    def admit(self, decoder: SpeculativeDecoder) -> None:
        """Leave the queue: let the models compute the prompt but its last token, which the first round feeds."""
        started = time.perf_counter()
        self.stats.seconds["queue_s"] = started - self._arrived
        self.stats.cached_tokens = cached_tokens(decoder.target, self.sequence.context[:-1])
        decoder.prefill([self.sequence.context[:-1]])
        self.stats.seconds["prefill_s"] = time.perf_counter() - started

    def tell(self) -> None:
        """Send what is new and settled."""
        sequence, finished = self.sequence, self.sequence.finish_reason is not None
        tokens, text = sequence.tokens[self._told_tokens : sequence.settled_length], sequence.settled_text
        if not (tokens or finished):
            return
        since_arrival = time.perf_counter() - self._arrived
        self.stats.ttft_s = self.stats.ttft_s or since_arrival
        self.stats.total_s, self.stats.new_tokens = since_arrival, sequence.length
        self.stats.ended_at = time.time()
        self.job.send(
            Delta(
                self.index,
                tuple(tokens),
                text[self._told_text :],
                tuple(sequence.logprobs[self._told_tokens : self._told_tokens + len(tokens)]),
                sequence.finish_reason,
                self.stats if finished else None,
            )
        )
        self._told_tokens += len(tokens)
        self._told_text = len(text)


class Scheduler:
    """Owns the worker thread, and with it the models.

    Args:
        decoder: plays the rounds.
        max_running: most sequences in a round; others wait their turn.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_running: int) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._wake = threading.Condition()
        self._waiting: deque[_Member] = deque()
        self._running: list[_Member] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue the sequences of a job.

        Raises:
            EngineClosedError: after ``close``.
        """
        with self._wake:
            if self._closed:
                raise EngineClosedError("The engine is closed; make a new one to go on.")
            self._waiting.extend(job.members)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentspec", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """End the worker after the round in progress; requests still on their way get ``EngineClosedError``."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        cause: BaseException = EngineClosedError("The engine was closed before the request was done.")
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._waiting or self._running)
                    if self._closed:
                        break
                self.step()
        except BaseException as error:  # a SystemExit in somebody's processor, say: nobody may wait for ever
            cause = EngineClosedError(f"The engine's worker was ended by {error!r}; make a new engine to go on.")
            cause.__cause__ = error
        with self._wake:
            self._closed = True
            left = [*self._running, *self._waiting]
        for member in left:
            member.job.fail(cause)

    def step(self) -> None:
        """One turn of the loop: those who left leave, those who fit join, and everyone gets a round."""
        for member in [*self._running, *self._waiting]:
            member.job.expire()
        self._running = [m for m in self._running if not m.job.is_over]
        while self._waiting and len(self._running) < self._max_running:
            self._admit(self._waiting.popleft())
        for _, group in itertools.groupby(
            sorted(self._running, key=lambda m: m.sequence.acceptance), key=lambda m: m.sequence.acceptance
        ):
            self._round(list(group))
        self._running = [m for m in self._running if m.sequence.finish_reason is None and not m.job.is_over]

    def _admit(self, member: _Member) -> None:
        if member.job.is_over:
            return
        try:
            member.admit(self._decoder)
        except Exception as error:
            member.job.fail(error)
        except BaseException:
            self._waiting.appendleft(member)  # the worker ends, and tells all who wait
            raise
        else:
            self._running.append(member)

    def _round(self, members: list[_Member]) -> None:
        """A round for sequences of one acceptance rule. What goes wrong in it is theirs alone.

        A request that turns out to be impossible (its grammar or processor leaves no token) must not take its mates
        along: the round changed nothing, so each plays it again by itself.
        """
        members = [m for m in members if not m.job.is_over]
        if not members:
            return
        lengths = [m.sequence.length for m in members]
        try:
            stats: RoundStats = self._decoder.round(Batch([m.sequence for m in members], self._decoder.device))
            for member, row in zip(members, stats.rows, strict=True):
                member.stats.add_round(row, stats.seconds)
                member.tell()
        except Exception as error:
            untouched = [m for m, n in zip(members, lengths, strict=True) if m.sequence.length == n]
            if isinstance(error, InvalidRequestError) and len(members) > 1 and untouched == members:
                for member in members:
                    self._round([member])
            else:
                for member in members:
                    member.job.fail(error)
