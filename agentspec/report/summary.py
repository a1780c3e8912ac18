"""What the views of a run share: its columns, counts and order of its calls, and words for its gain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from agentspec.report.schema import Gain, Iteration, ModelCall, Phases, RunRecord, Step, Theory, ToolCall

Call: TypeAlias = ModelCall | ToolCall
T = TypeVar("T")
PHASES = tuple(Phases.model_fields)


@dataclass(frozen=True)
class Totals:
    """Counts and seconds of some model calls, cached ones left out; None for what one of the calls does not report.

    Where calls overlap, so do their seconds.

    Args:
        calls: number of calls, cached ones included.
        cached: how many of them a cache answered.
        input_tokens: of the prompts.
        output_tokens: of the answers.
        phases: seconds by field of ``Phases``.
        steps: of all samples of the calls.
    """

    calls: int
    cached: int
    input_tokens: int | None
    output_tokens: int | None
    phases: dict[str, float] | None
    steps: tuple[Step, ...] | None

    @classmethod
    def of(cls, calls: Sequence[ModelCall]) -> Totals:
        """Return the totals of calls."""
        counted = [call for call in calls if not call.cached]
        phases = _all_known(call.phases for call in counted)
        steps = None if _all_known(call.step for call in counted) is None else [s for c in counted for s in c.steps]
        return cls(
            calls=len(calls),
            cached=len(calls) - len(counted),
            input_tokens=_sum(call.input_tokens for call in counted),
            output_tokens=_sum(call.output_tokens for call in counted),
            phases=None if phases is None else {name: sum(getattr(p, name) for p in phases) for name in PHASES},
            steps=None if steps is None else tuple(steps),
        )

    def count(self, count: Callable[[Step], int]) -> int | None:
        """Return a count of all steps together."""
        return None if self.steps is None else sum(map(count, self.steps))

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without any."""
        return _ratio(self.count(lambda step: step.accepted_tokens), self.count(lambda step: step.drafted_tokens))

    @property
    def tokens_per_target_call(self) -> float | None:
        """Tokens emitted per round; None without a round."""
        emitted = self.count(lambda step: sum(length * n for length, n in step.accepted_lengths.items()))
        return _ratio(emitted, self.count(lambda step: step.rounds))


@dataclass(frozen=True)
class Column:
    """An iteration, or the whole run, of which the agent's own model calls are counted.

    Args:
        name: the iteration's number, or "run".
        total_s: wall time; model, tools and framework add up to it.
        model_s: a model was at work.
        tool_s: a tool, but no model, was at work.
        framework_s: neither.
        idle_s: of ``framework_s``, the seconds outside of every chain, model and tool.
        totals: of its model calls.
        models: those calls.
        tools: its tool calls.
    """

    name: str
    total_s: float
    model_s: float
    tool_s: float
    framework_s: float
    idle_s: float
    totals: Totals
    models: tuple[ModelCall, ...]
    tools: tuple[ToolCall, ...]

    @property
    def is_run(self) -> bool:
        """Whether this is the whole run."""
        return self.name == "run"

    @property
    def all_cached(self) -> bool:
        """Whether a cache gave every answer."""
        return self.totals.cached == self.totals.calls


def columns(run: RunRecord) -> list[Column]:
    """Return the iterations of a run, and the run itself as the last."""
    found = [_column(f"{n}", each.seconds, each, each.models) for n, each in enumerate(run.iterations, 1)]
    own = [call for iteration in run.iterations for call in iteration.models]
    return [*found, _column("run", run.total_s, run, own)]


def _column(name: str, total_s: float, part: Iteration | RunRecord, models: Sequence[ModelCall]) -> Column:
    seconds = (part.model_s, part.tool_s, part.framework_s, part.idle_s)
    return Column(name, total_s, *seconds, Totals.of(models), tuple(models), tuple(part.tools))


def calls_within(
    iterations: Iterable[Iteration], early: Sequence[ToolCall] = (), depth: int = 0
) -> Iterator[tuple[int, Call]]:
    """Yield calls by their beginning, each with the number of tools around it and followed by the calls within it."""
    for call in sorted([*early, *own_calls(iterations)], key=lambda call: call.start_s):
        yield depth, call
        if isinstance(call, ToolCall):
            yield from calls_within(call.iterations, call.tools, depth + 1)


def own_calls(iterations: Iterable[Iteration]) -> Iterator[Call]:
    """Yield the calls of iterations, not those within their tools."""
    for iteration in iterations:
        yield from iteration.models
        yield from iteration.tools


def phase_label(phase: str) -> str:
    """Return the name of a phase for people: ``draft prefill``."""
    return phase.removesuffix("_s").replace("_", " ")


def describe_baseline(gain: Gain) -> str:
    """Return what a measured gain was measured against."""
    return f"measured against {gain.baseline or 'a plain run'}"


def describe_theory(theory: Theory) -> str:
    """Return what the paper's formulas say, in words."""
    measured = f"alpha {theory.alpha:.2f}, gamma {theory.gamma:.1f}, c {theory.c:.3f}"
    verifying = f"{theory.improvement_at_v:.2f} with verifying at {theory.v:.2f} plain passes"
    return f"{theory.improvement:.2f} times at {measured}; {verifying}"


def _all_known(values: Iterable[T | None]) -> list[T] | None:
    """Return the values; None where there are none, or one of them is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return known if known and len(known) == len(found) else None


def _sum(values: Iterable[int | None]) -> int | None:
    known = _all_known(values)
    return None if known is None else sum(known)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
