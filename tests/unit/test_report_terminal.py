"""A run on the terminal: every number where it belongs, bars to scale, plain where there is no terminal."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest
from rich.console import Console

from agentspec.report import Recorder, RunRecord, Step
from agentspec.report.views.live import following, now
from agentspec.report.views.terminal import bar, describe_gain, show
from agentspec.stats import RowStats, StepStats

CYAN = "\x1b[36m"


class Clock:
    """Stands still until it is moved."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def step(seconds: float) -> Step:
    stats = StepStats(prompt_tokens=70, cached_tokens=60, new_tokens=6, total_s=seconds, ended_at=9e9)
    for accepted in (4, 0):
        row = RowStats({"lookup": 4}, {"lookup": accepted}, accepted + 1)
        stats.add_round(row, {"verify_s": seconds / 4, "draft_s": 0.01}, 5)
    return Step.model_validate(stats.to_dict())


def example() -> Recorder:
    """A model, two parallel tools of which one runs a model and fails, and a model of others."""
    clock = Clock()
    recorder = Recorder("shop", budget_s=5, clock=clock)
    events: list[tuple[float, str, tuple[Any, ...], dict[str, Any]]] = [
        (0, "begin", ("m", "model", "own model"), {}),
        (2, "end", ("m",), {"steps": [step(2.0)]}),
        (3, "begin", ("t", "tool", "search"), {}),
        (4, "begin", ("u", "tool", "ask"), {}),
        (4, "begin", ("n", "model", "inner model"), {"parent": "u"}),
        (5, "end", ("n",), {"cached": True}),
        (6, "end", ("t",), {}),
        (7, "end", ("u", "ValueError('no')"), {}),
        (8, "begin", ("o", "model", "other model"), {}),
        (10, "end", ("o",), {}),
        (10, "close", (), {}),
    ]
    for second, method, arguments, told in events:
        clock.seconds = second
        getattr(recorder, method)(*arguments, **told)
    return recorder


def shown(run: RunRecord, **settings: Any) -> str:
    out = io.StringIO()
    show(run, Console(file=out, width=120, **settings))
    return out.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    cells = [line.split("│") for line in text.splitlines() if "│" in line]
    return {name.strip(): [cell.strip() for cell in others] for name, *others in cells}


def test_the_table_has_every_second() -> None:
    table = rows(shown(example().record()))
    assert table["model, s"] == ["2.000", "2.000", "4.000"]
    assert table["tools, s"] == ["4.000", "0.000", "4.000"]
    assert table["framework, s"] == ["2.000", "0.000", "2.000"]
    assert table["total, s"] == ["8.000", "2.000", "10.000"]
    assert table["verify"] == ["1.000", "-", "-"]  # what a model does not tell is not 0, and so is no sum with it
    assert table["other"] == ["0.980", "-", "-"]
    assert table["of them cached"] == ["60", "-", "-"]
    assert table["accepted"] == ["50%", "-", "-"]
    assert table["tokens a round"] == ["3.00", "-", "-"]
    assert table["tools"] == ["search", "", ""]


def test_the_waterfall_is_to_scale() -> None:
    lines = {line.split()[0]: line for line in shown(example().record()).splitlines() if "━ " in line and " s" in line}
    places = {name: (line.index("━"), line.count("━")) for name, line in lines.items()}
    origin = places["own"][0]
    assert {name: (at - origin, length) for name, (at, length) in places.items()} == {
        "own": (0, 8),
        "search()": (12, 12),
        "ask()": (16, 12),
        "inner": (16, 4),
        "other": (32, 8),
    }
    assert "failed" in lines["ask()"]
    assert "cached" in lines["inner"]
    assert lines["inner"].startswith("   ")  # within the tool above it


def test_what_it_was_worth_is_told_in_words() -> None:
    text = " ".join(shown(example().record()).split())
    for said in (
        "6 tokens in 2 target calls, 4 saved",
        "1 x 1, 1 x 5",
        "lookup 4 of 8; 0.010 s of drafting were for nothing",
        "decoding 1.020 s",
        "(estimated)",
        "the paper's formula",
        "alpha 0.80",
        "over its budget of 5 s by 5.000 s",
    ):
        assert said in text


