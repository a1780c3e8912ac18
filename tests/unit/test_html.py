"""A run as a page: it needs nothing but itself, escapes what it was told, and draws bars where the record says."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import recorded

from agentspec.report import AgentRun, RunRecord
from agentspec.report.views import svg
from agentspec.report.views.html import document, fragment


def totals(run: RunRecord) -> str:
    return str(svg.totals(run).__html__())


def waterfall(run: RunRecord) -> str:
    return str(svg.waterfall(run).__html__())


def histogram(rounds: dict[int, int]) -> str:
    return str(svg.histogram(rounds).__html__())


RUNS = {"simple": recorded.simple, "busy": recorded.busy, "third_party": recorded.third_party}
RUNS |= {"empty": recorded.empty, "long": recorded.long}
VOID = {"meta", "br", "link", "img"}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> RunRecord:
    return RUNS[request.param]()


class Page(HTMLParser):
    """Reads a page and remembers its elements and its words; refuses one whose elements do not close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words += data


def rects(drawing: str, role: str) -> list[tuple[str, float, float]]:
    """Kind, x and width in per cent of the bars of one role."""
    found = []
    for rect in ElementTree.fromstring(drawing).iter("rect"):
        of, _, kind = rect.attrib["class"].partition(" is-")
        if of == role:
            found.append((kind, float(rect.attrib["x"][:-1]), float(rect.attrib["width"][:-1])))
    return found


def test_a_page_needs_nothing_but_itself(run: RunRecord) -> None:
    page = document(run)
    for outside in ("http:", "https:", "src=", "href", "@import", "url(", "<script", "<link", "<img", "//"):
        assert outside not in page.lower().replace("</", ""), outside


def test_a_page_is_well_formed_and_so_are_its_drawings(run: RunRecord) -> None:
    page = document(run)
    tags = [tag for tag, _ in Page(page).elements]
    assert tags[:2] == ["html", "head"]
    assert "width=device-width" in page
    drawings = re.findall(r"<svg class=\"chart\".*?</svg>(?=\n|<)", page, flags=re.DOTALL)
    assert drawings
    for drawing in (totals(run), waterfall(run)):
        assert drawing in page
        ElementTree.fromstring(drawing)


def test_whatever_it_was_told_is_text() -> None:
    evil = recorded.EVIL
    run = recorded.busy().model_copy(update={"name": evil, "error": f"Error({evil})"})
    page = Page(document(run))
    shown = evil.replace("\x07", "\N{REPLACEMENT CHARACTER}")
    assert page.words.count(shown) >= 4  # title, heading, error, label and tooltip of the tool
    assert "script" not in {tag for tag, _ in page.elements}
    assert "<b>item</b>" in page.words
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


HOSTILE = "</style></svg></p><script>x</script><b onclick=y>\x07\x1b\u202e\u2066{{ 7 * 7 }}{% endfor %}&amp;'\""


def hostile(value: Any, name: str = "") -> Any:
    """The same values with a hostile text in every field and key that holds free text."""
    if isinstance(value, list):
        return [hostile(one, name) for one in value]
    if not isinstance(value, dict):
        return HOSTILE if isinstance(value, str) and name not in ("schema", "plain_pass_from") else value
    if name == "drafters":
        return {f"{HOSTILE}{number}": one for number, one in enumerate(value.values())}
    free = ("name", "id", "node", "provider", "finish_reason", "error", "tool_call_id", "baseline")
    values = {key: HOSTILE if key in free else hostile(one, key) for key, one in value.items()}
    return values | ({"remarks": [HOSTILE]} if "remarks" in values else {})


