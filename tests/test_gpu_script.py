"""The script for a machine with a GPU runs at toy size on the CPU, and its checks can fail."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agentspec import CausalLM

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "benchmark" / "gpu.py"
TOY = ["--device", "cpu", "--layers", "2", "--hidden", "64", "--repeats", "1"]


def test_all_checks_hold_at_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(SCRIPT))["main"](TOY)
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == 3
    assert "batch 4" in shown


def test_a_wrong_cache_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = CausalLM.next_logits

    def wrong(self: CausalLM, contexts: Any, last: Any) -> Tensor:
        return right(self, contexts, last) + 0.1 * len(contexts)

    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setattr(CausalLM, "next_logits", wrong)
    monkeypatch.setattr(CausalLM, "_probe", lambda self: None)
    assert not script["correctness"](2, 64, "cpu")
    assert "FAILED cached logits" in capsys.readouterr().out
