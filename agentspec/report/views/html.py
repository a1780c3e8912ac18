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

from agentspec.report.schema import Gain, ModelCall, Phases, RunRecord, Step, ToolCall
from agentspec.report.views.markup import render
from agentspec.report.views.svg import clock, histogram, label_of, share, swatch, totals, waterfall

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
    phases = [label_of(phase) for phase in Phases.model_fields if any(_phase(c, phase) for c in run.model_calls)]
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
        seconds=_seconds(run),
        tokens=_tokens(run),
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
    told = [] if run.error is None else [("", f"The run was ended by {run.error}")]
    if run.over_budget_s:
        told.append(("", f"Over its budget of {clock(run.budget_s or 0.0)} by {clock(run.over_budget_s)}"))
    calls: list[ModelCall | ToolCall] = [*run.model_calls, *run.tool_calls]
    failed = sorted((call for call in calls if call.error is not None), key=lambda call: call.end_s)
    return told + [(call.name, f"failed at {clock(call.end_s)}: {call.error}") for call in failed]


def _share(part: float, whole: float) -> str:
    if whole <= 0:
        return ""
    percent = 100 * part / whole
    told = "<1" if 0 < percent < 0.5 else ">99" if 99.5 <= percent < 100 else f"{percent:.0f}"
    return f" · {told}%"


def _legend(run: RunRecord, phases: Sequence[str]) -> list[str]:
    is_failed = any([*(call.error for call in run.model_calls), *(call.error for call in run.tool_calls)])
    kinds = ["tool", "framework", *(["error"] if is_failed else [])]
    if not phases or any(call.phases is None and not call.cached for call in run.model_calls):
        kinds = ["model", *kinds]
    return [*phases, *kinds]


def _seconds(run: RunRecord) -> Table:
    """Seconds of every iteration."""
    known = Phases.model_fields if any(call.phases for call in run.model_calls) else ()
    columns = ["total", "model", "tools", "framework", "of it idle", *map(label_of, known)]
    rows = [
        (f"{number}", i.models, (i.model_s, i.tool_s, i.framework_s, i.idle_s, i.seconds))
        for number, i in enumerate(run.iterations, 1)
    ]
    rows.append(("run", _own_calls(run), (run.model_s, run.tool_s, run.framework_s, run.idle_s, run.total_s)))
    body = []
    for name, calls, (model, tools, framework, idle, total) in rows:
        phases = [_sum(calls, phase) for phase in known]
        body.append((name, [*map(_s, (total, model, tools, framework, idle)), *phases]))
    return columns, body


def _tokens(run: RunRecord) -> Table | None:
    """Return counts of every iteration, and of all calls together in the last line."""
    columns = ["calls", "input", "output", *COUNTS, "rate", "tokens a target call"]
    rows = [(f"{number}", i.models) for number, i in enumerate(run.iterations, 1)]
    if not rows:
        return None
    if not any(call.step for call in run.model_calls):
        columns = columns[:3]
    body = [(name, _counts(calls)[: len(columns)]) for name, calls in [*rows, ("run", _own_calls(run))]]
    return columns, body


def _counts(calls: Sequence[ModelCall]) -> list[str | None]:
    counted = [call for call in calls if not call.cached]
    number = f"{len(calls)}" if len(counted) == len(calls) else f"{len(calls)}, {len(calls) - len(counted)} cached"
    sides = [_total([call.input_tokens for call in counted]), _total([call.output_tokens for call in counted])]
    if not counted or any(call.step is None for call in counted):
        return [number, *sides, *[None] * (len(COUNTS) + 2)]
    steps = [step for call in counted for step in call.steps]
    drafted, accepted = sum(step.drafted_tokens for step in steps), sum(step.accepted_tokens for step in steps)
    emitted = sum(length * n for step in steps for length, n in step.accepted_lengths.items())
    rounds = sum(step.rounds for step in steps)
    rate = f"{accepted / drafted:.0%}" if drafted else None
    per_call = f"{emitted / rounds:.2f}" if rounds else None
    return [number, *sides, *(str(sum(map(count, steps))) for count in COUNTS.values()), rate, per_call]


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
    estimated, measured = "estimated from this run's own passes", f"measured against {gain.baseline or 'a plain run'}"
    pays = f"{gain.ratio:.2f} times faster" if gain.ratio >= 1 else f"did not pay: {gain.ratio:.2f} times the speed"
    times = f"decoding took {clock(gain.decode_s)}, plainly {clock(gain.plain_decode_s)}"
    return pays, f"({estimated if gain.estimated else measured}): {times}."


def _gains(gain: Gain) -> list[tuple[str, str | None]]:
    """Names and values; None for what is not known."""
    mark = " (estimated)" if gain.estimated else " (measured)"
    theory = gain.theory
    passed = None if gain.plain_pass_s is None else clock(gain.plain_pass_s)
    if passed and gain.plain_pass_from:
        passed += f", {PASS_SOURCES[gain.plain_pass_from]}"
    saved = gain.saved_s
    return [
        ("saved", None if saved is None else f"{MINUS if saved < 0 else ''}{clock(abs(saved))}{mark}"),
        ("target calls", f"{gain.target_calls} for {gain.tokens} tokens, {gain.target_calls_saved} saved"),
        ("tokens a target call", _number(gain.mean_accepted_length)),
        ("accepted", None if gain.acceptance_rate is None else f"{gain.acceptance_rate:.0%} of drafted tokens"),
        ("drafting", f"{clock(gain.draft_s)}, of it {clock(gain.wasted_draft_s)} for nothing"),
        ("a plain pass", passed),
        ("c", None if gain.c is None else f"{gain.c:.3f} plain passes for a drafted token"),
        ("same tokens", None if gain.same_tokens is None else "yes" if gain.same_tokens else "no"),
        (
            "the paper's formula",
            None
            if theory is None
            else f"{theory.improvement:.2f} times at alpha {theory.alpha:.2f}, gamma {theory.gamma:.1f}, "
            f"c {theory.c:.3f}; "
            f"{theory.improvement_at_v:.2f} with verifying at {theory.v:.2f} plain passes",
        ),
        ("to know", " ".join(gain.remarks) or None),
    ]


def _own_calls(run: RunRecord) -> list[ModelCall]:
    return [call for iteration in run.iterations for call in iteration.models]


def _phase(call: ModelCall, phase: str) -> float | None:
    return None if call.phases is None else float(getattr(call.phases, phase))


def _sum(calls: Sequence[ModelCall], phase: str) -> str | None:
    """Seconds of the calls; a dash where one of them is not known. Where calls overlap, so do their seconds."""
    known = [_phase(call, phase) for call in calls if not call.cached]
    told = [seconds for seconds in known if seconds is not None]
    return _s(sum(told)) if told and len(told) == len(known) else None


def _total(counts: Sequence[int | None]) -> str | None:
    told = [count for count in counts if count is not None]
    return str(sum(told)) if told and len(told) == len(counts) else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"
