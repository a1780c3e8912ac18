"""The examples run, and what they print is true."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from answering import answering

from langchain_agentspec import ChatAgentSpec

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def markov() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "markov.py"))


def test_markov_measures_what_is_true(markov: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With pinned seeds: distribution within its noise, acceptance and tokens per call within their standard errors."""
    found = markov["main"](["--sequences", "400", "--length", "8", "--largest-gamma", "5", "--seed", "3"])
    alpha = markov["acceptance_rate"](*markov["models"](3))
    assert [row.gamma for row in found] == list(range(6))
    assert found[0].accepted is None
    assert found[0].tokens_per_call == found[0].paper == 1
    assert found[0].exact == pytest.approx(1)
    for row in found:
        assert row.total_variation < row.noise_limit
        assert row.noise_floor < row.noise_limit < 0.2
        assert row.tokens_per_call == pytest.approx(row.exact, rel=0.05)
        assert row.paper == pytest.approx(row.exact, rel=0.02)
    assert [row.accepted for row in found[1:]] == pytest.approx([alpha] * 5, abs=0.04)
    shown = capsys.readouterr().out
    assert f"alpha = {alpha:.3f}" in shown
    assert "gamma 0: 40\n" in shown


def test_markov_without_speculation_takes_one_call_a_token(markov: dict[str, Any]) -> None:
    target, draft = markov["models"]()
    assert [markov["target_calls"](target, draft, 0, tokens) for tokens in (1, 7, 40)] == [1, 7, 40]
    twin = type(target)(target.transitions)
    assert markov["target_calls"](target, twin, 4, 40) == 8
    assert markov["target_calls"](target, draft, 4, 40) < 20


def test_markov_sees_a_wrong_distribution(markov: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is tight enough to fail: here against the distribution of another chain."""
    target, draft = markov["models"](3)
    right = markov["measure"](target, draft, gamma=2, sequences=400, length=8)
    assert right.total_variation < right.noise_limit
    pair_probs = markov["pair_probs"]
    monkeypatch.setitem(
        markov["measure"].__globals__, "pair_probs", lambda target, start, length: pair_probs(draft, start, length)
    )
    wrong = markov["measure"](target, draft, gamma=2, sequences=400, length=8)
    assert wrong.total_variation > wrong.noise_limit


def test_markov_plots(markov: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out" / "markov.png"
    markov["main"](["--sequences", "20", "--length", "3", "--largest-gamma", "1", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_markov_refuses_texts_without_a_pair(markov: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        markov["main"](["--length", "1"])
    assert "--length must be 2 or more" in capsys.readouterr().err


def test_a_debate_is_held_and_decided() -> None:
    debate = runpy.run_path(str(EXAMPLES / "debate.py"))
    engine, _ = answering([(r"Which side", '{"answer": "no"}'), (r"I say no", "I say yes."), (r"", "I say no.")])
    model = ChatAgentSpec(engine=engine, temperature=0.5, max_tokens=40)
    said = debate["debate"](model, "Is it?", 2)
    assert said == [("for", "I say no."), ("against", "I say yes."), ("for", "I say no."), ("against", "I say yes.")]
    result = debate["verdict"](model, "Is it?", said, 8)
    assert result.answer == {"answer": "no"}
    assert result.share == 1.0
    engine.close()


@pytest.mark.sweep
def test_passes_are_timed_the_same_way_for_everyone(capsys: pytest.CaptureFixture[str]) -> None:
    module = runpy.run_path(str(EXAMPLES / "benchmark" / "passes.py"))
    read: list[tuple[str, int]] = []
    ways = {name: lambda block, name=name: read.append((name, len(block))) for name in ("a", "b")}
    found = module["race"](ways, torch.Generator(), 2)
    assert read == [(name, width) for width in module["WIDTHS"] for _ in range(4) for name in ways]
    assert {name: set(by_width) for name, by_width in found.items()} == {name: set(module["WIDTHS"]) for name in ways}
    capsys.readouterr()
    shown = module["main"](["--repeats", "1", "--context", "16"])
    assert list(shown) == ["transformers", "neither fused nor packed", "without a compiler", "agentspec"]
    assert all(ms > 0 for by_width in shown.values() for ms in by_width.values())
    assert capsys.readouterr().out.count("\n") == 5
