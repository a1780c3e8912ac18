"""Play rounds; where one fails, find the row that it fails for and play it again without that row.

A round that raises before its commit has changed nothing, so its rows can play it again: a mate of the culprit gets
the text that it has alone. What is known of a fault is used first:

1. Rows whose sequence has a ``fault`` fail with it; the others play again together.
2. Otherwise each plays by itself. Who raises then fails; the others have had their round.

A model that is broken fails everyone. Each request is tried once by itself, and no more than once together with others:
after a round in which each failed alone, the next ones are played one by one from the start, until one goes well.
Where each does well alone (memory for so many rows ran out, say), fewer share a round for a while.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from agentspec.batch import Batch
from agentspec.engine.metrics import Meter
from agentspec.engine.state import SequenceState
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import RoundStats, RowStats

_PATIENCE = 64
"""Rounds that go well before twice as many rows share one again, where they failed only together."""


class Rounds:
    """Plays rounds for members of jobs, and keeps what goes wrong to the member that it is of.

    Args:
        decoder: plays a round for a batch.
        meter: counts.
    """

    def __init__(self, decoder: SpeculativeDecoder, meter: Meter) -> None:
        self._decoder = decoder
        self._meter = meter
        self._most: int | None = None  # members that share a round; None for any number
        self._failed = 0  # so many were too many, or all failed
        self._patience = self._left = 0  # rounds to go well before it is doubled

    def play(self, members: SequenceOf[SequenceState]) -> None:
        """Play a round for every member, all of one acceptance rule."""
        waiting = _alive(members)
        while waiting:
            size = len(waiting) if self._most is None else self._most
            group, waiting = waiting[:size], waiting[size:]
            self._play_together(group)
            waiting = _alive(waiting)  # samples of a request fail together

    def _play_together(self, group: list[SequenceState]) -> None:
        error = self._round(group)
        while error is not None:
            left = _alive(group)
            if len(left) == len(group):
                self._play_singly(left, error)
                return
            group = left
            error = self._round(left) if left else None

    def _play_singly(self, members: list[SequenceState], error: BaseException) -> None:
        """Let each play by itself what failed for all of them together."""
        if len(members) == 1:
            members[0].job.fail(error)
            return
        tried = failed = 0
        for member in members:
            if not member.job.is_over:
                alone = self._round([member])
                tried, failed = tried + 1, failed + (alone is not None)
                if alone is not None:
                    member.job.fail(alone)
        if tried and failed == tried:
            self._narrow(1, len(members), patience=1)
        elif not failed:
            self._narrow(max(1, len(members) // 2), len(members), patience=_PATIENCE)

    def _round(self, members: list[SequenceState]) -> BaseException | None:
        """Play one round; members with a fault fail with it. Return what was raised where nobody played."""
        try:
            stats = self._decoder.round(Batch([m.sequence for m in members], self._decoder.device))
        except BaseException as error:
            _fail_faulty(members)
            return error
        _fail_faulty(members)
        self._meter.add_round(stats)
        for member, row in zip(members, stats.rows, strict=True):
            if member.sequence.fault is None:
                _report(member, row, stats)
        self._widen()
        return None

    def _narrow(self, most: int, failed: int, patience: int) -> None:
        self._most, self._failed, self._patience, self._left = most, failed, patience, patience

    def _widen(self) -> None:
        """Count a round that went well; after some of them twice as many members may share one."""
        if self._most is None:
            return
        self._left -= 1
        if self._left <= 0:
            doubled = 2 * self._most
            self._most, self._left = (doubled if doubled < self._failed else None), self._patience


def _alive(members: SequenceOf[SequenceState]) -> list[SequenceState]:
    return [member for member in members if not member.job.is_over]


def _fail_faulty(members: SequenceOf[SequenceState]) -> None:
    """Fail the requests of sequences that cannot go on."""
    for member in members:
        if member.sequence.fault is not None:
            member.job.fail(member.sequence.fault)


def _report(member: SequenceState, row: RowStats, stats: RoundStats) -> None:
    """Book a member's part of a round and send what is new; its text may fail to decode."""
    member.stats.add_round(row, stats.seconds, stats.width)
    try:
        member.tell()
    except BaseException as error:
        member.job.fail(error)
