"""The one worker loop: who is in the next round.

Sequences join and leave at round boundaries. Each belongs to a ``RequestState``, which hands what it
learns to whoever waits for it. Only the worker thread touches models and sequences.

Nobody waits for long prompts: of those that are read, a bounded number of tokens comes between two rounds. Nobody
waits for long requests: where one has no place and another has twice its share, the other gives one up, and goes on
later from where it was.

What goes wrong in a round is its row's alone (``agentspec.engine.rounds``).
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
"""Sequences that wait for a place at most, by default."""

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
        max_running: most sequences in a round; others wait their turn.
        prefill_tokens: most tokens of new prompts that are computed between two rounds.
        max_waiting: most sequences that wait for a place.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        max_running: int,
        prefill_tokens: int = 256,
        max_waiting: int = MOST_WAITING,
    ) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._waiting: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._meter = Meter()
        self._rounds = Rounds(decoder, self._meter)
        self._closed = False
        self._why_closed = _CLOSED
        self.status = WorkerStatus()
        _schedulers.add(self)

    @property
    def _thread(self) -> threading.Thread | None:
        return self.status.thread

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed

    def submit(self, *jobs: RequestState) -> None:
        """Queue the sequences of jobs, of all or of none.

        Raises:
            EngineClosedError: after ``close``.
            EngineBusyError: where too many would wait.
            InvalidRequestError: on the worker thread itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                "A request from the engine's own worker thread (from a logits_processor, say) would wait for itself; "
                "ask from another thread."
            )
        members = [member for job in jobs for member in job.members]
        with self._wake:
            self.check_room(len(members))
            for job in jobs:
                job.meter = self._meter
            self._waiting.extend(members)
            if self._thread is None:
                self.status.thread = threading.Thread(target=self._run, name="agentspec", daemon=True)
                self.status.thread.start()
            self._wake.notify()

    def check_room(self, count: int) -> None:
        """Make sure that so many more sequences may wait.

        Raises:
            EngineClosedError: after ``close``.
            EngineBusyError: where they would be too many.
        """
        if self._closed:
            raise EngineClosedError(self._why_closed)
        if len(self._waiting) + count > self._max_waiting:
            raise EngineBusyError(
                f"{len(self._waiting):,} samples wait for a place already; {count:,} more would be above the bound of "
                f"{self._max_waiting:,}. Ask again later or for fewer at once, or raise the engine's max_waiting."
            )

    def metrics(self) -> EngineMetrics:
        """What was done so far; may be called from any thread."""
        with self._wake:
            return self._meter.read(len(self._running), len(self._waiting), self._max_running)

    def check_alive(self) -> None:
        """Make sure that there is a worker to wait for.

        Raises:
            EngineClosedError: where there is none: it was ended, or stayed behind in the process that forked this one.
        """
        if not self.status.is_alive:
            raise EngineClosedError(self._why_closed if self._closed else f"The engine's worker is gone. {_CLOSED}")

    def close(self) -> None:
        """End the worker after the round in progress; requests still on their way get ``EngineClosedError``.

        Waits for the worker, but ``CLOSE_S`` seconds at most: one that is stuck is left behind, with a warning that
        says where it is.
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
                self._meter.threads = BUDGET.apply() if self._decoder.fits_any_threads else torch.get_num_threads()
                self.step()
        except BaseException as error:  # a fault of the loop itself: no caller may wait for ever
            cause = EngineClosedError(f"The engine's worker was ended by {shown(error)}; make a new engine to go on.")
            cause.__cause__ = error
            self._why_closed = str(cause)
        with self._wake:
            self._closed = True
        self._fail_all(cause)

    def _fail_all(self, cause: BaseException) -> None:
        with self._wake:
            left = [*self._running, *self._waiting]
        for member in left:
            member.job.fail(cause)

    def step(self) -> None:
        """One turn of the loop: those who left leave, those who fit join, some of their prompts is read, and everyone
        who is ready gets a round."""
        self.status.enter("choosing the next round")
        self._running = _wanted(self._running)
        if self._waiting:
            gone = set(self._waiting) - set(_wanted(self._waiting))
            with self._wake:
                self._waiting = [m for m in self._waiting if m not in gone]
            self._share()
            self._admit()
        with lock_of(self._decoder):  # engines may share one
            self._prefill()
            self._play()
        self._running = _wanted([m for m in self._running if m.sequence.finish_reason is None])

    def _play(self) -> None:
        """A round for each acceptance rule that there is among those who are ready."""
        groups: dict[Acceptance, list[SequenceState]] = {}
        for member in self._running:
            if member.is_ready:
                groups.setdefault(member.sequence.acceptance, []).append(member)
        for group in groups.values():
            self.status.enter(f"in a round of {len(group)} sequences")
            self._rounds.play(group)

    def _share(self) -> None:
        """Take places from a job that has twice its share, for jobs that have none."""
        places = Counter(m.job for m in self._running)
        starving = {m.job for m in self._waiting} - places.keys()
        share = self._max_running / max(1, len(starving) + len(places))
        needed = len(starving) - (self._max_running - len(self._running))
        for _ in range(needed):
            job, count = max(places.items(), key=lambda item: item[1], default=(None, 0))
            if job is None or count < 2 or count < 2 * share:
                return
            member = [m for m in self._running if m.job is job][-1]
            member.return_to_queue()
            places[job] -= 1
            self._running.remove(member)
            with self._wake:
                self._waiting.append(member)

    def _admit(self) -> None:
        """Fill the free places: by priority, then for the job that has the fewest places, then in order of arrival."""
        places = Counter(m.job for m in self._running)
        with self._wake:
            while self._waiting and len(self._running) < self._max_running:
                member = min(self._waiting, key=lambda m: (-m.job.priority, places[m.job]))
                self._waiting.remove(member)
                self._running.append(member)
                member.leave_queue()
                places[member.job] += 1

    def _prefill(self) -> None:
        """Read on in the prompts of those who are not ready, one after the other, some tokens in all."""
        left = self._prefill_tokens
        for member in self._running:
            if left <= 0:
                return
            if member.is_ready or member.job.is_over:
                continue
            self.status.enter("reading prompts")
            try:
                left -= member.prefill(self._decoder, left)
            except BaseException as error:
                member.job.fail(error)

    def wake_in_child(self) -> None:
        """Begin anew in a forked child: the worker stayed in the parent, and so did who held a lock.

        An idle engine starts another worker with its next request. One that was in the middle of something is closed.
        """
        is_idle = self.status.is_idle and not self._running and not self._waiting
        self._wake = threading.Condition()
        self._meter.renew_lock()
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


def _wanted(members: Iterable[SequenceState]) -> list[SequenceState]:
    """Those whose time is not up and whom somebody still waits for."""
    wanted = []
    for member in members:
        member.job.expire()
        if member.job.is_over:
            member.job.count("cancelled")
        else:
            wanted.append(member)
    return wanted
