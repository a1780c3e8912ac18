"""Runs as they might have been recorded, for tests of the views: parallel tools, agents within tools, errors, and
models that say nothing of themselves."""

from __future__ import annotations

from typing import Any

from agentspec.report import Iteration, ModelCall, Phases, RunRecord, Step, ToolCall
from agentspec.report.gain import call_gain, run_gain
from agentspec.stats import PHASES

BEGAN = 1_796_000_000.0
EVIL = """<script>alert("1")</script>&'\x07"""


def step(seconds: float, tokens: int = 12, **changes: Any) -> Step:
    """A step of so many seconds: 5 rounds, of which two emitted a single token."""
    values: dict[str, Any] = {
        "prompt_tokens": 300,
        "cached_tokens": 250,
        "new_tokens": tokens,
        "rounds": 5,
        "target_calls": 5,
        "drafted_tokens": 8,
        "accepted_tokens": tokens - 7,
        "rejections": 2,
        "forced_tokens": 2,
        "constrained_tokens": 6,
        "mean_accepted_length": tokens / 5,
        "acceptance_rate": (tokens - 7) / 8,
        "drafters": {"forced": {"drafted": 2, "accepted": 2}, "lookup": {"drafted": 8, "accepted": tokens - 7}},
        "accepted_lengths": {1: 2, 3: 2, tokens - 8: 1},
        "verify_costs": {
            1: {"rounds": 2, "seconds": 0.2 * seconds, "least_s": 0.09 * seconds},
            4: {"rounds": 3, "seconds": 0.4 * seconds, "least_s": 0.12 * seconds},
        },
        **split(seconds),
        "ttft_s": 0.3 * seconds,
        "total_s": seconds,
        "ended_at": BEGAN,
    }
    return Step.model_validate({**values, **changes})


def split(seconds: float) -> dict[str, float]:
    """Seconds by phase; they add up."""
    shares = (0.02, 0.03, 0.15, 0.05, 0.05, 0.02, 0.6, 0.04, 0.01, 0.03)
    return {phase: share * seconds for phase, share in zip(PHASES, shares, strict=True)}


def model(start_s: float, seconds: float, name: str = "embedded", **changes: Any) -> ModelCall:
    """A call of a model of agentspec."""
    known = step(seconds)
    values: dict[str, Any] = {
        "name": name,
        "provider": "agentspec",
        "id": f"model-{start_s:g}",
        "node": "model",
        "start_s": start_s,
        "seconds": seconds,
        "ttft_s": 0.3 * seconds,
        "input_tokens": 300,
        "output_tokens": 12,
        "finish_reason": "tool_calls",
        "phases": Phases(**split(seconds)),
        "step": known,
        "gain": call_gain([known]),
    }
    return ModelCall.model_validate({**values, **changes})


def stranger(start_s: float, seconds: float, name: str = "gpt-x", **changes: Any) -> ModelCall:
    """A call of a model that says only how many tokens there were."""
    values = {"provider": "openai", "start_s": start_s, "seconds": seconds, "input_tokens": 40, "output_tokens": 9}
    return ModelCall.model_validate({"name": name, **values, **changes})


def tool(start_s: float, seconds: float, name: str = "get_price", **changes: Any) -> ToolCall:
    """A call of a tool."""
    return ToolCall(name=name, start_s=start_s, seconds=seconds, tool_call_id=f"call-{name}", **changes)


def turn(start_s: float, seconds: float, model_s: float, tool_s: float, **parts: Any) -> Iteration:
    """An iteration; what is neither model nor tool is the framework's."""
    rest = seconds - model_s - tool_s
    times = {"model_s": model_s, "tool_s": tool_s, "framework_s": rest, "idle_s": 0.0}
    return Iteration(start_s=start_s, seconds=seconds, **times, **parts)


def run(iterations: list[Iteration], total_s: float, **changes: Any) -> RunRecord:
    """A run of these iterations."""
    model_s, tool_s = sum(i.model_s for i in iterations), sum(i.tool_s for i in iterations)
    values: dict[str, Any] = {"name": "shop", "began_at": BEGAN, "total_s": total_s, "iterations": iterations}
    values |= {"model_s": model_s, "tool_s": tool_s, "framework_s": total_s - model_s - tool_s, "idle_s": 0.125}
    record = RunRecord.model_validate({**values, **changes})
    return record.model_copy(update={"gain": run_gain(record)})


def simple() -> RunRecord:
    """A model, a tool, a model."""
    first = turn(0.0, 5.0, 3.0, 1.0, models=[model(0.5, 3.0)], tools=[tool(3.75, 1.0)])
    return run([first, turn(5.0, 3.0, 2.0, 0.0, models=[model(5.5, 2.0)])], 8.0)


def busy() -> RunRecord:
    """Everything at once: parallel tools, an agent within one of them, a retry, an error, a cached answer, samples."""
    within = turn(
        4.1, 1.9, 1.0, 0.5, models=[model(4.25, 1.0, "embedded")], tools=[tool(5.25, 0.5, "search_the_archive")]
    )
    tools = [
        tool(4.0, 2.0, "research", model_s=1.0, iterations=[within]),
        tool(4.0, 0.75, "get_price"),
        tool(4.25, 1.0, EVIL, error="ValueError('no <b>item</b> of this name')"),
    ]
    unknown = dict.fromkeys(("phases", "step", "gain", "ttft_s", "output_tokens", "finish_reason"))
    failed = model(0.25, 0.5, error="TimeoutError('too slow')", **unknown)
    samples = model(1.0, 2.5, other_samples=[step(2.0), step(1.5, 15)])
    turns = [
        turn(0.0, 6.5, 3.0, 2.0, models=[failed, samples], tools=tools),
        turn(6.5, 1.0, 0.0, 0.25, models=[stranger(6.75, 0.0, "embedded", cached=True)], tools=[tool(7.0, 0.25)]),
        turn(7.5, 2.5, 2.0, 0.0, models=[stranger(7.75, 2.0, "gpt-x-with-a-very-long-name-that-goes-on-and-on")]),
    ]
    return run(turns, 10.0, budget_s=9.0, error="RuntimeError('the day is over')")


def third_party() -> RunRecord:
    """A run on a model that says nothing of itself, streamed, with a tool that failed."""
    first = turn(0.0, 2.0, 1.0, 0.5, models=[stranger(0.25, 1.0, streamed=True, ttft_s=0.25)], tools=[tool(1.25, 0.5)])
    last = turn(2.0, 1.0, 0.75, 0.0, models=[stranger(2.0, 0.75, input_tokens=None, output_tokens=None)])
    return run([first, last], 3.0, name=None)


def empty() -> RunRecord:
    """A run in which nothing happened, in no time."""
    return run([], 0.0, name="nothing", idle_s=0.0)


def long() -> RunRecord:
    """A run of 40 iterations and five minutes."""
    turns = [
        turn(7.5 * i, 7.5, 5.0, 2.0, models=[model(7.5 * i, 5.0)], tools=[tool(7.5 * i + 5.25, 2.0, f"tool_{i}")])
        for i in range(40)
    ]
    return run(turns, 300.0)
