"""Every second of a run belongs to one thing: calls told to a recorder with a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.report import Iteration, Recorder, RunRecord, Step, ToolCall
from agentspec.report.fold import union_seconds
from agentspec.stats import RowStats, StepStats


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def recorded(*events: tuple[Any, ...]) -> RunRecord:
    """A run of events ``(second, "begin" or "end", id, ...)``, each a call of the recorder; the last one closes it."""
    clock = Clock()
    recorder = Recorder("run", clock=clock)
    for second, method, *arguments in events:
        clock.seconds = 100.0 + second
        told = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(recorder, method)(*arguments, **told)
    return recorder.record()


def shares(part: RunRecord | Iteration) -> tuple[float, float, float, float]:
    return (part.model_s, part.tool_s, part.framework_s, part.idle_s)


def step(total_s: float = 1.0, ended_at: float = 2e9, **counts: int) -> Step:
    """A step whose phases are half verify."""
    stats = StepStats(total_s=total_s, ended_at=ended_at, ttft_s=total_s / 4, **counts)
    stats.add_round(RowStats({"lookup": 4}, {"lookup": 2}, 3), {"verify_s": total_s / 2, "draft_s": total_s / 8}, 5)
    return Step.model_validate(stats.to_dict())


def test_a_tool_loop_adds_up() -> None:
    run = recorded(
        (1, "begin", "graph", "chain", "graph"),
        (2, "begin", "m1", "model", "llm", {"parent": "graph"}),
        (5, "end", "m1", {"asked": frozenset({"a"})}),
        (6, "begin", "t1", "tool", "search", {"parent": "graph", "tool_call_id": "a"}),
        (10, "end", "t1"),
        (11, "begin", "m2", "model", "llm", {"parent": "graph"}),
        (13, "end", "m2"),
        (14, "end", "graph"),
        (16, "close"),
    )
    assert run.total_s == 16
    assert shares(run) == (5, 4, 7, 3)  # idle: before second 1, and behind 14
    assert [(i.start_s, i.seconds, shares(i)) for i in run.iterations] == [
        (0, 11, (3, 4, 4, 1)),
        (11, 5, (2, 0, 3, 2)),
    ]
    assert [tool.name for tool in run.iterations[0].tools] == ["search"]
    assert (run.iterations[0].tools[0].start_s, run.iterations[0].tools[0].end_s) == (6, 10)
    assert run.iterations[1].models[0].phases is None  # not known, not 0


def test_parallel_tools_are_a_union_and_keep_their_offsets() -> None:
    run = recorded(
        (0, "begin", "m", "model", "llm"),
        (1, "end", "m", {"asked": frozenset({"a", "b"})}),
        (2, "begin", "a", "tool", "a", {"tool_call_id": "a"}),
        (3, "begin", "b", "tool", "b", {"tool_call_id": "b"}),
        (5, "end", "a"),
        (6, "end", "b", "ValueError('x')"),
        (7, "close"),
    )
    [iteration] = run.iterations
    assert iteration.tool_s == 4
    assert [(t.start_s, t.seconds, t.error) for t in iteration.tools] == [(2, 3, None), (3, 3, "ValueError('x')")]


def test_a_tool_belongs_to_the_model_that_asked_for_it() -> None:
    run = recorded(
        (0, "begin", "m1", "model", "one", {"parent": "agent 1"}),
        (1, "end", "m1", {"asked": frozenset({"call 1"})}),
        (1, "begin", "m2", "model", "two", {"parent": "agent 2"}),
        (2, "end", "m2", {"asked": frozenset({"call 2"})}),
        (3, "begin", "t1", "tool", "t", {"tool_call_id": "call 1", "parent": "agent 1"}),
        (4, "end", "t1"),
        (5, "close"),
    )
    assert [len(iteration.tools) for iteration in run.iterations] == [1, 0]


def test_without_ids_a_tool_belongs_to_the_last_model_of_its_own_chain() -> None:
    run = recorded(
        (0, "begin", "one", "chain", "agent"),
        (0, "begin", "two", "chain", "agent"),
        (1, "begin", "m1", "model", "llm", {"parent": "one"}),
        (2, "end", "m1"),
        (3, "begin", "m2", "model", "llm", {"parent": "two"}),
        (4, "end", "m2"),
        (5, "begin", "t", "tool", "t", {"parent": "one"}),
        (6, "end", "t"),
        (7, "close"),
    )
    assert [len(iteration.tools) for iteration in run.iterations] == [1, 0]


def test_an_agent_within_a_tool_is_tool_time_and_has_its_own_iterations() -> None:
    run = recorded(
        (0, "begin", "m", "model", "outer"),
        (1, "end", "m"),
        (2, "begin", "t", "tool", "ask_expert"),
        (3, "begin", "g", "chain", "graph", {"parent": "t"}),
        (4, "begin", "n1", "model", "inner", {"parent": "g"}),
        (6, "end", "n1", {"steps": [step()]}),
        (6, "begin", "s", "tool", "search", {"parent": "g"}),
        (7, "end", "s"),
        (8, "begin", "n2", "model", "inner", {"parent": "g"}),
        (9, "end", "n2", {"steps": [step()]}),
        (9, "end", "g"),
        (10, "end", "t"),
        (10, "close"),
    )
    assert shares(run) == (1, 8, 1, 1)
    [iteration] = run.iterations
    [tool] = iteration.tools
    assert tool.model_s == 3
    assert [(i.start_s, i.seconds, shares(i)) for i in tool.iterations] == [(2, 6, (2, 1, 3, 0)), (8, 2, (1, 0, 1, 0))]
    assert [inner.name for inner in tool.iterations[0].tools] == ["search"]
    assert [call.name for call in run.model_calls] == ["outer", "inner", "inner"]
    assert [call.name for call in run.tool_calls] == ["ask_expert", "search"]
    assert run.gain is not None
    assert run.gain.target_calls == 2


def test_a_retry_is_the_same_iteration_and_so_are_calls_of_one_node() -> None:
    for told in ({"parent": "retry"}, {"parent": "x", "task": "model:1"}):
        run = recorded(
            (0, "begin", "m1", "model", "llm", told),
            (1, "end", "m1", "TimeoutError()"),
            (2, "begin", "m2", "model", "llm", told),
            (3, "end", "m2"),
            (4, "begin", "m3", "model", "llm", {"parent": "y", "task": "model:2"}),
            (5, "end", "m3"),
            (6, "close"),
        )
        assert [[call.error for call in i.models] for i in run.iterations] == [["TimeoutError()", None], [None]]


def test_calls_made_at_once_are_one_iteration_but_agents_beside_each_other_are_not() -> None:
    for parents, count in ((("x", "x"), 1), ((None, None), 1), (("x", "y"), 2)):
        run = recorded(
            (0, "begin", "m1", "model", "llm", {"parent": parents[0]}),
            (1, "begin", "m2", "model", "llm", {"parent": parents[1]}),
            (3, "end", "m1"),
            (4, "end", "m2"),
            (4, "begin", "m3", "model", "llm", {"parent": parents[0]}),
            (6, "end", "m3"),
            (6, "close"),
        )
        assert len(run.iterations) == count + 1  # one behind the other is another
        assert run.iterations[0].models[0].end_s == 3
        assert run.model_s == 6


def test_a_node_that_loops_by_itself_has_an_iteration_for_every_turn() -> None:
    told = {"task": "agent:1"}
    run = recorded(
        (0, "begin", "m1", "model", "llm", told),
        (1, "end", "m1"),
        (1, "begin", "t", "tool", "t", told),
        (2, "end", "t"),
        (2, "begin", "m2", "model", "llm", told),
        (3, "end", "m2"),
        (3, "close"),
    )
    assert len(run.iterations) == 2


def test_tools_before_any_model_are_kept() -> None:
    run = recorded((1, "begin", "t", "tool", "t"), (2, "end", "t"), (3, "close"))
    assert [tool.name for tool in run.tools] == ["t"]
    assert run.iterations == []
    assert shares(run) == (0, 1, 2, 2)


def test_phases_add_up_to_the_call_and_not_only_to_the_step() -> None:
    run = recorded((0, "begin", "m", "model", "llm"), (3, "end", "m", {"steps": [step(2.0), step(1.0)]}), (4, "close"))
    [call] = run.model_calls
    assert call.phases is not None
    assert sum(call.phases.model_dump().values()) == pytest.approx(3)
    assert (call.phases.verify_s, call.phases.other_s) == (1.0, 1.75)
    assert call.step == step(2.0)  # of the sample that took longest
    assert call.other_samples == [step(1.0)]
    assert call.ttft_s == 0.25  # of the sample that began to speak first


def test_a_step_that_claims_more_than_its_call_took_is_not_divided() -> None:
    run = recorded((0, "begin", "m", "model", "llm"), (1, "end", "m", {"steps": [step(4.0)]}), (1, "close"))
    assert run.model_calls[0].phases is None


def test_a_cached_answer_is_marked_and_its_step_is_not_counted() -> None:
    for told in ({"cached": True}, {"steps": [step(0.5, ended_at=1.0)]}):
        run = recorded((0, "begin", "m", "model", "llm"), (1, "end", "m", told), (2, "close"))
        [call] = run.model_calls
        assert call.cached
        assert (call.step, call.phases, call.gain) == (None, None, None)
        assert run.gain is None


def test_telling_twice_changes_nothing_and_neither_does_what_comes_late() -> None:
    run = recorded(
        (0, "begin", "m", "model", "llm"),
        (1, "begin", "m", "model", "llm"),
        (2, "token", "m"),
        (3, "end", "m"),
        (4, "end", "m", "late"),
        (4, "token", "m"),
        (5, "close", "first"),
        (6, "close", "second"),
        (7, "begin", "x", "tool", "t"),
        (8, "end", "nobody"),
    )
    assert run.total_s == 5
    assert run.error == "first"
    [call] = run.model_calls
    assert (call.seconds, call.ttft_s, call.streamed, call.error) == (3, 2, True, None)
    assert run.tool_calls == []


def test_what_goes_on_when_the_run_ends_is_closed_with_it() -> None:
    events = [(0, "begin", "m", "model", "llm"), (1, "end", "m"), (2, "begin", "t", "tool", "t")]
    failed = recorded(*events, (5, "close", "KeyError('x')"))
    assert (failed.error, failed.tool_calls[0].error, failed.tool_calls[0].seconds) == ("KeyError('x')",) * 2 + (3,)
    assert shares(failed) == (1, 3, 1, 1)
    left = recorded(*events, (5, "close"))
    assert left.error is None
    assert "still going on" in (left.tool_calls[0].error or "")


def test_a_run_that_goes_on_can_be_looked_at() -> None:
    run = recorded((0, "begin", "m", "model", "llm"), (2, "end", "m"), (3, "begin", "t", "tool", "t"))
    assert run.total_s == 3
    assert shares(run) == (2, 0, 1, 1)


def test_many_threads_may_tell() -> None:
    recorder = Recorder()

    def tell(thread: int) -> None:
        for number in range(200):
            recorder.begin((thread, number), "tool", "t")
            recorder.end((thread, number))

    threads = [threading.Thread(target=tell, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    assert len(recorder.record().tool_calls) == 1600


def test_unions() -> None:
    assert union_seconds([(5, 6), (0, 2), (1, 3)]) == 4
    assert union_seconds([(0, 2), (1, 3)], 1.5, 2.5) == 1
    assert union_seconds([]) == 0


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Calls of every kind, nested, overlapping, unfinished, failed, in the order of their times."""
    moment = st.floats(0, 100)
    events: list[tuple[Any, ...]] = []
    for number in range(draw(st.integers(0, 12))):
        begin, end = sorted((draw(moment), draw(moment)))
        told = {
            "parent": draw(st.sampled_from([None, *range(number), "nobody"])),
            "task": draw(st.sampled_from([None, "a"])),
        }
        events.append((begin, 0, "begin", number, draw(st.sampled_from(["model", "tool", "chain"])), "x", told))
        if draw(st.booleans()):
            events.append((end, 1, "end", number, draw(st.sampled_from([None, "error"]))))
    events = [(at, *rest) for at, _, *rest in sorted(events, key=lambda event: event[:2])]
    return [*events, (draw(st.floats(100, 200)), "close")] if draw(st.booleans()) else events


