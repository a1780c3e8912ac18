"""The benchmark under load asks the same requests in turns, beside processes that end, and adds up."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmark" / "under_load.py"


class Engine:
    """Notes what it is asked, and how many other processes run meanwhile."""

    tokenizer = SimpleNamespace(encode=lambda text: [len(text), ord(text[-2])])

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self._children = children
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def generate(self, requests: list[Any]) -> None:
        running = sum(child.poll() is None for child in self._children)
        self.asked += [(tuple(request.prompt), running) for request in requests]

    def metrics(self) -> Any:
        return SimpleNamespace(threads=2)


def test_quiet_and_busy_runs_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = runpy.run_path(str(SCRIPT))
    children: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        children.append(popen(command))
        return children[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setitem(module["busy_processes"].__wrapped__.__globals__, "_SETTLE_S", 0.01)
    engine = Engine(children)
    path = tmp_path / "figures.json"
    found = module["main"](
        ["--busy", "2", "--requests", "6", "--repeats", "2", "--tokens", "3", "--json", str(path)], engine
    )
    assert [running for _, running in engine.asked] == [0, *[*[0] * 6, *[2] * 6] * 2]
    assert len({prompt for prompt, _ in engine.asked}) == 6
    assert all(child.poll() is not None for child in children)
    assert [run["busy"] for run in found["runs"]] == [0, 2, 0, 2]
    assert found["ratio"] == pytest.approx(found["busy_s"] / found["quiet_s"])
    assert json.loads(path.read_text()) == found
    assert "6 requests of 3 tokens: " in capsys.readouterr().out


def test_busy_processes_end_by_themselves() -> None:
    spin = runpy.run_path(str(SCRIPT))["_SPIN"]
    subprocess.run([sys.executable, "-c", spin, "0.05"], check=True, timeout=60)
