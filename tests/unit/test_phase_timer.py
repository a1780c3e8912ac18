"""A timer of phases counts every second once."""

from __future__ import annotations

import contextlib

import pytest

from agentspec.runtime import phase_timer
from agentspec.runtime.phase_timer import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the timer reads; tests move it."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "perf_counter", lambda: now[0])
    return now


def test_a_phase_inside_another_pauses_it(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer("draft"):
        clock[0] += 1
        with timer("mask"):
            clock[0] += 2
            with timer("draft"):
                clock[0] += 4
        clock[0] += 8
    clock[0] += 16  # outside of all phases
    with timer("mask"):
        clock[0] += 32
    assert timer.seconds == {"draft_s": 13, "mask_s": 34}
    assert timer.total_s == 47


def test_a_phase_that_raises_is_counted_and_left(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer("draft"):
        with contextlib.suppress(KeyError), timer("mask"):
            clock[0] += 1
            raise KeyError
        clock[0] += 2
    assert timer.seconds == {"draft_s": 2, "mask_s": 1}