@pytest.mark.parametrize("make", [recorded.simple, recorded.busy, recorded.third_party])
@pytest.mark.parametrize("estimated", [True, False])
def test_hostile_text_in_every_field_is_only_text(make: Callable[[], RunRecord], estimated: bool) -> None:
    values = hostile(make().model_dump(mode="json"))
    if values["gain"]:
        values["gain"]["estimated"] = estimated
    run = RunRecord.model_validate(values)
    text = document(run)
    page, plain = Page(text), Page(document(make().model_copy(update={"error": "x"})))
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements} | {"div", "b", "p", "title"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    shown = re.sub("[\x07\x1b\u202e\u2066]", "\N{REPLACEMENT CHARACTER}", HOSTILE)
    assert page.words.count(shown) >= 4  # and is not cut, evaluated or escaped twice
    ElementTree.fromstring(waterfall(run))


def test_bars_are_where_the_record_says() -> None:
    drawn = rects(waterfall(recorded.simple()), "call")
    expected = [("model", 0.5, 3.0), ("tool", 3.75, 1.0), ("model", 5.5, 2.0)]
    assert [kind for kind, _, _ in drawn] == [kind for kind, _, _ in expected]
    for (_, x, width), (_, start, seconds) in zip(drawn, expected, strict=True):
        assert x == pytest.approx(100 * start / 8.0, abs=1e-4)
        assert width == pytest.approx(100 * seconds / 8.0, abs=1e-4)


def test_phases_tile_their_call_and_parts_their_iteration() -> None:
    drawing = waterfall(recorded.simple())
    phases = rects(drawing, "phase")
    assert len(phases) == 20
    assert phases[0][:2] == ("queue", pytest.approx(100 * 0.5 / 8))
    assert sum(width for _, _, width in phases) == pytest.approx(100 * 5.0 / 8, abs=1e-3)
    for (_, x, width), (_, following, _) in pairwise(phases[:10]):
        assert x + width == pytest.approx(following, abs=1e-4)
    parts = sorted(rects(drawing, "part"), key=lambda part: part[1])
    assert [kind for kind, _, _ in parts[:5]] == ["framework", "model", "framework", "tool", "framework"]
    for (_, x, width), (_, following, _) in pairwise(parts):
        assert x + width == pytest.approx(following, abs=1e-4)
    assert sum(width for _, _, width in parts) == pytest.approx(100, abs=1e-3)


def test_parallel_tools_overlap_and_an_agent_within_a_tool_stands_under_it() -> None:
    run = recorded.busy()
    drawing = waterfall(run)
    labels = [text.text for text in ElementTree.fromstring(drawing).iter("text")]
    assert labels.index("research()") < labels.index("↳ embedded · 12 tokens") < labels.index("get_price()")
    assert "embedded · 39 tokens, 3 samples" in labels
    drawn = rects(drawing, "call")
    assert len(drawn) == len(run.model_calls) + len(run.tool_calls)
    assert [kind for kind, _, _ in drawn].count("error") == 2
    assert [kind for kind, _, _ in drawn].count("cached") == 1
    assert sum(x == pytest.approx(40) for _, x, _ in drawn) == 2  # two of the parallel tools began together


def test_what_is_unknown_is_a_dash_and_never_zero() -> None:
    page = Page(document(recorded.busy())).words
    row = page[page.index("Tokens by iteration") :]
    assert "1, 1 cached" + 3 * "\N{EN DASH}" in row
    strange = Page(document(recorded.third_party())).words
    assert "verify" not in strange
    assert "1750.0 ms" not in strange
    assert "1.75 s" in strange


def test_an_estimate_says_so_everywhere() -> None:
    run = recorded.simple()
    page = Page(document(run)).words
    assert page.count("estimated") == 3  # the tile, the verdict, the seconds saved
    assert "measured against" not in page
    assert run.gain is not None
    measured = run.gain.model_copy(update={"estimated": False, "baseline": "plain <run>", "same_tokens": True})
    page = Page(document(run.model_copy(update={"gain": measured}))).words
    assert "estimated" not in page
    assert "measured against plain <run>" in page


def test_drafters_and_lengths_are_drawn_to_scale() -> None:
    page = document(recorded.simple())
    assert "4 of 4" in page
    assert "10 of 16" in page
    columns = rects(histogram({1: 4, 3: 4, 4: 2}), "part")
    assert len(columns) == 3
    assert len({round(width, 4) for _, _, width in columns}) == 1
    tall = [float(r.attrib["height"]) for r in ElementTree.fromstring(histogram({1: 4, 3: 4, 4: 2})).iter("rect")]
    assert tall[0] == tall[1] == 2 * tall[2]


def test_its_style_stays_within_it(run: RunRecord) -> None:
    shown = AgentRun(run)._repr_html_()
    assert shown == fragment(run)
    [style] = re.findall(r"<style>(.*?)</style>", shown, flags=re.DOTALL)
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]+\{", "", style))
    assert len(selectors) > 40
    for selector in selectors:
        for one in selector.split(","):
            assert one.strip().startswith(".agentspec-run"), one
    assert not any(tag in shown for tag in ("<html", "<body", "<head", "<meta"))


def test_it_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    run = AgentRun(recorded.busy())
    run.to_html(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text(encoding="utf-8") == document(run.record)
    with pytest.raises(OSError, match="missing"):
        run.to_html(str(tmp_path / "missing" / "run.html"))
