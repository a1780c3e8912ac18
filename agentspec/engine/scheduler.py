"""The worker loop: choose the sequences of the next round, and play it.

Sequences join and leave at round boundaries. Each belongs to a ``RequestState``, which sends deltas to its caller. Only
the worker thread touches models and sequences.

Chunked prefill: at most ``prefill_tokens`` prompt tokens run between two rounds. Fair batch slots: while one request
has no slot and another has twice its share, the other gives one up, and goes on later from where it was.

A fault in a round fails the request that has it alone (``agentspec.engine.rounds``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable
from weakref import WeakSet

import torch

from agentspec.engine.metrics import EngineMetrics, Meter
from agentspec.engine.rounds import Rounds
from agentspec.engine.state import RequestState, SequenceState
from agentspec.engine.worker_status import IDLE, WorkerStatus
from agentspec.errors import EngineBusyError, EngineClosedError, InvalidRequestError, shown
from agentspec.rng import Acceptance
from agentspec.runtime.thread_budget import BUDGET
from agentspec.runtime.threads import in_forked_child, lock_of
from agentspec.speculative import SpeculativeDecoder

MOST_WAITING = 16_384
"""Most sequences that wait for a batch slot, by default."""

CLOSE_S = 10.0
"""Seconds that ``close`` waits for the worker."""

_CLOSED = "The engine is closed; make a new one to go on."
_FORKED = (
    "This process was forked from one whose engine was serving requests, or uses CUDA: neither its worker thread nor a "
    "pass that was under way exist here. Load the model after the fork (gunicorn without --preload, Celery's "
    "worker_process_init signal, multiprocessing with the 'spawn' start method), or fork while no request is served."
)
_log = logging.getLogger("agentspec")


class Scheduler:
    """Owns the worker thread, and with it the models.

    Args:
        decoder: plays the rounds.
        max_running: most sequences in a round (batch slots); others wait.
        prefill_tokens: most tokens of new prompts that are computed between two rounds.
        max_waiting: most sequences that wait for a slot.
        vocab_size: ids from this on are no tokens; None for all that the target has logits of.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        max_running: int,
        prefill_tokens: int = 256,
        max_waiting: int = MOST_WAITING,
        vocab_size: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._waiting: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self.meter = Meter()
        self._rounds = Rounds(decoder, self.meter, vocab_size)
        self._closed = False
        self._why_closed = _CLOSED
        self.status = WorkerStatus()
        _schedulers.add(self)

    @property
    def _thread(self) -> threading.Thread | None:
        return self.status.thread

    @property
    def is_closed(self) -> bool:
        """Whether the scheduler refuses requests."""
        return self._closed

    def submit(self, *requests: RequestState) -> None:
        """Queue the sequences of all requests, or of none.

        Raises:
            EngineClosedError: after ``close``.
            EngineBusyError: if too many would wait.
            InvalidRequestError: on the worker thread itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                "A request from the engine's own worker thread (from a logits_processor, say) would wait for itself; "
                "ask from another thread."
            )
        states = [state for request in requests for state in request.sequences]
        with self._wake:
            self.check_room(len(states))
            self._waiting.extend(states)
            if self._thread is None:
                self.status.thread = threading.Thread(target=self._run, name="agentspec", daemon=True)
                self.status.thread.start()
            self._wake.notify()

    def check_room(self, count: int) -> None:
        """Check that ``count`` more sequences may wait.

        Raises:
            EngineClosedError: after ``close``.
            EngineBusyError: if they would be too many.
        """
        if self._closed:
            raise EngineClosedError(self._why_closed)
        if len(self._waiting) + count > self._max_waiting:
            raise EngineBusyError(
                f"{len(self._waiting):,} samples wait for a batch slot already; {count:,} more would exceed the bound "
                f"of {self._max_waiting:,}. Try again later or with fewer at once, or raise the engine's max_waiting."
            )

    def metrics(self) -> EngineMetrics:
        """Return the counters until now. Thread-safe."""
        with self._wake:
            return self.meter.read(len(self._running), len(self._waiting), self._max_running)

    def check_alive(self) -> None:
        """Check that there is a worker to wait for.

        Raises:
            EngineClosedError: if it has ended, or runs only in the process that forked this one.
        """
        if not self.status.is_alive:
            raise EngineClosedError(self._why_closed if self._closed else f"The engine's worker is gone. {_CLOSED}")

    def close(self) -> None:
        """End the worker after the round in progress; requests still on their way get ``EngineClosedError``.

        Wait for the worker up to ``CLOSE_S`` seconds: one that is stuck is left, with a warning that names its stack.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            where = self.status.describe()
            _log.warning("The engine's worker did not end within %g s of close(), and is left. %s", CLOSE_S, where)
            self._fail_all(EngineClosedError(f"The engine was closed while its worker was stuck. {where}"))

    def _run(self) -> None:
        cause: BaseException = EngineClosedError("The engine was closed before the request was done.")
        try:
            while True:
                self.status.enter(IDLE)
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._waiting or self._running)
                    if self._closed:
                        break
                self.meter.threads = BUDGET.apply() if self._decoder.fits_any_threads else torch.get_num_threads()
                self.step()
        except BaseException as error:  # a fault of the loop itself: no caller may wait forever
            cause = EngineClosedError(f"The engine's worker was ended by {shown(error)}; make a new engine to go on.")
            cause.__cause__ = error
            self._why_closed = str(cause)
        with self._wake:
            self._closed = True
        self._fail_all(cause)

    def _fail_all(self, cause: BaseException) -> None:
        with self._wake:
            left = [*self._running, *self._waiting]
        for state in left:
            state.request.fail(cause)

    def step(self) -> None:
        """Run one turn of the loop: drop what is over, fill the slots, read some of the prompts, play a round."""
        self.status.enter("choosing the next round")
        self._running = _drop_over(self._running)
        if self._waiting:
            gone = set(self._waiting) - set(_drop_over(self._waiting))
            with self._wake:
                self._waiting = [state for state in self._waiting if state not in gone]
            self._share()
            self._admit()
        with lock_of(self._decoder):  # engines may share one
            self._prefill()
            self._play()
        self._running = _drop_over([state for state in self._running if state.sequence.finish_reason is None])

    def _play(self) -> None:
        """Play a round for each acceptance rule among the sequences that are ready."""
        batches: dict[Acceptance, list[SequenceState]] = {}
        for state in self._running:
            if state.is_ready:
                batches.setdefault(state.sequence.acceptance, []).append(state)
        for batch in batches.values():
            self.status.enter(f"in a round of {len(batch)} sequences")
            self._rounds.play(batch)

    def _share(self) -> None:
        """Take slots from a request that has twice its share, for requests that have none."""
        slots = Counter(state.request for state in self._running)
        starving = {state.request for state in self._waiting} - slots.keys()
        share = self._max_running / max(1, len(starving) + len(slots))
        needed = len(starving) - (self._max_running - len(self._running))
        for _ in range(needed):
            request, count = max(slots.items(), key=lambda item: item[1], default=(None, 0))
            if request is None or count < 2 or count < 2 * share:
                return
            last = [state for state in self._running if state.request is request][-1]
            last.return_to_queue()
            slots[request] -= 1
            self._running.remove(last)
            with self._wake:
                self._waiting.append(last)

    def _admit(self) -> None:
        """Fill the free slots: by priority, then for the request with the fewest slots, then in order of arrival."""
        slots = Counter(state.request for state in self._running)
        with self._wake:
            while self._waiting and len(self._running) < self._max_running:
                first = min(self._waiting, key=lambda state: (-state.request.priority, slots[state.request]))
                self._waiting.remove(first)
                self._running.append(first)
                first.leave_queue()
                slots[first.request] += 1

    def _prefill(self) -> None:
        """Read on in the prompts of sequences that are not ready, in order, up to ``prefill_tokens`` in all."""
        left = self._prefill_tokens
        for state in self._running:
            if left <= 0:
                return
            if state.is_ready or state.request.is_over:
                continue
            self.status.enter("reading prompts")
            try:
                left -= state.prefill(self._decoder, left)
            except BaseException as error:
                state.request.fail(error)

    def wake_in_child(self) -> None:
        """Begin anew in a forked child: the worker and the holders of locks stayed in the parent.

        An idle engine starts another worker with its next request. A busy one is closed.
        """
        is_idle = self.status.is_idle and not self._running and not self._waiting
        self._wake = threading.Condition()
        self.meter.renew_lock()
        if self._thread is None:
            return
        self._running, self._waiting = [], []
        if not self._closed and (not is_idle or self._decoder.device.type == "cuda"):
            self._closed, self._why_closed = True, _FORKED
        self.status = WorkerStatus()


_schedulers: WeakSet[Scheduler] = WeakSet()


def _wake_in_child() -> None:
    for scheduler in list(_schedulers):
        scheduler.wake_in_child()


in_forked_child(_wake_in_child)


def _drop_over(states: Iterable[SequenceState]) -> list[SequenceState]:
    """Return the sequences whose requests go on; end those whose time is up, and count those that were cancelled."""
    left = []
    for state in states:
        state.request.expire()
        if state.request.is_over:
            state.request.count("cancelled")
        else:
            left.append(state)
    return left
