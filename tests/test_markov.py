"""The Markov example tells the truth: its laws, its acceptance rate, its target calls."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "markov.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_figures_agree_with_the_paper(example: dict[str, Any], gamma: int) -> None:
    result = example["measure"](gamma, texts=1500, length=16)
    assert result.total_variation < 1.5 * result.noise_floor
    assert result.tokens_per_call <= result.expected_tokens_per_call * 1.02
    assert result.tokens_per_call >= result.expected_tokens_per_call * 0.75  # the last call has less left to say
    if gamma == 0:
        assert result.target_calls_of_one_text == 16
        assert result.tokens_per_call == 1
    else:
        assert result.acceptance == pytest.approx(result.alpha, abs=0.02)
        assert result.target_calls_of_one_text < 16


def test_the_table_and_the_plot_are_made(
    example: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = example["main"](["--texts", "60", "--length", "6", "--plot", str(tmp_path / "plot.png")])
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "6 symbols take 6 target calls" in shown
    assert all(f"{result.tokens_per_call:.2f}" in shown for result in results)
