"""An agent run as data: which model and tool calls it made, and where its wall time went.

A tracker (in the integrations) records ``ModelCall`` and ``ToolCall`` events; ``AgentRun`` folds them into iterations
of the tool loop. Every second of the run belongs to a model call, to tools, or to the framework around them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """Something that took time: seconds on a monotonic clock; ``ended`` is None while it runs.

    Args:
        name: of the model or tool.
        started: when it began.
        ended: when it was over.
        error: what went wrong, if anything did.
        details: what a model step says of itself (``StepStats.to_dict``); None where it says nothing.
        cached: whether a cache gave the answer; its step is then no part of this run.
        began_at: time of day at which it began, in seconds since 1970.
    """

    name: str
    started: float
    ended: float | None = None
    error: str | None = None
    details: dict[str, Any] | None = None
    cached: bool = False
    began_at: float = field(default_factory=time.time)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.started if self.ended is None else self.ended) - self.started


@dataclass
class Iteration:
    """One turn of the tool loop: a model call and the tools it called."""

    model: Call
    tools: list[Call] = field(default_factory=list)

    @property
    def tool_s(self) -> float:
        """Seconds in which at least one tool ran: parallel tools overlap, they do not add up."""
        return union_seconds(self.tools)


@dataclass
class AgentRun:
    """A run from its first to its last second.

    Args:
        name: of the run.
        started: when it began, on a monotonic clock.
        ended: when it was over.
        calls: model calls and tool calls in the order they began.
    """

    name: str | None
    started: float
    ended: float | None = None
    model_calls: list[Call] = field(default_factory=list)
    tool_calls: list[Call] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """Wall time of the run."""
        return Call("run", self.started, self.ended).seconds

    @property
    def model_s(self) -> float:
        """Seconds in which a model was at work."""
        return union_seconds(self.model_calls)

    @property
    def tool_s(self) -> float:
        """Seconds in which a tool, but no model, was at work."""
        return union_seconds([*self.model_calls, *self.tool_calls]) - self.model_s

    @property
    def framework_s(self) -> float:
        """What remains of the wall time: graph, messages, callbacks, the program itself."""
        return self.total_s - self.model_s - self.tool_s

    @property
    def iterations(self) -> list[Iteration]:
        """The turns of the tool loop: every model call opens one, tools belong to the last one before them."""
        iterations = [Iteration(call) for call in self.model_calls]
        for tool in self.tool_calls:
            owner = [i for i in iterations if i.model.started <= tool.started]
            if owner:
                owner[-1].tools.append(tool)
        return iterations

    def to_dict(self) -> dict[str, Any]:
        """The run as JSON values."""
        edges = [self.started, *(i.model.started for i in self.iterations[1:]), self.started + self.total_s]
        iterations = [
            self._iteration(iteration, begin, end)
            for iteration, begin, end in zip(self.iterations, edges, edges[1:], strict=False)
        ]
        return {
            "name": self.name,
            "total_s": self.total_s,
            "model_s": self.model_s,
            "tool_s": self.tool_s,
            "framework_s": self.framework_s,
            "iterations": iterations,
        }

    def _iteration(self, iteration: Iteration, begin: float, end: float) -> dict[str, Any]:
        """What happened between ``begin`` and ``end``. Model calls that overlap (a batch) share their seconds."""
        model_s = union_seconds(self.model_calls, begin, end)
        busy_s = union_seconds([*self.model_calls, *self.tool_calls], begin, end)
        return {
            "model": iteration.model.name,
            "model_s": model_s,
            "tool_s": busy_s - model_s,
            "framework_s": end - begin - busy_s,
            "tools": [{"name": t.name, "seconds": t.seconds, "error": t.error} for t in iteration.tools],
            "step": iteration.model.details,
            "cached": iteration.model.cached,
            "error": iteration.model.error,
        }

    def print(self) -> None:
        """Show the run on the terminal."""
        from agentspec.report.terminal import show  # a view of this module's data, so it cannot be imported above

        show(self)


def union_seconds(calls: Sequence[Call], begin: float = -math.inf, end: float = math.inf) -> float:
    """Length of the union of the calls' intervals, between ``begin`` and ``end``."""
    total, reached = 0.0, begin
    for call in sorted(calls, key=lambda call: call.started):
        until = min(call.started + call.seconds, end)
        total += max(0.0, until - max(call.started, reached))
        reached = max(reached, until)
    return total
