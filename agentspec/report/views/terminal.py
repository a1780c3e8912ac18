"""An agent run on the terminal, by rich: its seconds per iteration and as bars, plain where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentspec.report.schema import Gain, Iteration, ModelCall, Phases, RunRecord, Step, ToolCall
from agentspec.runtime.visible import visible

BAR_CELLS = 40
"""Width of the waterfall."""

ITERATIONS_PER_TABLE = 5

_ROUNDING_S = 1e-6

COLOURS = {"model": "cyan", "tool": "yellow", "error": "red"}
COUNTS: dict[str, Callable[[Step], int]] = {
    "prompt tokens": lambda step: step.prompt_tokens,
    "  of them cached": lambda step: step.cached_tokens,
    "new tokens": lambda step: step.new_tokens,
    "  of them forced": lambda step: step.forced_tokens,
    "rounds": lambda step: step.rounds,
    "drafted tokens": lambda step: step.drafted_tokens,
}


def show(run: RunRecord, console: Console | None = None) -> None:
    """Print the run: seconds of every iteration by what they went into, its counts, a waterfall, and the gain."""
    (console or Console()).print(view(run))


def view(run: RunRecord) -> RenderableType:
    """Return a run as text."""
    parts = _tables(run)
    if run.model_calls or run.tool_calls:
        parts += [Text(), waterfall(run)]
    if sum(call.seconds for call in _models(run)) > run.model_s + _ROUNDING_S:
        parts.append(Text("model calls overlapped: their phases are sums of more seconds than there were"))
    if run.gain is not None:
        parts += [Text(), Text(visible(told_gain(run.gain), lines=True))]
    if run.over_budget_s:
        parts.append(Text(f"over its budget of {run.budget_s:g} s by {run.over_budget_s:.3f} s", style="bold red"))
    if run.error is not None:
        parts.append(Text(f"ended by {visible(run.error, lines=True)}", style="bold red"))
    return Group(*parts)


def _tables(run: RunRecord) -> list[RenderableType]:
    """Return the iterations side by side, as many in a table as fit, and the whole run after the last."""
    size = ITERATIONS_PER_TABLE
    numbered = list(enumerate(run.iterations, 1))
    groups = [numbered[at : at + size] for at in range(0, len(numbered), size)] or [[]]
    title = Text(f"{visible(run.name or 'agent run')}: {run.total_s:.2f} s", style="bold")
    tables: list[RenderableType] = [title]
    for group in groups:
        tables += [Text(), _table(group, run if group is groups[-1] else None)]
    return tables


def _table(numbered: Sequence[tuple[int, Iteration]], run: RunRecord | None) -> Table:
    table = Table(show_edge=False)
    table.add_column("")
    for number, iteration in numbered:
        table.add_column(f"iteration {number}" + _remark(iteration), justify="right")
    columns: list[Iteration | RunRecord] = [iteration for _, iteration in numbered]
    if run is not None:
        table.add_column("run", justify="right")
        columns.append(run)
    calls = [_models(column) for column in columns]
    table.add_row("model, s", *[_s(column.model_s) for column in columns])
    for phase in Phases.model_fields:
        table.add_row(f"  {_label(phase)}", *[_sum_of_phase(of, phase) for of in calls])
    table.add_row("tools, s", *[_s(column.tool_s) for column in columns])
    table.add_row("framework, s", *[_s(column.framework_s) for column in columns])
    table.add_row("  of it idle", *[_s(column.idle_s) for column in columns])
    totals = [column.seconds if isinstance(column, Iteration) else column.total_s for column in columns]
    table.add_row("total, s", *map(_s, totals), end_section=True)
    for label, count in COUNTS.items():
        table.add_row(label, *[_sum_of(of, count) for of in calls])
    table.add_row("accepted", *[_rate(of) for of in calls])
    table.add_row("tokens a round", *[_length(of) for of in calls])
    table.add_row("tools", *[Text("\n".join(visible(tool.name) for tool in column.tools)) for column in columns])
    return table


def _models(column: Iteration | RunRecord) -> list[ModelCall]:
    """Return the table of the agent's own model calls."""
    iterations = column.iterations if isinstance(column, RunRecord) else [column]
    return [call for iteration in iterations for call in iteration.models]


