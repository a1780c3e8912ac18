"""The one worker loop: who is in the next round.

Sequences join and leave at round boundaries. Each belongs to a ``Job``, one request on its way, which hands what it
learns to whoever waits for it. Only the worker thread touches models and sequences.

Nobody waits for long prompts: of those that are read, a bounded number of tokens comes between two rounds. Nobody
waits for long requests: where one has no place and another has twice its share, the other gives one up, and goes on
later from where it was.
"""

from __future__ import annotations

import threading
from collections import Counter

import torch

from agentspec.dice import Acceptance
from agentspec.errors import EngineClosedError, InvalidRequestError
from agentspec.job import Job, Member
from agentspec.metrics import EngineMetrics, Meter
from agentspec.sequence import Batch
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import RoundStats
from agentspec.threads import BUDGET


class Scheduler:
    """Owns the worker thread, and with it the models.

    Args:
        decoder: plays the rounds.
        max_running: most sequences in a round; others wait their turn.
        prefill_tokens: most tokens of new prompts that are computed between two rounds.
    """

    def __init__(self, decoder: SpeculativeDecoder, max_running: int, prefill_tokens: int = 256) -> None:
        self._decoder = decoder
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens
        self._wake = threading.Condition()
        self._waiting: list[Member] = []
        self._running: list[Member] = []
        self._meter = Meter()
        self._closed = False
        self._why_closed = "The engine is closed; make a new one to go on."
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue the sequences of a job.

        Raises:
            EngineClosedError: after ``close``.
            InvalidRequestError: on the worker thread itself, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise InvalidRequestError(
                "A request from the engine's own worker thread (from a logits_processor, say) would wait for itself; "
                "ask from another thread."
            )
        with self._wake:
            if self._closed:
                raise EngineClosedError(self._why_closed)
            job.meter = self._meter
            self._waiting.extend(job.members)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="agentspec", daemon=True)
                self._thread.start()
            self._wake.notify()

    def metrics(self) -> EngineMetrics:
        """What was done so far; may be called from any thread."""
        with self._wake:
            return self._meter.read(len(self._running), len(self._waiting), self._max_running)

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
                self._meter.threads = BUDGET.apply() if self._decoder.fits_any_threads else torch.get_num_threads()
                self.step()
        except BaseException as error:  # a SystemExit in somebody's processor, say: nobody may wait for ever
            cause = EngineClosedError(f"The engine's worker was ended by {error!r}; make a new engine to go on.")
            cause.__cause__ = error
            self._why_closed = str(cause)
        with self._wake:
            self._closed = True
            left = [*self._running, *self._waiting]
        for member in left:
            member.job.fail(cause)

    def step(self) -> None:
        """One turn of the loop: those who left leave, those who fit join, some of their prompts is read, and everyone
        who is ready gets a round."""
        self._running = _wanted(self._running)
        if self._waiting:
            gone = set(self._waiting) - set(_wanted(self._waiting))
            with self._wake:
                self._waiting = [m for m in self._waiting if m not in gone]
            self._share()
            self._admit()
        self._prefill()
        groups: dict[Acceptance, list[Member]] = {}
        for member in self._running:
            if member.is_ready:
                groups.setdefault(member.sequence.acceptance, []).append(member)
        for group in groups.values():
            self._round(group)
        self._running = _wanted([m for m in self._running if m.sequence.finish_reason is None])

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
            try:
                left -= member.prefill(self._decoder, left)
            except Exception as error:
                member.job.fail(error)

    def _round(self, members: list[Member]) -> None:
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
            self._meter.add_round(stats)
            for member, row in zip(members, stats.rows, strict=True):
                member.stats.add_round(row, stats.seconds, stats.width)
                member.tell()
        except Exception as error:
            untouched = [m for m, n in zip(members, lengths, strict=True) if m.sequence.length == n]
            if isinstance(error, InvalidRequestError) and len(members) > 1 and untouched == members:
                for member in members:
                    self._round([member])
            else:
                for member in members:
                    member.job.fail(error)


def _wanted(members: list[Member]) -> list[Member]:
    """Those whose time is not up and whom somebody still waits for."""
    wanted = []
    for member in members:
        member.job.expire()
        if member.job.is_over:
            member.job.count("cancelled")
        else:
            wanted.append(member)
    return wanted
