"""An agent run as one HTML file, which needs nothing but itself: no script, no font, no address.

``document`` is a page, ``fragment`` what a notebook shows: its style reaches nothing outside of it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from agentspec.report.schema import Gain, ModelCall, RunRecord, Step, ToolCall
from agentspec.report.summary import (
    PHASES,
    Column,
    Totals,
    columns,
    describe_baseline,
    describe_theory,
    phase_label,
)
from agentspec.report.views.markup import render
from agentspec.report.views.svg import clock, histogram, share, swatch, totals, waterfall

Table = tuple[list[str], list[tuple[str, list[str | None]]]]
"""Names of columns, and rows by name; None for what is not known. The last row is a sum."""

MINUS = "\N{MINUS SIGN}"

PASS_SOURCES = {
    "engine": "as the engine measured it",
    "measured": "from rounds of width 1",
    "extrapolated": "by a line through wider passes",
    "bound": "the cheapest pass there was, which is more than a plain one takes",
}

COUNTS: dict[str, Callable[[Step], int]] = {
    "input cached": lambda step: step.cached_tokens,
    "forced": lambda step: step.forced_tokens,
    "target calls": lambda step: step.target_calls,
    "drafted": lambda step: step.drafted_tokens,
    "accepted": lambda step: step.accepted_tokens,
}


def write(run: RunRecord, path: Path) -> None:
    """Write the run as a page of its own.

    Raises:
        OSError: for a path that cannot be written.
    """
    path.write_text(document(run), encoding="utf-8")


def document(run: RunRecord) -> str:
    """Return a whole page."""
    name = f"{run.name or 'agent run'}: {clock(run.total_s)}"
    return str(render("page.jinja", name=name, fragment=_fragment(run))) + "\n"


def fragment(run: RunRecord) -> str:
    """Return the run as a part of another page."""
    return str(_fragment(run))


def _fragment(run: RunRecord) -> Markup:
    style = files("agentspec.report.views").joinpath("style.css").read_text(encoding="utf-8")
    drawing = waterfall(run)
    whole = columns(run)
    known = [call.phases for call in run.model_calls if call.phases is not None]
    phases = [phase_label(phase) for phase in PHASES if any(getattr(each, phase) for each in known)]
    return render(
        "fragment.jinja",
        style=Markup(style),
        name=run.name or "agent run",
        about=_about(run),
        wrong=_wrong(run),
        tiles=_tiles(run),
        totals=totals(run),
        waterfall=drawing,
        legend=_legend(run, phases),
        has_phases=bool(phases),
        swatch=swatch,
        seconds=_seconds(whole, PHASES if known else ()),
        tokens=_tokens(whole, has_steps=any(call.step for call in run.model_calls)) if run.iterations else None,
        **_worth(run.gain),
    )


def _about(run: RunRecord) -> str:
    began = datetime.datetime.fromtimestamp(run.began_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{began} · {_many(len(run.model_calls), 'model call')}, {_many(len(run.tool_calls), 'tool call')}"


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    parts = (("model", run.model_s), ("tools", run.tool_s), ("framework", run.framework_s))
    tiles = [(clock(run.total_s), "in total")]
    tiles += [(clock(seconds), kind + _share(seconds, run.total_s)) for kind, seconds in parts]
    if run.gain is not None and run.gain.ratio is not None:
        tiles.append(
            (
                f"{run.gain.ratio:.2f} \N{MULTIPLICATION SIGN}",
                "estimated gain" if run.gain.estimated else "measured gain",
            )
        )
    return tiles


def _wrong(run: RunRecord) -> list[tuple[str, str]]:
    """Return what went wrong: the name of what failed, or nothing, and a text."""
    problems = [] if run.error is None else [("", f"The run was ended by {run.error}")]
    if run.over_budget_s:
        problems.append(("", f"Over its budget of {clock(run.budget_s or 0.0)} by {clock(run.over_budget_s)}"))
    calls: list[ModelCall | ToolCall] = [*run.model_calls, *run.tool_calls]
    failed = sorted((call for call in calls if call.error is not None), key=lambda call: call.end_s)
    return problems + [(call.name, f"failed at {clock(call.end_s)}: {call.error}") for call in failed]


def _share(part: float, whole: float) -> str:
    if whole <= 0:
        return ""
    percent = 100 * part / whole
    rounded = "<1" if 0 < percent < 0.5 else ">99" if 99.5 <= percent < 100 else f"{percent:.0f}"
    return f" · {rounded}%"


def _legend(run: RunRecord, phases: Sequence[str]) -> list[str]:
    is_failed = any([*(call.error for call in run.model_calls), *(call.error for call in run.tool_calls)])
    kinds = ["tool", "framework", *(["error"] if is_failed else [])]
    if not phases or any(call.phases is None and not call.cached for call in run.model_calls):
        kinds = ["model", *kinds]
    return [*phases, *kinds]


def _seconds(whole: Sequence[Column], phases: Sequence[str]) -> Table:
    """Return the seconds of every iteration."""
    names = ["total", "model", "tools", "framework", "of it idle", *map(phase_label, phases)]
    body: list[tuple[str, list[str | None]]] = []
    for column in whole:
        parts = (column.total_s, column.model_s, column.tool_s, column.framework_s, column.idle_s)
        of_phases = column.totals.phases or {}
        body.append((column.name, [_number(part, ".3f") for part in (*parts, *map(of_phases.get, phases))]))
    return names, body


def _tokens(whole: Sequence[Column], *, has_steps: bool) -> Table:
    """Return counts of every iteration, and of all calls together in the last line."""
    names = ["calls", "input", "output", *COUNTS, "rate", "tokens a target call"]
    if not has_steps:
        names = names[:3]
    return names, [(column.name, _counts(column.totals)[: len(names)]) for column in whole]


def _counts(of: Totals) -> list[str | None]:
    return [
        f"{of.calls}, {of.cached} cached" if of.cached else f"{of.calls}",
        _number(of.input_tokens, "d"),
        _number(of.output_tokens, "d"),
        *(_number(of.count(count), "d") for count in COUNTS.values()),
        _number(of.acceptance_rate, ".0%"),
        _number(of.tokens_per_target_call, ".2f"),
    ]


def _worth(gain: Gain | None) -> dict[str, Any]:
    """Return whether speculation was worth it, in words and charts."""
    if gain is None:
        return {"gain": False}
    shares = [
        (name, f"{counts.accepted} of {counts.drafted}", share(counts.accepted, counts.drafted))
        for name, counts in gain.drafters.items()
        if counts.drafted
    ]
    drawn = histogram(gain.accepted_lengths) if any(gain.accepted_lengths.values()) else None
    return {"gain": True, "verdict": _verdict(gain), "gains": _gains(gain), "shares": shares, "histogram": drawn}


def _verdict(gain: Gain) -> tuple[str, str]:
    if gain.ratio is None or gain.plain_decode_s is None:
        return "", "Not known: no pass of the target was timed."
    basis = "estimated from this run's own passes" if gain.estimated else describe_baseline(gain)
    pays = f"{gain.ratio:.2f} times faster" if gain.ratio >= 1 else f"did not pay: {gain.ratio:.2f} times the speed"
    times = f"decoding took {clock(gain.decode_s)}, plainly {clock(gain.plain_decode_s)}"
    return pays, f"({basis}): {times}."


def _gains(gain: Gain) -> list[tuple[str, str | None]]:
    """Names and values; None for what is not known."""
    mark = " (estimated)" if gain.estimated else " (measured)"
    passed = None if gain.plain_pass_s is None else clock(gain.plain_pass_s)
    if passed and gain.plain_pass_from:
        passed += f", {PASS_SOURCES[gain.plain_pass_from]}"
    saved = gain.saved_s
    return [
        ("saved", None if saved is None else f"{MINUS if saved < 0 else ''}{clock(abs(saved))}{mark}"),
        ("target calls", f"{gain.target_calls} for {gain.tokens} tokens, {gain.target_calls_saved} saved"),
        ("tokens a target call", _number(gain.mean_accepted_length, ".2f")),
        ("accepted", None if gain.acceptance_rate is None else f"{gain.acceptance_rate:.0%} of drafted tokens"),
        ("drafting", f"{clock(gain.draft_s)}, of it {clock(gain.wasted_draft_s)} for nothing"),
        ("a plain pass", passed),
        ("c", None if gain.c is None else f"{gain.c:.3f} plain passes for a drafted token"),
        ("same tokens", None if gain.same_tokens is None else "yes" if gain.same_tokens else "no"),
        ("the paper's formula", None if gain.theory is None else describe_theory(gain.theory)),
        ("to know", " ".join(gain.remarks) or None),
    ]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
