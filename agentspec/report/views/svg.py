"""Drawings of a run as inline SVG: the waterfall of its calls, and the charts of its gain.

Places and widths along the time axis are per cent of the run, so that a drawing fits any screen while its text keeps
its size. Colours are classes of ``style.css``. Text is escaped by ``markup``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from agentspec.report.schema import ModelCall, RunRecord, ToolCall
from agentspec.report.summary import PHASES, calls_within, own_calls, phase_label
from agentspec.report.views.markup import Element

LINE, BAR, INDENT, AXIS = 38, 10, 12, 20
"""Pixels: of a call with its label, of its bar, of a call within a tool, of the axis."""

LABEL = 90
"""Most characters of a label, which is cut where the width ends; all of it is in the tooltip."""

Interval = tuple[float, float]


def clock(seconds: float) -> str:
    """Seconds for people: ``850 µs``, ``12.3 ms``, ``1.23 s``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def swatch(kind: str) -> Element:
    """Draw a square in the colour of a kind, for a legend."""
    square = Element("rect", {"class": _class(kind), "width": 12, "height": 12})
    return Element("svg", {"viewBox": "0 0 12 12", "aria-hidden": "true"}, children=(square,))


def totals(run: RunRecord) -> Element:
    """Draw the run as one bar: model, tools, framework."""
    parts = (("model", run.model_s), ("tool", run.tool_s), ("framework", run.framework_s))
    drawn: list[Element] = []
    at = 0.0
    for kind, seconds in parts:
        drawn.append(_rect("part", kind, at, seconds, run.total_s, 0, 14, f"{kind}: {clock(seconds)}"))
        at += seconds
    return _svg(14, "shares of model, tools and framework", drawn)


def waterfall(run: RunRecord) -> Element:
    """Draw a band per iteration, with the shares of model, tools and framework; under it its calls, and theirs."""
    drawn: list[Element] = []
    y = AXIS
    own = [*own_calls(run.iterations), *run.tools]
    for number, (begin, seconds, calls) in enumerate(_slices(run), 1):
        title = f"iteration {number}" if run.iterations else "run"
        drawn += _band(run, own, begin, seconds, y, title)
        y += LINE - 6
        for depth, call in calls:
            drawn += _call(call, depth, y, run.total_s)
            y += LINE
        y += 6
    return _svg(y, "waterfall of the calls over time", [*_axis(run.total_s, y), *drawn])


def share(part: float, whole: float) -> Element:
    """Draw a bar of which ``part`` of ``whole`` is filled."""
    rest = _rect("part", "rest", 0, whole, whole, 1, 10, "")
    return _svg(12, f"{part:g} of {whole:g}", [rest, _rect("part", "accepted", 0, part, whole, 1, 10, "")])


def histogram(rounds: Mapping[int, int]) -> Element:
    """Columns: rounds by the tokens that they emitted, from 0 or 1 to the most."""
    lengths = range(min(1, *rounds), max(rounds) + 1)
    most, step, height = max(rounds.values()), math.ceil(len(lengths) / 16), 96
    drawn: list[Element] = []
    for column, length in enumerate(lengths):
        count, middle = rounds.get(length, 0), 100 * (column + 0.5) / len(lengths)
        tall = height * count / most
        if count:
            tip = f"{count} rounds emitted {length} tokens"
            drawn.append(_rect("part", "model", column + 0.12, 0.76, len(lengths), 16 + height - tall, tall, tip))
            drawn.append(_text(f"{middle:.3f}%", 12 + height - tall, str(count), "quiet", "middle"))
        if column % step == 0:
            drawn.append(_text(f"{middle:.3f}%", height + 30, str(length), "quiet", "middle"))
    base = _line("grid", "0", "100%", height + 16, height + 16)
    return _svg(height + 36, "rounds by the tokens they emitted", [base, *drawn])


def _slices(run: RunRecord) -> Iterator[tuple[float, float, list[tuple[int, ModelCall | ToolCall]]]]:
    """Beginning, seconds and calls of every iteration; of the whole run where there is none."""
    if not run.iterations:
        yield 0.0, run.total_s, list(calls_within((), run.tools))
    for number, iteration in enumerate(run.iterations):
        early = run.tools if number == 0 else ()
        yield iteration.start_s, iteration.seconds, list(calls_within([iteration], early))


def _band(
    run: RunRecord, calls: Sequence[ModelCall | ToolCall], begin: float, seconds: float, y: int, title: str
) -> list[Element]:
    """Draw an iteration's own line: its name, its seconds, and its slice of the run by what it went into."""
    end = begin + seconds
    models = _union(_clipped((c for c in calls if isinstance(c, ModelCall)), begin, end))
    tools = _without(_union(_clipped((c for c in calls if isinstance(c, ToolCall)), begin, end)), models)
    gaps = _without([(begin, end)], _union([*models, *tools]))
    drawn = [
        Element("rect", {"class": "band", "x": 0, "width": "100%", "y": y, "height": LINE - 10, "rx": 3}),
        _text("6", y + 14, title, "head"),
        _text("100%", y + 14, clock(seconds), "head", "end", dx=-6),
    ]
    for kind, intervals in (("framework", gaps), ("tool", tools), ("model", models)):
        for start, stop in intervals:
            tip = f"{kind}: {clock(stop - start)}"
            drawn.append(_rect("part", kind, start, stop - start, run.total_s, y + 20, 5, tip))
    return drawn