def test_a_run_without_drafts_is_not_said_to_have_lost() -> None:
    record = example().record()
    assert record.gain is not None
    plain = record.gain.model_copy(update={"drafters": {}, "remarks": ("a draft model does not pay",)})
    told = describe_gain(plain)
    assert "nothing was drafted: this was plain decoding" in told
    assert "a draft model does not pay" in told
    assert "times" not in told
    assert "nothing was drafted" not in describe_gain(record.gain)


def test_bars_are_always_seen_and_stay_inside() -> None:
    for begin, end in ((0.0, 0.0), (10.0, 10.0), (9.99, 10.0), (0.0, 10.0), (3.0, 3.001)):
        line = bar(begin, end, 10.0, 20)
        assert 1 <= len(line) <= 20
        assert "━" in line
    assert bar(0, 0, 0, 20) == "━" * 20


def test_without_a_terminal_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b" not in shown(example().record())
    monkeypatch.setenv("NO_COLOR", "1")
    assert CYAN not in shown(example().record(), force_terminal=True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert CYAN in shown(example().record(), force_terminal=True)


def test_an_empty_run_can_be_shown() -> None:
    recorder = Recorder()
    recorder.close()
    assert "agent run" in shown(recorder.record())


def test_phases_of_calls_that_overlap_are_explained() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for number in range(2):
        recorder.begin(number, "model", "llm")
    clock.seconds = 1.0
    for number in range(2):
        recorder.end(number, steps=[step(1.0)])
    recorder.close()
    text = shown(recorder.record())
    assert rows(text)["verify"] == ["1.000", "1.000"]
    assert rows(text)["model, s"] == ["1.000", "1.000"]
    assert "model calls overlapped" in text
    assert "model calls overlapped" not in shown(example().record())


def test_cached_answers_take_nothing_from_the_sums() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for number, told in enumerate(({"steps": [step(1.0)]}, {"cached": True})):
        recorder.begin(number, "model", "llm")
        clock.seconds += 1
        recorder.end(number, **told)
    recorder.close()
    table = rows(shown(recorder.record()))
    assert table["verify"] == ["0.500", "-", "0.500"]
    assert table["new tokens"] == ["6", "-", "6"]


def test_long_runs_are_shown_in_tables_that_fit() -> None:
    clock = Clock()
    recorder = Recorder(clock=clock)
    for number in range(12):
        recorder.begin(number, "model", "llm")
        clock.seconds += 1 + number
        recorder.end(number)
    recorder.close()
    out = io.StringIO()
    show(recorder.record(), Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    seconds = [cell.strip() for line in lines if line.startswith(" model, s") for cell in line.split("│")[1:]]
    assert seconds == [f"{1 + number}.000" for number in range(12)] + ["78.000"]
    assert max(map(len, lines)) <= 100


def test_names_are_not_taken_for_markup() -> None:
    clock = Clock()
    recorder = Recorder("[bold]x[/bold]", clock=clock)
    recorder.begin("t", "tool", "[red]t[/nothing]")
    clock.seconds = 1.0
    recorder.end("t")
    recorder.close("[/wrong]")
    text = shown(recorder.record())
    for name in ("[bold]x[/bold]", "[red]t[/nothing]()", "[/wrong]"):
        assert name in text


# While it goes on


def test_what_goes_on_is_told() -> None:
    clock = Clock()
    recorder = Recorder("shop", clock=clock)
    recorder.begin("c", "chain", "graph")
    recorder.begin("m", "model", "embedded")
    clock.seconds = 2.0
    recorder.progress("m", 1, None)
    clock.seconds = 4.0
    recorder.progress("m", 20, 0.75)
    recorder.begin("t", "tool", "search")
    clock.seconds = 5.0
    lines = [str(line) for line in now(recorder).renderables]
    assert lines == [
        "shop: 5.0 s, 1 model calls",
        "  embedded 5.0 s, 21 tokens, 7.0 tokens/s, 75% accepted",
        "  search() 1.0 s",
    ]


def test_only_terminals_are_followed() -> None:
    recorder, plain, terminal = Recorder("shop"), io.StringIO(), io.StringIO()
    threads, stdout = threading.active_count(), sys.stdout
    with following(recorder, Console(file=plain)):
        assert (threading.active_count(), sys.stdout) == (threads, stdout)  # nothing was begun
    assert plain.getvalue() == ""
    with following(recorder, Console(file=terminal, force_terminal=True, _environ={"TERM": "xterm"})):
        recorder.begin("m", "model", "embedded")
    assert "shop" in terminal.getvalue()
