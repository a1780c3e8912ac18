"""A run as a trace: events of a track are nested or apart, and last as long as the record says."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from agentspec.report import AgentRun, RunRecord
from agentspec.report.views.trace import trace

RUNS = {"simple": recorded.simple, "busy": recorded.busy, "third_party": recorded.third_party}
RUNS |= {"empty": recorded.empty, "long": recorded.long}


def complete(run: RunRecord) -> list[dict[str, Any]]:
    return [event for event in trace(run)["traceEvents"] if event["ph"] == "X"]


def expect_nested_or_apart(events: list[dict[str, Any]]) -> None:
    by_track = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for of_track in by_track.values():
        for (a, b, first), (c, d, second) in combinations(of_track, 2):
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d), (first, second)


@pytest.mark.parametrize("name", RUNS)
def test_events_of_a_track_are_nested_or_apart(name: str) -> None:
    expect_nested_or_apart(complete(RUNS[name]()))


starts = st.floats(0, 9).map(lambda s: round(s, 1))


@given(
    st.lists(st.tuples(starts, starts), max_size=4),
    st.lists(st.tuples(starts, starts), max_size=4),
    st.lists(st.tuples(starts, starts), max_size=3),
    st.floats(0, 9),
)
def test_whatever_overlaps(models: Any, tools: Any, within: Any, middle: float) -> None:
    nested = recorded.turn(0.0, 9.0, 0.0, 0.0, models=[recorded.model(*span) for span in within])
    called = [recorded.tool(*span, iterations=[nested]) for span in tools]
    turns = [
        recorded.turn(0.0, middle, 0.0, 0.0, models=[recorded.model(*span) for span in models]),
        recorded.turn(middle, 9.0 - middle, 0.0, 0.0, models=[], tools=called),
    ]
    run = recorded.run(turns, 9.0)
    events = complete(run)
    expect_nested_or_apart(events)
    assert sum(event["cat"] in ("model", "tool") for event in events) == len(run.model_calls) + len(run.tool_calls)


def test_durations_are_those_of_the_record() -> None:
    run = recorded.busy()
    events = complete(run)
    for kind, calls in (("model", run.model_calls), ("tool", run.tool_calls)):
        told = sorted((e["name"], e["ts"], e["dur"]) for e in events if e["cat"] == kind)
        known = sorted((c.name, round(c.start_s * 1e6), round(c.seconds * 1e6)) for c in calls)
        assert told == known
    [whole] = [event for event in events if event["cat"] == "run"]
    assert (whole["ts"], whole["dur"]) == (0, 10_000_000)
    assert sum(event["dur"] for event in events if event["cat"] == "iteration") == 10_000_000 + 1_900_000


def test_phases_fill_their_call_on_its_track() -> None:
    events = complete(recorded.simple())
    calls = [event for event in events if event["cat"] == "model"]
    phases = [event for event in events if event["cat"] == "phase"]
    assert [phase["name"] for phase in phases[:3]] == ["queue", "template", "prefill"]
    assert sum(phase["dur"] for phase in phases) == sum(call["dur"] for call in calls) == 5_000_000
    for phase in phases:
        assert any(c["ts"] <= phase["ts"] and phase["ts"] + phase["dur"] <= c["ts"] + c["dur"] for c in calls)
        assert phase["tid"] == calls[0]["tid"]


def test_what_runs_at_once_has_a_track_of_its_own() -> None:
    events = complete(recorded.busy())
    parallel = [e for e in events if e["name"] in ("research", "get_price", recorded.EVIL) and e["ts"] < 5e6]
    assert len({event["tid"] for event in parallel}) == len(parallel) == 3
    samples = [event for event in events if event["cat"] == "sample"]
    assert [event["name"] for event in samples] == ["embedded, sample 2", "embedded, sample 3"]
    assert len({event["tid"] for event in samples} | {0}) == 3
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace(recorded.busy())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {event["tid"] for event in events} == names.keys()
    assert names[0] == "agent"


def test_an_agent_within_a_tool_is_on_the_tool_s_track() -> None:
    events = complete(recorded.busy())
    [research] = [event for event in events if event["name"] == "research"]
    [search] = [event for event in events if event["name"] == "search_the_archive"]
    assert search["tid"] == research["tid"]
    assert search["ts"] >= research["ts"]
    assert search["ts"] + search["dur"] <= research["ts"] + research["dur"]


def test_what_is_told_of_a_call_is_what_is_known() -> None:
    events = complete(recorded.busy())
    [failed] = [event for event in events if event["args"].get("error", "").startswith("TimeoutError")]
    assert "new_tokens" not in failed["args"]
    assert "ttft_s" not in failed["args"]
    [whole] = [event for event in events if event["cat"] == "run"]
    assert "gain (estimated)" in whole["args"]
    counters = [event for event in trace(recorded.simple())["traceEvents"] if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == [3_500_000, 3_500_000, 7_500_000, 7_500_000]
    assert counters[0]["args"] == {"accepted / drafted": 5 / 8}
    assert counters[1]["args"] == {"tokens": 12 / 5}


def test_it_is_json(tmp_path: Path) -> None:
    run = AgentRun(recorded.busy())
    run.to_chrome_trace(tmp_path / "trace.json")
    told = json.loads((tmp_path / "trace.json").read_text())
    assert told == json.loads(json.dumps(trace(run.record)))
    assert {event["ph"] for event in told["traceEvents"]} == {"X", "M", "C"}
    assert all(isinstance(event.get("ts", 0), int) for event in told["traceEvents"])
