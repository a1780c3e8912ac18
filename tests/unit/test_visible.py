"""No view of a run, no command and no exposition shows a control character of somebody else's name or error."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel
from langchain_core.tools import StructuredTool
from rich.console import Console

from agentspec import cli
from agentspec.engine import prometheus
from agentspec.engine.metrics import Meter
from agentspec.errors import InvalidRequestError
from agentspec.report import AgentRun
from agentspec.report.recorder import Recorder
from agentspec.report.views import live, terminal
from agentspec.runtime.visible import visible
from langchain_agentspec import track_latency

EVIL = "x\x1b]0;title\x07\x1b[2J\x9b2J\r\x08\x7f\u202e\ufeff[bold]\tend"
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


@pytest.mark.parametrize(
    ("text", "line", "lines"),
    [
        ("plain é 日本 😀", "plain é 日本 😀", "plain é 日本 😀"),
        ("\x1b[2J", "\\x1b[2J", "\\x1b[2J"),
        ("a\nb\tc", "a\\nb\\tc", "a\nb\tc"),
        ("a\r\nb\rc", "a\\r\\nb\\rc", "a\nb\\rc"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066", "\\u202eabc\\u2066"),
        ("\udcff\u2028", "\\udcff\\u2028", "\\udcff\\u2028"),
        ("👩\u200d🚀", "👩\u200d🚀", "👩\u200d🚀"),
        ("\U000e0041", "\\U000e0041", "\\U000e0041"),
        (7, "7", "7"),
    ],
    ids=ascii,
)
def test_control_characters_are_escaped(text: object, line: str, lines: str) -> None:
    assert (visible(text), visible(text, lines=True)) == (line, lines)


def test_no_control_character_is_left() -> None:
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cs", "Zl", "Zp"):
            assert visible(chr(code)).isascii()


@pytest.fixture
def run() -> Any:
    """A run whose tool, model and name hold escapes, as do its errors."""

    def fail(x: str) -> str:
        """d"""
        raise RuntimeError(EVIL)

    tool = StructuredTool.from_function(fail, name=EVIL, description="d")
    with track_latency(EVIL) as made:
        FakeListChatModel(responses=["a"], name=EVIL).invoke("Hi")
        with pytest.raises(RuntimeError):
            tool.invoke({"x": "1"})
    return made


def shown(view: Any) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_terminal_shows_them_as_escapes(run: AgentRun) -> None:
    record = run.record.model_copy(update={"error": EVIL})
    text = shown(terminal.view(record))
    assert not STEERING.search(text)
    assert text.count("\\x1b]0;title\\x07") >= 3


def test_the_live_view_shows_them_as_escapes() -> None:
    recorder = Recorder(EVIL)
    for kind in ("model", "tool"):
        recorder.begin(kind, kind, EVIL)  # type: ignore[arg-type]
    text = shown(live.now(recorder))
    assert not STEERING.search(text)
    assert text.count("\\x1b]0;title\\x07") == 3


def test_files_of_views_hold_none(run: AgentRun, tmp_path: Path) -> None:
    run.to_chrome_trace(tmp_path / "trace.json")
    run.to_html(tmp_path / "page.html")
    for path in tmp_path.iterdir():
        assert not STEERING.search(path.read_text(encoding="utf-8")), path


def test_an_exposition_holds_none() -> None:
    text = prometheus.render(Meter().read(), {"model": EVIL, "path": 'a\\b"\nc'})
    assert not STEERING.search(text)
    assert 'path="a\\\\b\\"\\nc"' in text
    assert "\\\\x1b]0;title" in text


def test_commands_show_them_as_escapes(run: AgentRun, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = tmp_path / "runs\x1b[2J.jsonl"
    run.append_to(path)
    with path.open("a") as file:
        file.write(json.dumps({"schema": "agentspec.run/\x1b[2J"}) + "\n")
    assert cli.main(["report", str(path)]) == 0
    assert cli.main(["report", str(path), str(path)]) == 0
    assert cli.main(["report", str(path), "--html", str(tmp_path / "out\x1b.html")]) == 0
    assert cli.main(["report", str(tmp_path / "none\x1b[2J")]) == 2

    def broken(_: Any) -> int:
        raise InvalidRequestError(EVIL)

    monkeypatch.setattr("agentspec.cli.report.run", broken)
    assert cli.main(["report", str(path)]) == 2
    captured = capsys.readouterr()
    assert not STEERING.search(captured.out + captured.err)
    assert "\\x1b[2J.jsonl" in captured.out
    assert "\\x1b]0;title" in captured.err
