"""An agent run as one HTML file, which needs nothing but itself: no script, no font, no address.

``document`` is a page, ``fragment`` what a notebook shows: its style reaches nothing outside of it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

from agentspec.report.schema import Gain, ModelCall, Phases, RunRecord, Step, ToolCall
from agentspec.report.views.svg import clock, histogram, label_of, share, swatch, totals, waterfall, words

UNKNOWN = '<span title="not known">&ndash;</span>'

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
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{words(_name(run))}</title>\n"
        "<style>body { margin: 0; } @media (prefers-color-scheme: dark) { body { background: #14181c; } }</style>\n"
        f"</head>\n<body>\n{fragment(run)}\n</body>\n</html>\n"
    )


def fragment(run: RunRecord) -> str:
    """The run as a part of somebody else's page."""
    sections = [_head(run), _where(run), _seconds(run), _tokens(run)]
    if run.gain is not None:
        sections.append(_worth(run.gain))
    style = files("agentspec.report.views").joinpath("style.css").read_text(encoding="utf-8")
    return f'<div class="agentspec-run">\n<style>\n{style}</style>\n' + "\n".join(filter(None, sections)) + "\n</div>"


def _name(run: RunRecord) -> str:
    return f"{run.name or 'agent run'}: {clock(run.total_s)}"


def _head(run: RunRecord) -> str:
    began = datetime.datetime.fromtimestamp(run.began_at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    calls = f"{_many(len(run.model_calls), 'model call')}, {_many(len(run.tool_calls), 'tool call')}"
    tiles = [_tile(clock(run.total_s), "in total")]
    for kind, seconds in (("model", run.model_s), ("tools", run.tool_s), ("framework", run.framework_s)):
        tiles.append(_tile(clock(seconds), kind + _share(seconds, run.total_s)))
    if run.gain is not None and run.gain.ratio is not None:
        how = "estimated gain" if run.gain.estimated else "measured gain"
        tiles.append(_tile(f"{run.gain.ratio:.2f} &times;", how))
    return (
        f'<h1>{words(run.name or "agent run")}</h1>\n<p class="quiet">{began} · {calls}</p>\n{_wrong(run)}'
        f'<div class="tiles">{"".join(tiles)}</div>'
    )


def _wrong(run: RunRecord) -> str:
    """What went wrong, if anything did."""
    told = [] if run.error is None else [f"The run was ended by {words(run.error)}"]
    if run.over_budget_s:
        told.append(f"Over its budget of {clock(run.budget_s or 0.0)} by {clock(run.over_budget_s)}")
    calls: list[ModelCall | ToolCall] = [*run.model_calls, *run.tool_calls]
    failed = [call for call in calls if call.error is not None]
    told += [
        f"<b>{words(call.name)}</b> failed at {clock(call.end_s)}: {words(call.error)}"
        for call in sorted(failed, key=lambda call: call.end_s)
    ]
    lines = "".join(f"<p>{line}</p>" for line in told)
    return f'<div class="box bad">{lines}</div>\n' if told else ""


def _share(part: float, whole: float) -> str:
    if whole <= 0:
        return ""
    percent = 100 * part / whole
    told = "<1" if 0 < percent < 0.5 else ">99" if 99.5 <= percent < 100 else f"{percent:.0f}"
    return words(f" · {told}%")


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{label}</span></div>'


def _where(run: RunRecord) -> str:
    """The drawing."""
    phases = [label_of(phase) for phase in Phases.model_fields if any(_phase(c, phase) for c in run.model_calls)]
    kinds = ["tool", "framework", *(["error"] if "is-error" in (drawing := waterfall(run)) else [])]
    if not phases or any(call.phases is None and not call.cached for call in run.model_calls):
        kinds = ["model", *kinds]
    legend = "".join(f"<li>{swatch(kind)}{kind}</li>" for kind in [*phases, *kinds])
    folded = (
        '<p class="quiet">A model call is split by phases, not by time: its rounds are added up. '
        "The upright line is its first token.</p>\n"
    )
    return (
        f'<h2>Where the time went</h2>\n{totals(run)}\n<ul class="legend">{legend}</ul>\n'
        f"{folded if phases else ''}{drawing}"
    )


def _seconds(run: RunRecord) -> str:
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
    return f"<h2>Seconds by iteration</h2>\n{_table(columns, body)}"


def _tokens(run: RunRecord) -> str:
    """Counts of every iteration; of all calls together in the last line."""
    columns = ["calls", "input", "output", *COUNTS, "rate", "tokens a target call"]
    rows = [(f"{number}", i.models) for number, i in enumerate(run.iterations, 1)]
    if not rows:
        return ""
    if not any(call.step for call in run.model_calls):
        columns = columns[:3]
    body = [(name, _counts(calls)[: len(columns)]) for name, calls in [*rows, ("run", _own_calls(run))]]
    told = "Of the agent's own calls. A dash is what a model does not say; cached answers are not counted."
    return f'<h2>Tokens by iteration</h2>\n{_table(columns, body)}<p class="quiet">{told}</p>'


def _counts(calls: Sequence[ModelCall]) -> list[str]:
    counted = [call for call in calls if not call.cached]
    number = f"{len(calls)}" if len(counted) == len(calls) else f"{len(calls)}, {len(calls) - len(counted)} cached"
    sides = [_total([call.input_tokens for call in counted]), _total([call.output_tokens for call in counted])]
    if not counted or any(call.step is None for call in counted):
        return [number, *sides, *[UNKNOWN] * (len(COUNTS) + 2)]
    steps = [step for call in counted for step in call.steps]
    drafted, accepted = sum(step.drafted_tokens for step in steps), sum(step.accepted_tokens for step in steps)
    emitted = sum(length * n for step in steps for length, n in step.accepted_lengths.items())
    rounds = sum(step.rounds for step in steps)
    rate = f"{accepted / drafted:.0%}" if drafted else UNKNOWN
    per_call = f"{emitted / rounds:.2f}" if rounds else UNKNOWN
    return [number, *sides, *(str(sum(map(count, steps))) for count in COUNTS.values()), rate, per_call]


def _worth(gain: Gain) -> str:
    """Whether speculation was worth it."""
    shares = [
        f"<dt>{words(name)}</dt><dd>{counts.accepted} of {counts.drafted}{share(counts.accepted, counts.drafted)}</dd>"
        for name, counts in gain.drafters.items()
        if counts.drafted
    ]
    accepted = f"<h2>Accepted by drafter</h2><dl>{''.join(shares)}</dl>" if shares else ""
    lengths = (
        f"<h2>Rounds by the tokens they emitted</h2>{histogram(gain.accepted_lengths)}"
        if any(gain.accepted_lengths.values())
        else ""
    )
    charts = f'<div class="two"><div>{accepted}</div><div>{lengths}</div></div>' if shares or lengths else ""
    rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in _gains(gain) if value)
    return f"<h2>Was it worth it?</h2>\n{_verdict(gain)}<dl>{rows}</dl>\n{charts}"