def parts(part: RunRecord | ToolCall) -> Iterator[RunRecord | ToolCall]:
    yield part
    for tool in [*part.tools, *(tool for iteration in part.iterations for tool in iteration.tools)]:
        yield from parts(tool)


@settings(max_examples=300, deadline=None)
@given(histories())
def test_whatever_happens_the_parts_add_up(events: list[tuple[Any, ...]]) -> None:
    run = recorded(*events)
    begun = {event[2] for event in events if event[1] == "begin"}
    assert run.model_s + run.tool_s + run.framework_s == pytest.approx(run.total_s, abs=1e-9)
    assert min(*shares(run)) >= -1e-9
    assert run.idle_s <= run.framework_s + 1e-9
    for part in parts(run):
        seconds, start = (part.total_s, 0.0) if isinstance(part, RunRecord) else (part.seconds, part.start_s)
        for iteration in part.iterations:
            assert sum(shares(iteration)[:3]) == pytest.approx(iteration.seconds, abs=1e-9)
            assert min(*shares(iteration)) >= -1e-9
            assert iteration.start_s == pytest.approx(start, abs=1e-9)
            start += iteration.seconds
        if part.iterations:
            assert sum(i.seconds for i in part.iterations) == pytest.approx(seconds, abs=1e-9)
            assert sum(i.model_s for i in part.iterations) == pytest.approx(part.model_s, abs=1e-9)
    calls = [*run.model_calls, *run.tool_calls]
    kinds = [event[3] for event in events if event[1] == "begin" and event[3] != "chain"]
    assert len(calls) == len(kinds) <= len(begun)  # each call stands in one place