def waterfall(run: RunRecord, cells: int = BAR_CELLS) -> Table:
    """Draw a bar per model and tool call, where it began and how long it took; calls within tools stand below them."""
    table = Table(show_header=False, show_edge=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column(no_wrap=True, min_width=cells)
    table.add_column(justify="right", no_wrap=True)
    for depth, call in _calls(run.iterations, run.tools, 0):
        kind = "model" if isinstance(call, ModelCall) else "tool"
        label = visible(call.name) if isinstance(call, ModelCall) else f"{visible(call.name)}()"
        colour = COLOURS["error" if call.error else kind]
        remark = " cached" if isinstance(call, ModelCall) and call.cached else " failed" if call.error else ""
        table.add_row(
            Text("  " * depth + label),
            Text(bar(call.start_s, call.end_s, run.total_s, cells), style=colour),
            f"{call.seconds:.3f} s{remark}",
        )
    return table


def bar(begin: float, end: float, total: float, cells: int) -> str:
    """``begin`` to ``end`` of ``total`` seconds on a line of cells; something is always seen."""
    if total <= 0:
        return "━" * cells
    first = min(cells - 1, int(begin / total * cells))
    length = max(1, min(cells, round(end / total * cells)) - first)
    return " " * first + "━" * length


def told_gain(gain: Gain) -> str:
    """Return the gain in words."""
    lines = [
        f"{gain.tokens} tokens in {gain.target_calls} target calls, {gain.target_calls_saved} saved; emitted at once: "
        + (", ".join(f"{n} x {length}" for length, n in gain.accepted_lengths.items()) or "nothing")
    ]
    accepted = [f"{name} {count.accepted} of {count.drafted}" for name, count in gain.drafters.items() if count.drafted]
    if not accepted:
        lines.append("nothing was drafted: this was plain decoding")
        return "\n".join([*lines, *gain.remarks])
    lines.append(f"accepted: {', '.join(accepted)}; {gain.wasted_draft_s:.3f} s of drafting were for nothing")
    if gain.ratio is not None and gain.plain_decode_s is not None:
        how = "estimated" if gain.estimated else f"measured against {gain.baseline or 'a plain run'}"
        times = f"decoding {gain.decode_s:.3f} s, plainly {gain.plain_decode_s:.3f} s"
        lines.append(f"{times}: {gain.ratio:.2f} times faster ({how})")
        if gain.ratio < 1:
            lines.append("speculation did not pay here")
    if gain.theory is not None:
        theory = gain.theory
        measured = f"alpha {theory.alpha:.2f}, gamma {theory.gamma:.1f}, c {theory.c:.3f}"
        lines.append(
            f"the paper's formula: {theory.improvement:.2f} times at {measured}; {theory.improvement_at_v:.2f} with "
            f"verifying at {theory.v:.2f} plain passes"
        )
    return "\n".join([*lines, *gain.remarks])


def _calls(
    iterations: Sequence[Iteration], early: Sequence[ToolCall], depth: int
) -> list[tuple[int, ModelCall | ToolCall]]:
    """Return calls by their beginning, each with the number of tools around it."""
    own: list[ModelCall | ToolCall] = [*early]
    for iteration in iterations:
        own += [*iteration.models, *iteration.tools]
    found: list[tuple[int, ModelCall | ToolCall]] = []
    for call in sorted(own, key=lambda call: call.start_s):
        found.append((depth, call))
        if isinstance(call, ToolCall):
            found += _calls(call.iterations, call.tools, depth + 1)
    return found


def _remark(iteration: Iteration) -> str:
    if all(call.cached for call in iteration.models):
        return " (cached)"
    return " (failed)" if iteration.models[-1].error else ""


def _label(phase: str) -> str:
    return phase.removesuffix("_s").replace("_", " ")


def _sum_of_phase(calls: Sequence[ModelCall], phase: str) -> str:
    """Seconds of the calls; a dash where one of them is not known. Where calls overlap, so do their seconds."""
    counted = [call for call in calls if not call.cached]
    if not counted or any(call.phases is None for call in counted):
        return "-"
    return _s(sum(getattr(call.phases, phase) for call in counted))


def _steps(calls: Sequence[ModelCall]) -> list[Step] | None:
    """All steps of the calls; None where one call does not tell."""
    counted = [call for call in calls if not call.cached]
    if not counted or any(call.step is None for call in counted):
        return None
    return [step for call in counted for step in call.steps]


def _sum_of(calls: Sequence[ModelCall], count: Callable[[Step], int]) -> str:
    steps = _steps(calls)
    return "-" if steps is None else str(sum(map(count, steps)))


def _rate(calls: Sequence[ModelCall]) -> str:
    steps = _steps(calls) or []
    drafted = sum(step.drafted_tokens for step in steps)
    return f"{sum(step.accepted_tokens for step in steps) / drafted:.0%}" if drafted else "-"


def _length(calls: Sequence[ModelCall]) -> str:
    steps = _steps(calls) or []
    emitted = sum(length * n for step in steps for length, n in step.accepted_lengths.items())
    rounds = sum(step.rounds for step in steps)
    return f"{emitted / rounds:.2f}" if rounds else "-"


def _s(value: float) -> str:
    return f"{value:.3f}"
