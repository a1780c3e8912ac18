"""A timer of phases counts every second once."""

from __future__ import annotations

import contextlib

import pytest
import torch

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


def test_a_phase_that_raises_is_counted_and_left(clock: list[float]) -> None:
    timer = PhaseTimer()
    with timer("draft"):
        with contextlib.suppress(KeyError), timer("mask"):
            clock[0] += 1
            raise KeyError
        clock[0] += 2
    assert timer.seconds == {"draft_s": 2, "mask_s": 1}


def test_seconds_read_inside_a_phase_count_it_up_to_now(clock: list[float]) -> None:
    timer = PhaseTimer(["draft_s", "verify_s"])
    assert timer.seconds == {"draft_s": 0, "verify_s": 0}
    with timer("draft"):
        clock[0] += 1
        assert timer.seconds == {"draft_s": 1, "verify_s": 0}
        with timer("mask"):
            clock[0] += 2
            assert timer.seconds == {"draft_s": 1, "verify_s": 0, "mask_s": 2}
        clock[0] += 4
    clock[0] += 8
    assert timer.seconds == {"draft_s": 5, "verify_s": 0, "mask_s": 2}


class Device:
    """A device with one stream, beside the host's clock: it does what is launched, one after the other."""

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.free_at, self.waits = clock, 0.0, 0

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock[0]) + seconds

    def wait(self) -> None:
        self.clock[0] = max(self.free_at, self.clock[0])


@pytest.fixture
def device(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Device:
    """A stand-in for the device ``cuda:1``, whose events complete when what was launched before them is done."""
    device = Device(clock)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream of cuda:1"
            self.at = max(device.free_at, clock[0])

        def synchronize(self) -> None:
            device.waits += 1
            clock[0] = max(self.at, clock[0])

        def elapsed_time(self, end: Event) -> float:
            assert clock[0] >= end.at, "the event has not completed"
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: f"stream of {at}")
    return device


def test_a_phase_of_a_device_lasts_until_what_it_launched_is_done(clock: list[float], device: Device) -> None:
    timer, began = PhaseTimer.on(torch.device("cuda:1")), clock[0]
    with timer("sample"):
        with timer("draft"):
            clock[0] += 1
        with timer("verify"):
            device.launch(20)
            clock[0] += 2  # the host launches; the pass goes on
        with timer("mask"):
            clock[0] += 3  # while the device computes
        device.wait()  # the host reads a result
        clock[0] += 5
    assert device.waits == 0
    assert timer.seconds == {"draft_s": 1, "verify_s": 20, "mask_s": 0, "sample_s": 5}
    assert device.waits == 1  # for the last event, which had completed
    assert sum(timer.seconds.values()) == clock[0] - began


def test_host_work_that_outlasts_a_pass_counts_as_far_as_it_does(clock: list[float], device: Device) -> None:
    timer = PhaseTimer.on(torch.device("cuda:1"))
    with timer("verify"):
        device.launch(4)
    with timer("mask"):
        clock[0] += 10
    assert timer.seconds == {"verify_s": 4, "mask_s": 6}


def test_seconds_of_a_device_that_still_works_are_waited_for(clock: list[float], device: Device) -> None:
    timer = PhaseTimer.on(torch.device("cuda:1"))
    with timer("prefill"):
        device.launch(7)
    assert timer.seconds == {"prefill_s": 7}
    assert device.waits == 1