def _verdict(gain: Gain) -> str:
    if gain.ratio is None or gain.plain_decode_s is None:
        return "<p>Not known: no pass of the target was timed.</p>"
    how = (
        "estimated from this run's own passes"
        if gain.estimated
        else f"measured against {gain.baseline or 'a plain run'}"
    )
    pays = f"{gain.ratio:.2f} times faster" if gain.ratio >= 1 else f"did not pay: {gain.ratio:.2f} times the speed"
    times = f"decoding took {clock(gain.decode_s)}, plainly {clock(gain.plain_decode_s)}"
    return f"<p><b>{pays}</b> ({words(how)}): {times}.</p>"


def _gains(gain: Gain) -> list[tuple[str, str | None]]:
    """Names and values; None for what is not known."""
    mark = " (estimated)" if gain.estimated else " (measured)"
    theory = gain.theory
    passed = None if gain.plain_pass_s is None else clock(gain.plain_pass_s)
    if passed and gain.plain_pass_from:
        passed += f", {PASS_SOURCES[gain.plain_pass_from]}"
    saved = gain.saved_s
    return [
        ("saved", None if saved is None else f"{'&minus;' if saved < 0 else ''}{clock(abs(saved))}{mark}"),
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
        ("to know", words(" ".join(gain.remarks)) or None),
    ]


def _table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """A table whose last row is a sum; wider than the screen it scrolls by itself."""
    head = "".join(f'<th scope="col">{column}</th>' for column in ("", *columns))
    body = "".join(
        f'<tr{" class=" + chr(34) + "sum" + chr(34) if name == "run" else ""}><th scope="row">{name}</th>'
        + "".join(f"<td>{value}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _own_calls(run: RunRecord) -> list[ModelCall]:
    return [call for iteration in run.iterations for call in iteration.models]


def _phase(call: ModelCall, phase: str) -> float | None:
    return None if call.phases is None else float(getattr(call.phases, phase))


def _sum(calls: Sequence[ModelCall], phase: str) -> str:
    """Seconds of the calls; a dash where one of them is not known. Where calls overlap, so do their seconds."""
    known = [_phase(call, phase) for call in calls if not call.cached]
    told = [seconds for seconds in known if seconds is not None]
    return _s(sum(told)) if told and len(told) == len(known) else UNKNOWN


def _total(counts: Sequence[int | None]) -> str:
    told = [count for count in counts if count is not None]
    return str(sum(told)) if told and len(told) == len(counts) else UNKNOWN


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def _s(seconds: float) -> str:
    return f"{seconds:.3f}"