def _call(call: ModelCall | ToolCall, depth: int, y: int, total: float) -> list[Element]:
    """Draw a call: a line of words, and below it its bar, split into phases where they are known."""
    words, remark = _words(call)
    bad = " bad" if call.error else ""
    tip = words if call.error is None else f"{words}\n{call.error}"
    kind = "error" if call.error else "tool" if isinstance(call, ToolCall) else "cached" if call.cached else "model"
    indent = depth * INDENT
    label = words if len(words) <= LABEL else f"{words[: LABEL - 1]}…"
    text = _text("6", 13, f"{'↳ ' if depth else ''}{label}", bad.strip(), dx=indent)
    parts = (
        Element("title", {}, f"{tip}, from {clock(call.start_s)} on"),
        Element("svg", {"y": y, "width": "68%", "height": LINE - BAR - 10}, children=(text,)),
        _text("100%", y + 13, f"{remark}{clock(call.seconds)}", f"quiet{bad}", "end", dx=-6),
        _rect("call", kind, call.start_s, call.seconds, total, y + 20, BAR, ""),
    )
    drawn = [Element("g", {}, children=parts)]
    if isinstance(call, ModelCall):
        drawn += _phases(call, y + 20, total)
    return drawn


def _phases(call: ModelCall, y: int, total: float) -> list[Element]:
    """Phases in the order of the schema, not of time; and a mark where the first token came."""
    drawn: list[Element] = []
    at = call.start_s
    if call.phases is not None:
        for phase in PHASES:
            seconds = max(0.0, getattr(call.phases, phase))
            if seconds:
                tip = f"{phase_label(phase)}: {clock(seconds)}"
                drawn.append(_rect("phase", phase_label(phase), at, seconds, total, y, BAR, tip))
            at += seconds
    if call.ttft_s is not None and not call.cached:
        x = _percent(call.start_s + call.ttft_s, total)
        drawn.append(_line("first", x, x, y - 2, y + BAR + 2, f"first token after {clock(call.ttft_s)}"))
    return drawn


def _words(call: ModelCall | ToolCall) -> tuple[str, str]:
    """Return the words about a call, and those before its seconds."""
    remark = "failed · " if call.error else ""
    if isinstance(call, ToolCall):
        return f"{call.name}()", remark
    tokens = sum(step.new_tokens for step in call.steps) or call.output_tokens
    words = call.name if not tokens else f"{call.name} · {tokens} tokens"
    if len(call.steps) > 1:
        words += f", {len(call.steps)} samples"
    return words, f"{remark}cached · " if call.cached else remark


def _axis(total: float, height: int) -> list[Element]:
    """Lines at round times."""
    drawn: list[Element] = []
    step = _step(total)
    for tick in range(int(total / step + 1e-9) + 1 if step else 1):
        at = tick * step
        x, share_of = _percent(at, total), at / total if total else 0.0
        anchor = "start" if share_of < 0.05 else "end" if share_of > 0.93 else "middle"
        drawn.append(_line("grid", x, x, AXIS - 4, height))
        drawn.append(_text(x, AXIS - 8, f"{at:g} s", "quiet", anchor))
    return drawn


def _step(total: float) -> float:
    """Return a round number of seconds, of which there are two to five in the run; 0 for a run that took no time."""
    if total <= 0:
        return 0.0
    rough = total / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    return float(f"{unit * max(n for n in (1, 2, 5) if n * unit <= rough):g}")


def _clipped(calls: Iterable[ModelCall | ToolCall], begin: float, end: float) -> list[Interval]:
    found = [(max(begin, call.start_s), min(end, call.end_s)) for call in calls]
    return [(start, stop) for start, stop in found if start < stop]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _without(intervals: Iterable[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """Return what is left of intervals beside holes; both disjoint and sorted."""
    left = []
    for start, stop in intervals:
        for begin, end in holes:
            if end > start and begin < stop:
                if begin > start:
                    left.append((start, begin))
                start = max(start, end)
        if start < stop:
            left.append((start, stop))
    return left


def _svg(height: int, about: str, drawn: Iterable[Element]) -> Element:
    attributes = {"class": "chart", "height": height, "role": "img", "aria-label": about}
    return Element("svg", attributes, children=tuple(drawn))


def _titled(tag: str, attributes: dict[str, str], tip: str) -> Element:
    return Element(tag, attributes, children=(Element("title", {}, tip),) if tip else ())


def _rect(role: str, kind: str, at: float, seconds: float, total: float, y: float, height: float, tip: str) -> Element:
    place = {"x": _percent(at, total), "width": _percent(seconds, total), "y": f"{y:g}", "height": f"{height:g}"}
    return _titled("rect", {"class": f"{role} {_class(kind)}", **place}, tip)


def _line(kind: str, x1: str, x2: str, y1: float, y2: float, tip: str = "") -> Element:
    return _titled("line", {"class": kind, "x1": x1, "x2": x2, "y1": f"{y1:g}", "y2": f"{y2:g}"}, tip)


def _text(x: str, y: float, text: str, kind: str, anchor: str = "start", dx: int = 0) -> Element:
    style = {"class": kind or None, "dx": dx or None}
    return Element("text", {"x": x, "y": f"{y:g}", "text-anchor": anchor, **style}, text)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole > 0 else 0.0:.5f}%"


def _class(kind: str) -> str:
    return f"is-{kind.replace(' ', '-')}"
