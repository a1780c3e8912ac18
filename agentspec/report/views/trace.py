"""An agent run as a trace for Perfetto or chrome://tracing: the JSON of complete ("X") events, in microseconds.

The agent has the first track. A call goes on the track of what it is part of, where it lies within it and beside
nothing else; calls that run at the same time, and the samples of a call, get tracks of their own. So events of a track
are always nested or apart. Phases of a model call are drawn one after the other, in the order of the schema: their
sums are real, their places are not, for rounds are folded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.report.schema import Iteration, ModelCall, Phases, RunRecord, Step, ToolCall
from agentspec.report.summary import Totals

PROCESS = 1
AGENT = 0
"""Track of the agent itself."""

Event = dict[str, Any]

# What is reported of each, beside its time.
RUN = {"total_s", "model_s", "tool_s", "framework_s", "idle_s", "budget_s", "error"}
ITERATION = {"model_s", "tool_s", "framework_s", "idle_s"}
TOOL = {"tool_call_id", "id", "error", "model_s"}
MODEL = {"provider", "id", "node", "ttft_s", "cached", "error", "input_tokens", "output_tokens", "finish_reason"}
STEP = {"prompt_tokens", "cached_tokens", "new_tokens", "rounds", "target_calls", "drafted_tokens", "accepted_tokens"}
STEP |= {"forced_tokens", "drafters", "accepted_lengths"}


def write(run: RunRecord, path: Path) -> None:
    """Write the trace.

    Raises:
        OSError: for a path that cannot be written.
    """
    path.write_text(json.dumps(trace(run)), encoding="utf-8")


def trace(run: RunRecord) -> dict[str, Any]:
    """Return the trace as JSON values; time 0 is the start of the run."""
    tracks = _Tracks()
    whole = tracks.place(0, _us(run.total_s), None)
    events = [_event(run.name or "agent run", "run", whole, _about_run(run))]
    events += _iterations(run.iterations, run.tools, whole, tracks)
    events += _counters(run)
    names = [_meta("process_name", 0, f"agentspec: {run.name or 'agent run'}")]
    for track, name in enumerate(tracks.names):
        names += [_meta("thread_name", track, name), _meta("thread_sort_index", track, track, "sort_index")]
    other = {"schema": run.schema_version, "began_at": run.began_at, "phases": "in order of the schema, not of time"}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": [*names, *events]}


@dataclass(frozen=True, eq=False)
class _Span:
    """An event that stands on a track, and what it is part of."""

    track: int
    begin: int
    end: int
    parent: _Span | None = None

    def holds(self, begin: int, end: int) -> bool:
        return self.begin <= begin and end <= self.end

    def is_apart_from(self, begin: int, end: int) -> bool:
        return end <= self.begin or self.end <= begin

    @property
    def line(self) -> Iterator[_Span]:
        """It, what it is part of, and so on."""
        span: _Span | None = self
        while span is not None:
            yield span
            span = span.parent


class _Tracks:
    """What stands on each track."""

    def __init__(self) -> None:
        self._tracks: list[list[_Span]] = [[]]

    @property
    def names(self) -> list[str]:
        return ["agent", *(f"parallel {number}" for number in range(1, len(self._tracks)))]

    def place(self, begin: int, end: int, parent: _Span | None, beside: bool = False) -> _Span:
        """On the track of what it is part of, if it lies within it and beside nothing else; or on another one.

        Args:
            begin: in microseconds.
            end: in microseconds.
            parent: what it is part of; None for the run.
            beside: never on the track of what it is part of.
        """
        home = AGENT if parent is None else parent.track
        line = [] if parent is None else [span for span in parent.line if span.track == home]
        if not beside and all(
            span.holds(begin, end) if span in line else span.is_apart_from(begin, end) for span in self._tracks[home]
        ):
            track = home
        else:
            free = (
                number
                for number, spans in enumerate(self._tracks)
                if number not in (AGENT, home) and all(span.is_apart_from(begin, end) for span in spans)
            )
            track = next(free, len(self._tracks))
        if track == len(self._tracks):
            self._tracks.append([])
        self._tracks[track].append(span := _Span(track, begin, end, parent))
        return span


def _iterations(
    iterations: Sequence[Iteration], early: Sequence[ToolCall], parent: _Span, tracks: _Tracks
) -> Iterator[Event]:
    """Yield the iterations, which tile their run or tool, and then their calls."""
    calls: list[tuple[ModelCall | ToolCall, _Span]] = [(tool, parent) for tool in early]
    for number, iteration in enumerate(iterations, 1):
        begin, end = _clip((_us(iteration.start_s), _us(iteration.start_s + iteration.seconds)), parent)
        span = tracks.place(begin, end, parent)
        yield _event(f"iteration {number}", "iteration", span, iteration.model_dump(include=ITERATION))
        calls += [(call, span) for call in iteration.models]
        calls += [(call, span) for call in iteration.tools]
    for call, span in sorted(calls, key=lambda item: (item[0].start_s, -item[0].seconds)):
        placed = tracks.place(_us(call.start_s), _us(call.end_s), span)
        yield from _model(call, placed, tracks) if isinstance(call, ModelCall) else _tool(call, placed, tracks)


def _tool(call: ToolCall, span: _Span, tracks: _Tracks) -> Iterator[Event]:
    yield _event(call.name, "tool", span, call.model_dump(include=TOOL))
    yield from _iterations(call.iterations, call.tools, span, tracks)


def _model(call: ModelCall, span: _Span, tracks: _Tracks) -> Iterator[Event]:
    yield _event(call.name, "model", span, call.model_dump(include=MODEL) | _about_step(call.step))
    if call.phases is not None:
        yield from _phases(call.phases, span)
    for number, step in enumerate(call.other_samples, 2):
        end = min(span.end, span.begin + _us(step.total_s))
        placed = tracks.place(span.begin, end, span, beside=True)
        yield _event(f"{call.name}, sample {number}", "sample", placed, _about_step(step))


def _phases(phases: Phases, span: _Span) -> Iterator[Event]:
    at = float(span.begin)
    for name in Phases.model_fields:
        seconds = max(0.0, getattr(phases, name))
        begin, at = round(at), at + seconds * 1e6
        if seconds:
            part = _Span(span.track, *_clip((begin, round(at)), span))
            yield _event(name.removesuffix("_s"), "phase", part, {"seconds": seconds})


def _counters(run: RunRecord) -> Iterator[Event]:
    """Yield what every call had accepted, at its end: shares of what was drafted, and tokens per target call."""
    for call in run.model_calls:
        end = {"ph": "C", "ts": _us(call.end_s), "pid": PROCESS, "tid": AGENT}
        of = Totals.of([call])
        if of.acceptance_rate is not None:
            yield {**end, "name": "acceptance", "args": {"accepted / drafted": of.acceptance_rate}}
        if of.tokens_per_target_call is not None:
            yield {**end, "name": "tokens per target call", "args": {"tokens": of.tokens_per_target_call}}


def _about_run(run: RunRecord) -> dict[str, Any]:
    about = run.model_dump(include=RUN)
    if run.gain is not None:
        about["gain (estimated)" if run.gain.estimated else "gain (measured)"] = run.gain.ratio
    return about


def _about_step(step: Step | None) -> dict[str, Any]:
    return {} if step is None else step.model_dump(mode="json", include=STEP)


def _event(name: str, kind: str, span: _Span, about: dict[str, Any]) -> Event:
    known = {key: value for key, value in about.items() if value is not None}
    place = {"ts": span.begin, "dur": span.end - span.begin, "pid": PROCESS, "tid": span.track}
    return {"name": name, "cat": kind, "ph": "X", **place, "args": known}


def _meta(name: str, track: int, value: str | int, key: str = "name") -> Event:
    return {"name": name, "ph": "M", "pid": PROCESS, "tid": track, "args": {key: value}}


def _clip(span: tuple[int, int], within: _Span) -> tuple[int, int]:
    begin = min(max(span[0], within.begin), within.end)
    return begin, max(begin, min(span[1], within.end))


def _us(seconds: float) -> int:
    """Microseconds, whole ones, so that what touches in the record touches here."""
    return round(seconds * 1e6)
