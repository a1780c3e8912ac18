"""Calls that began and ended, folded into the iterations of a tool loop, so that every second is counted once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from agentspec.report.gain import call_gain, run_gain
from agentspec.report.schema import Iteration, ModelCall, Phases, RunRecord, Step, ToolCall

Kind = Literal["model", "tool", "chain"]

_ROUNDING_S = 1e-6


@dataclass(eq=False)
class Call:
    """Something that took time. Seconds are those of a monotonic clock; ``ended`` is None while it goes on.

    Args:
        id: under which it was reported.
        kind: "chain" for whatever is neither model nor tool.
        name: of the model, tool or chain.
        started: when it began.
        ended: when it was over.
        parent: id of the call that it is part of; an unknown one is no part of anything.
        task: names the execution of a graph's node that it is part of.
        node: name of that node.
        first_token: when the first token came, where that was reported.
        tokens: of a model, so far.
        streamed: whether tokens were sent to callbacks as they came.
        acceptance_rate: of the drafts of a model, so far, where it tells.
        steps: of a model's samples, where it tells of them.
        asked: ids of the tool calls that a model asked for.
        began_at: time of day at which it began, in seconds since 1970.
    """

    id: Any
    kind: Kind
    name: str
    started: float
    ended: float | None = None
    parent: Any = None
    task: str | None = None
    node: str | None = None
    provider: str | None = None
    error: str | None = None
    first_token: float | None = None
    tokens: int = 0
    streamed: bool = False
    acceptance_rate: float | None = None
    steps: Sequence[Step] = ()
    cached: bool = False
    asked: frozenset[str] = frozenset()
    tool_call_id: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    began_at: float = math.inf

    @property
    def is_cached(self) -> bool:
        """Whether a cache gave the answer: some say so; with any other the step ended before it was asked for."""
        return self.cached or any(step.ended_at < self.began_at for step in self.steps)


@dataclass
class _Turn:
    """An iteration while it is put together."""

    models: list[Call]
    tools: list[Call] = field(default_factory=list)

    @property
    def started(self) -> float:
        return self.models[0].started


def fold(calls: Sequence[Call], started: float, ended: float, **fields: Any) -> RunRecord:
    """Return a run of these calls.

    Args:
        calls: in the order they began.
        started: when the run began, on the clock of the calls.
        ended: when it was over.
        fields: further fields of ``RunRecord``.
    """
    return _Fold(calls, started, ended).run(**fields)


class _Fold:
    def __init__(self, calls: Sequence[Call], started: float, ended: float) -> None:
        self._calls = calls
        self._started, self._ended = started, ended
        self._by_id = {call.id: call for call in calls}
        self._owners = {call.id: self._enclosing_tool(call) for call in calls}

    def run(self, **fields: Any) -> RunRecord:
        """Return the whole run."""
        iterations, tools = self._part(None, self._started, self._ended)
        values: dict[str, Any] = {**fields, **self._shares(None, self._started, self._ended)}
        record = RunRecord(total_s=self._ended - self._started, iterations=iterations, tools=tools, **values)
        return record.model_copy(update={"gain": run_gain(record)})

    def _part(self, owner: Call | None, begin: float, end: float) -> tuple[list[Iteration], list[ToolCall]]:
        """Return the iterations of the run (None) or of a tool, and the tools before them."""
        models, tools = self._of(owner, "model"), self._of(owner, "tool")
        turns = self._turns(models, tools)
        early = [tool for tool in tools if not self._assign(tool, turns)]
        edges = [begin, *(min(max(turn.started, begin), end) for turn in turns[1:]), end]
        iterations = [
            Iteration(
                start_s=since - self._started,
                seconds=until - since,
                **self._shares(owner, since, until),
                models=[self._model(call) for call in turn.models],
                tools=[self._tool(call) for call in turn.tools],
            )
            for turn, (since, until) in zip(turns, pairwise(edges), strict=False)
        ]
        return iterations, [self._tool(call) for call in early]

    def _turns(self, models: Sequence[Call], tools: Sequence[Call]) -> list[_Turn]:
        """Model nodes: what belongs together stands together, while no tool comes between."""
        turns: list[_Turn] = []
        for call in models:
            last = turns[-1] if turns else None
            if last and self._same_node(last, call) and not _any_between(tools, last.started, call.started):
                last.models.append(call)
            else:
                turns.append(_Turn([call]))
        return turns

    def _same_node(self, turn: _Turn, call: Call) -> bool:
        """Whether a model call is of the same execution of a node, a retry, or one of several made at once."""
        last = turn.models[-1]
        is_retry = last.error is not None and call.parent is not None and last.parent == call.parent
        is_beside = any(m.parent == call.parent and call.started < self._end_of(m) for m in turn.models)
        return is_retry or is_beside or (call.task is not None and last.task == call.task)

    def _assign(self, tool: Call, turns: Sequence[_Turn]) -> bool:
        """To the turn that asked for it, or else the last one of its chain, or else the last one before it."""
        before = [turn for turn in turns if turn.started <= tool.started]
        asked = [turn for turn in before if any(tool.tool_call_id in call.asked for call in turn.models)]
        near = [turn for turn in before if self._root(turn.models[0]) == self._root(tool)]
        found = asked or near or before
        if found:
            found[-1].tools.append(tool)
        return bool(found)

    def _shares(self, owner: Call | None, begin: float, end: float) -> dict[str, float]:
        """Seconds between ``begin`` and ``end`` by what they went into."""
        models, tools = self._of(owner, "model"), self._of(owner, "tool")
        model_s = self._union(models, begin, end)
        busy_s = self._union([*models, *tools], begin, end)
        return {
            "model_s": model_s,
            "tool_s": busy_s - model_s,
            "framework_s": (end - begin) - busy_s,
            "idle_s": (end - begin) - self._union(self._calls, begin, end),
        }

    def _model(self, call: Call) -> ModelCall:
        steps = () if call.is_cached else sorted(call.steps, key=lambda step: -step.total_s)
        seconds = self._end_of(call) - call.started
        return ModelCall(
            **self._common(call),
            provider=call.provider,
            node=call.node,
            ttft_s=_ttft(call, steps),
            streamed=call.streamed,
            cached=call.is_cached,
            input_tokens=call.input_tokens,
            output_tokens=call.output_tokens,
            finish_reason=call.finish_reason,
            phases=_phases(steps[0], seconds) if steps else None,
            step=steps[0] if steps else None,
            other_samples=list(steps[1:]),
            gain=call_gain(steps),
        )

    def _tool(self, call: Call) -> ToolCall:
        end = self._end_of(call)
        iterations, tools = self._part(call, call.started, end)
        return ToolCall(
            **self._common(call),
            tool_call_id=call.tool_call_id,
            model_s=self._union(self._of(call, "model"), call.started, end),
            iterations=iterations,
            tools=tools,
        )

    def _common(self, call: Call) -> dict[str, Any]:
        return {
            "name": call.name,
            "id": None if call.id is None else str(call.id),
            "start_s": call.started - self._started,
            "seconds": self._end_of(call) - call.started,
            "error": call.error,
        }

    def _of(self, owner: Call | None, kind: Kind) -> list[Call]:
        return [call for call in self._calls if call.kind == kind and self._owners[call.id] is owner]

    def _end_of(self, call: Call) -> float:
        return max(call.started, self._ended if call.ended is None else call.ended)

    def _union(self, calls: Sequence[Call], begin: float, end: float) -> float:
        return union_seconds([(call.started, self._end_of(call)) for call in calls], begin, end)

    def _enclosing_tool(self, call: Call) -> Call | None:
        return next((above for above in self._above(call) if above.kind == "tool"), None)

    def _root(self, call: Call) -> Any:
        return [call, *self._above(call)][-1].id

    def _above(self, call: Call) -> list[Call]:
        """Return what the call is part of, from the nearest to the root."""
        found: list[Call] = []
        above = self._by_id.get(call.parent)
        while above is not None and above not in found:
            found.append(above)
            above = self._by_id.get(above.parent)
        return found


def union_seconds(intervals: Sequence[tuple[float, float]], begin: float = -math.inf, end: float = math.inf) -> float:
    """Length of the union of intervals, between ``begin`` and ``end``."""
    total, reached = 0.0, begin
    for since, until in sorted(intervals):
        until = min(until, end)
        total += max(0.0, until - max(since, reached))
        reached = max(reached, until)
    return total


def _any_between(tools: Sequence[Call], begin: float, end: float) -> bool:
    return any(begin <= tool.started < end for tool in tools)


def _ttft(call: Call, steps: Sequence[Step]) -> float | None:
    """Return the seconds to the first token that was sent, or else to the first that a step reports."""
    if call.first_token is not None:
        return call.first_token - call.started
    return min((step.ttft_s for step in steps), default=None)


def _phases(step: Step, seconds: float) -> Phases | None:
    """Of a call that took so long; what no phase of the step names is other. None for a step that claims more."""
    named = {name: getattr(step, name) for name in Phases.model_fields if name != "other_s"}
    other_s = seconds - sum(named.values())
    return None if other_s < -_ROUNDING_S else Phases(**named, other_s=other_s)
