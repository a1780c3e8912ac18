"""An agent run on the terminal, by rich: its seconds per iteration and as bars, plain where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentspec.report.schema import Gain, ModelCall, RunRecord, Step
from agentspec.report.summary import (
    PHASES,
    Column,
    calls_within,
    columns,
    describe_baseline,
    describe_theory,
    phase_label,
)
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
    whole = columns(run)
    parts = _tables(run, whole)
    if run.model_calls or run.tool_calls:
        parts += [Text(), waterfall(run)]
    if sum(call.seconds for call in whole[-1].models) > run.model_s + _ROUNDING_S:
        parts.append(Text("model calls overlapped: their phases are sums of more seconds than there were"))
    if run.gain is not None:
        parts += [Text(), Text(visible(describe_gain(run.gain), lines=True))]
    if run.over_budget_s:
        parts.append(Text(f"over its budget of {run.budget_s:g} s by {run.over_budget_s:.3f} s", style="bold red"))
    if run.error is not None:
        parts.append(Text(f"ended by {visible(run.error, lines=True)}", style="bold red"))
    return Group(*parts)


def _tables(run: RunRecord, whole: Sequence[Column]) -> list[RenderableType]:
    """Return the iterations side by side, as many in a table as fit, and the whole run after the last."""
    size, iterations = ITERATIONS_PER_TABLE, whole[:-1]
    groups = [list(iterations[at : at + size]) for at in range(0, len(iterations), size)] or [[]]
    groups[-1].append(whole[-1])
    title = Text(f"{visible(run.name or 'agent run')}: {run.total_s:.2f} s", style="bold")
    tables: list[RenderableType] = [title]
    for group in groups:
        tables += [Text(), _table(group)]
    return tables


def _table(group: Sequence[Column]) -> Table:
    table = Table(show_edge=False)
    table.add_column("")
    for column in group:
        table.add_column(_heading(column), justify="right")
    table.add_row("model, s", *[_s(column.model_s) for column in group])
    for phase in PHASES:
        table.add_row(f"  {phase_label(phase)}", *[_seconds_of(column, phase) for column in group])
    table.add_row("tools, s", *[_s(column.tool_s) for column in group])
    table.add_row("framework, s", *[_s(column.framework_s) for column in group])
    table.add_row("  of it idle", *[_s(column.idle_s) for column in group])
    table.add_row("total, s", *[_s(column.total_s) for column in group], end_section=True)
    for label, count in COUNTS.items():
        table.add_row(label, *[_or_dash(column.totals.count(count), "d") for column in group])
    table.add_row("accepted", *[_or_dash(column.totals.acceptance_rate, ".0%") for column in group])
    table.add_row("tokens a round", *[_or_dash(column.totals.tokens_per_target_call, ".2f") for column in group])
    table.add_row("tools", *[Text("\n".join(visible(tool.name) for tool in column.tools)) for column in group])
    return table


def _heading(column: Column) -> str:
    if column.is_run:
        return column.name
    remark = " (cached)" if column.all_cached else " (failed)" if column.models[-1].error else ""
    return f"iteration {column.name}{remark}"


def _seconds_of(column: Column, phase: str) -> str:
    return _or_dash(None if column.totals.phases is None else column.totals.phases[phase], ".3f")


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def waterfall(run: RunRecord, cells: int = BAR_CELLS) -> Table:
    """Draw a bar per model and tool call, where it began and how long it took; calls within tools stand below them."""
    table = Table(show_header=False, show_edge=False, box=None, padding=(0, 1))
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=32)
    table.add_column(no_wrap=True, min_width=cells)
    table.add_column(justify="right", no_wrap=True)
    for depth, call in calls_within(run.iterations, run.tools):
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


def describe_gain(gain: Gain) -> str:
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
        how = "estimated" if gain.estimated else describe_baseline(gain)
        times = f"decoding {gain.decode_s:.3f} s, plainly {gain.plain_decode_s:.3f} s"
        lines.append(f"{times}: {gain.ratio:.2f} times faster ({how})")
        if gain.ratio < 1:
            lines.append("speculation did not pay here")
    if gain.theory is not None:
        lines.append(f"the paper's formula: {describe_theory(gain.theory)}")
    return "\n".join([*lines, *gain.remarks])


def _s(value: float) -> str:
    return f"{value:.3f}"
