"""Fewer threads compute while other processes keep the cores busy, and only those of the calling thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scripted import ScriptedModel, tokenizer

from agentspec import Grammar, LocalEngine, Request, SamplingParams, SpeculativeDecoder
from agentspec.engine.admission import Admission
from agentspec.runtime import thread_budget, threads
from agentspec.runtime.thread_budget import WINDOW_S, ThreadBudget, Times, read_times
from agentspec.runtime.threads import apart, run_apart

STEP_S = 2 * WINDOW_S


class Machine:
    """Cores that other processes keep busy by plan; every reading is a window later."""

    def __init__(self, cores: int) -> None:
        self.others, self.own = 0.0, 0.0
        self.looks = 0
        self.is_counted = True
        self._now = Times(time.perf_counter() - 10_000, cores, 1000.0, 0.0)

    def read(self) -> Times | None:
        self.looks += 1
        before = self._now
        used = self.own * STEP_S
        busy = before.busy + self.others * STEP_S + used
        self._now = Times(before.at + STEP_S, before.cores, busy, before.own + used)
        return self._now if self.is_counted else None

    def restart(self) -> None:
        """The clock of a process begins again: a fork."""
        self._now = Times(self._now.at, self._now.cores, self._now.busy, -100.0)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def course(cores: int, team: int, loads: list[float], own: float = 2.0) -> list[int]:
    """Threads of a team by the cores' worth of other processes."""
    machine = Machine(cores)
    budget, found = ThreadBudget(machine.read), []
    for machine.others in loads:
        machine.own = own
        found.append(budget.threads(team))
    return found


def test_a_quiet_machine_gives_all_threads() -> None:
    assert course(2, 2, [0.0, 0.1, 0.0]) == [2, 2, 2]
    assert course(64, 2, [0.0, 60.0, 62.0]) == [2, 2, 2]


def test_other_processes_take_threads_and_give_them_back() -> None:
    assert course(2, 2, [0.0, 1.0, 2.0, 1.0, 0.0]) == [2, 1, 1, 1, 2]
    assert course(8, 8, [0.0, 2.0, 6.9, 12.0, 3.0, 0.0]) == [8, 6, 1, 1, 5, 8]
    assert course(64, 2, [63.0, 62.0]) == [1, 2]


def test_the_own_use_of_processors_is_not_that_of_others() -> None:
    assert course(2, 2, [0.0, 0.0], own=2.0) == [2, 2]
    assert course(2, 2, [0.0, 0.0], own=0.0) == [2, 2]


def test_a_load_between_both_bounds_changes_nothing() -> None:
    assert course(2, 2, [0.4, 0.4, 1.0, 0.4, 0.4, 0.2]) == [2, 2, 1, 1, 1, 2]


def test_a_single_thread_is_never_looked_after() -> None:
    machine = Machine(2)
    budget = ThreadBudget(machine.read)
    assert [budget.threads(1) for _ in range(5)] == [1] * 5
    assert machine.looks == 1


def test_the_machine_is_looked_at_once_a_window() -> None:
    looks = []

    def read() -> Times:
        looks.append(1)
        return Times(time.perf_counter(), 2, 0.0, 0.0)

    budget = ThreadBudget(read)
    for _ in range(1000):
        budget.threads(2)
    assert len(looks) < 20


def test_a_system_that_does_not_count_gives_all_threads() -> None:
    machine = Machine(2)
    machine.is_counted = False
    budget = ThreadBudget(machine.read)
    assert [budget.threads(2) for _ in range(3)] == [2] * 3


def test_a_fork_does_not_take_its_parents_time_for_that_of_others() -> None:
    machine = Machine(2)
    budget = ThreadBudget(machine.read)
    machine.own = 2.0
    assert budget.threads(2) == 2
    machine.restart()
    assert [budget.threads(2) for _ in range(3)] == [2] * 3
    machine.others = 1.0
    assert budget.threads(2) == 1


def test_what_was_found_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agentspec"):
        assert course(2, 2, [0.0, 1.0, 1.0, 0.0]) == [2, 1, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "other processes keep 1.0 of 2 cores busy: 1 threads may compute",
        "other processes keep 0.0 of 2 cores busy: 2 threads may compute",
    ]


@pytest.mark.skipif(thread_budget._openmp() is None, reason="torch's OpenMP cannot be reached here")
def test_the_number_is_that_of_the_calling_thread_alone(two_threads: None) -> None:
    machine = Machine(2)
    budget, found = ThreadBudget(machine.read), []

    def worker() -> None:
        for machine.others in (0.0, 1.0, 1.0, 0.0):
            found.append((budget.apply(), torch.get_num_threads()))

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert found == [(2, 2), (1, 1), (1, 1), (2, 2)]
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(thread_budget._openmp() is None, reason="torch's OpenMP cannot be reached here")
def test_work_apart_is_given_as_many_threads_as_there_are_cores_for_where_it_asks(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(2)
    monkeypatch.setattr(threads, "BUDGET", ThreadBudget(machine.read))
    for machine.others, expected in ((1.0, 1), (0.0, 2)):
        assert run_apart(torch.get_num_threads, "test", on_idle_cores=True) == expected
        assert torch.get_num_threads() == 2


def test_a_model_that_is_loaded_or_measured_apart_keeps_its_threads(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of torch round otherwise on another number of threads."""
    machine = Machine(2)
    machine.others = 2.0
    monkeypatch.setattr(threads, "BUDGET", ThreadBudget(machine.read))
    assert apart(torch.get_num_threads)() == run_apart(torch.get_num_threads, "test") == 2
    assert machine.looks == 1  # as it was made


@pytest.mark.skipif(thread_budget._openmp() is None, reason="torch's OpenMP cannot be reached here")
def test_a_grammar_is_compiled_on_idle_cores(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(2)
    machine.others = 1.0
    monkeypatch.setattr(threads, "BUDGET", ThreadBudget(machine.read))
    seen: list[int] = []
    plain = Admission._matcher
    monkeypatch.setattr(Admission, "_matcher", lambda *given: (seen.append(torch.get_num_threads()), plain(*given))[1])
    known = tokenizer()
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 2, [])), known)
    engine._admission(Request([1, 2], SamplingParams(), Grammar.regex("[a-z]+")))
    engine.close()
    assert seen == [1]


def test_without_openmp_the_number_stays(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_budget, "_openmp", lambda: None)
    machine = Machine(2)
    budget = ThreadBudget(machine.read)
    machine.others = 2.0
    assert budget.apply() == torch.get_num_threads() == 2


def test_processor_time_is_read_by_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(thread_budget, "_STAT", stat)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 10}, raising=False)
    monkeypatch.setattr(threads.os, "sysconf", lambda _: 100)
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 5000 20 70000 3000 3 4 5 50 0\n"
        "cpu1 9 9 9 9 9 9 9 9 9 9\n"
        "cpu10 200 0 0 0 0 0 0 0 0 0\n"
        "intr 5\n"
    )
    for niceness, busy in ((0, 3.32), (5, 53.32)):
        monkeypatch.setattr(threads.os, "getpriority", lambda *_, niceness=niceness: niceness)
        found = read_times()
        assert found is not None
        assert (found.cores, round(found.busy, 6)) == (2, busy)


@pytest.mark.parametrize("content", [None, "", "cpu0 1 2\n", "cpu0 a b c d e f g h\n", "intr 5\n"])
def test_what_is_no_count_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    monkeypatch.setattr(thread_budget, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0}, raising=False)
    if content is not None:
        (tmp_path / "stat").write_text(content)
    assert read_times() is None
    assert ThreadBudget().threads(4) == 4
