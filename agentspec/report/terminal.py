"""An agent run on the terminal, by rich: a column per iteration of the tool loop, plain where there is no terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.report import AgentRun

PHASES = ("queue_s", "prefill_s", "draft_s", "mask_s", "verify_s", "sample_s", "detokenize_s")
COUNTS = {
    "prompt_tokens": "prompt tokens",
    "cached_tokens": "  of them cached",
    "new_tokens": "new tokens",
    "forced_tokens": "  of them forced",
    "rounds": "rounds",
    "mean_accepted_length": "mean accepted length",
    "drafted_tokens": "drafted tokens",
    "acceptance_rate": "acceptance rate",
}


def show(run: AgentRun, console: Console | None = None) -> None:
    """Print the run: seconds of every iteration by what they went into, its counts, and totals of both."""
    data = run.to_dict()
    steps = [iteration["step"] for iteration in data["iterations"] if not iteration["cached"]]
    whole = {**data, "step": _sum(steps), "tools": []}
    columns = [*data["iterations"], whole]
    table = Table(title=f"{run.name or 'agent run'}: {run.total_s:.2f} s", title_justify="left", show_edge=False)
    table.add_column("")
    for number, iteration in enumerate(data["iterations"], 1):
        table.add_column(f"iteration {number}" + " (cached)" * iteration["cached"], justify="right")
    table.add_column("run", justify="right")
    table.add_row("model, s", *[_seconds(column["model_s"]) for column in columns])
    for phase in PHASES:
        table.add_row(f"  {phase.removesuffix('_s')}", *[_phase(column, phase) for column in columns])
    table.add_row("  other", *[_other(column) for column in columns])
    table.add_row("tools, s", *[_seconds(column["tool_s"]) for column in columns])
    table.add_row("framework, s", *[_seconds(column["framework_s"]) for column in columns])
    totals = [column["model_s"] + column["tool_s"] + column["framework_s"] for column in columns]
    table.add_row("total, s", *map(_seconds, totals), end_section=True)
    for name, label in COUNTS.items():
        table.add_row(label, *[_count(column, name) for column in columns])
    table.add_row("tools", *["\n".join(tool["name"] for tool in column["tools"]) for column in columns])
    (console or Console()).print(table)


def _phase(column: dict[str, Any], phase: str) -> str:
    return "-" if column["step"] is None else _seconds(column["step"][phase])


def _other(column: dict[str, Any]) -> str:
    """The model's seconds that no phase names: template, tokeniser and LangChain's side included."""
    step = column["step"]
    return "-" if step is None else _seconds(column["model_s"] - sum(step[phase] for phase in PHASES))


def _count(column: dict[str, Any], name: str) -> str:
    value = None if column["step"] is None else column["step"][name]
    if value is None:
        return "-"
    if name == "acceptance_rate":
        return f"{value:.0%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _sum(steps: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The steps of a run as one; None where one of them is not known."""
    known = [step for step in steps if step is not None]
    if not known or len(known) < len(steps):
        return None
    whole = {name: sum(step[name] for step in known) for name in (*PHASES, *COUNTS) if not _is_mean(name)}
    accepted = sum(step["accepted_tokens"] for step in known)
    emitted = sum(step["mean_accepted_length"] * step["rounds"] for step in known if step["rounds"])
    whole["mean_accepted_length"] = emitted / whole["rounds"] if whole["rounds"] else None
    whole["acceptance_rate"] = accepted / whole["drafted_tokens"] if whole["drafted_tokens"] else None
    return whole


def _is_mean(name: str) -> bool:
    return name in ("mean_accepted_length", "acceptance_rate")


def _seconds(value: float) -> str:
    return f"{value:.3f}"
