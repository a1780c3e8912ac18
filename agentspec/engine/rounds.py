"""Play rounds; where one fails, find the row that it fails for and play it again without that row.

A round that raises before its commit has changed nothing, so its rows can play it again: the neighbour of a failing row
gets the text that it has alone. What is known of a fault is used first:

1. Rows whose sequence has a ``fault`` fail with it; the others play again together.
2. Otherwise each plays by itself. The rows that raise then fail; the others have had their round.

A broken model fails every request. Each request is tried once by itself, and no more than once together with others:
after a round in which each failed alone, the next ones are played one by one from the start, until one goes well.
Where each does well alone (memory for so many rows ran out, say), fewer share a round for a while.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from agentspec.engine.metrics import Meter
from agentspec.engine.state import SequenceState
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import RoundStats, RowStats

_PATIENCE = 64
"""Rounds that go well before twice as many rows share one again, where they failed only together."""


class Rounds:
    """Plays rounds for sequences of requests, and keeps a fault to the request that has it.

    Args:
        decoder: plays a round for a batch.
        meter: counts.
        vocab_size: ids from this on are no tokens; None for all that the target has logits of.
    """

    def __init__(self, decoder: SpeculativeDecoder, meter: Meter, vocab_size: int | None = None) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._meter = meter
        self._most: int | None = None  # sequences that share a round; None for any number
        self._failed = 0  # so many were too many, or all failed
        self._patience = self._left = 0  # rounds to go well before it is doubled

    def play(self, states: SequenceOf[SequenceState]) -> None:
        """Play a round for every sequence, all of one acceptance rule."""
        waiting = _alive(states)
        while waiting:
            size = len(waiting) if self._most is None else self._most
            batch, waiting = waiting[:size], waiting[size:]
            self._play_together(batch)
            waiting = _alive(waiting)  # samples of a request fail together

    def _play_together(self, states: list[SequenceState]) -> None:
        error = self._round(states)
        while error is not None:
            left = _alive(states)
            if len(left) == len(states):
                self._play_singly(left, error)
                return
            states = left
            error = self._round(left) if left else None

    def _play_singly(self, states: list[SequenceState], error: BaseException) -> None:
        """Play a round for each sequence by itself after one for all of them together has failed."""
        if len(states) == 1:
            states[0].request.fail(error)
            return
        tried = failed = 0
        for state in states:
            if not state.request.is_over:
                alone = self._round([state])
                tried, failed = tried + 1, failed + (alone is not None)
                if alone is not None:
                    state.request.fail(alone)
        if tried and failed == tried:
            self._narrow(1, len(states), patience=1)
        elif not failed:
            self._narrow(max(1, len(states) // 2), len(states), patience=_PATIENCE)

    def _round(self, states: list[SequenceState]) -> BaseException | None:
        """Play one round; sequences with a fault fail with it. Return the exception of a round that was not played."""
        try:
            stats = self._decoder.round(self._decoder.batch([state.sequence for state in states], self._vocab_size))
        except BaseException as error:
            _fail_faulty(states)
            return error
        _fail_faulty(states)
        self._meter.add_round(stats)
        for state, row in zip(states, stats.rows, strict=True):
            if state.sequence.fault is None:
                self._report(state, row, stats)
        self._widen()
        return None

    def _report(self, state: SequenceState, row: RowStats, stats: RoundStats) -> None:
        """Account for a row of a round and send what is new; its text may fail to decode."""
        state.stats.add_round(row, stats.seconds, stats.width)
        try:
            state.report(self._decoder.draft_length)
        except BaseException as error:
            state.request.fail(error)

    def _narrow(self, most: int, failed: int, patience: int) -> None:
        self._most, self._failed, self._patience, self._left = most, failed, patience, patience

    def _widen(self) -> None:
        """Count a round that went well; after some of them twice as many sequences may share one."""
        if self._most is None:
            return
        self._left -= 1
        if self._left <= 0:
            doubled = 2 * self._most
            self._most, self._left = (doubled if doubled < self._failed else None), self._patience


def _alive(states: SequenceOf[SequenceState]) -> list[SequenceState]:
    return [state for state in states if not state.request.is_over]


def _fail_faulty(states: SequenceOf[SequenceState]) -> None:
    """Fail the requests of sequences that cannot go on."""
    for state in states:
        if state.sequence.fault is not None:
            state.request.fail(state.sequence.fault)
