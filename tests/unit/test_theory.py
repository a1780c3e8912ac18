"""The paper's formulas, against the values it prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.errors import InvalidRequestError
from agentspec.theory import best_gamma, expected_tokens, operations_factor, walltime_improvement

# Table 1 of arXiv 2211.17192 (c = c_hat = 0): alpha, gamma, operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert operations_factor(alpha, gamma, 0) == pytest.approx(operations, abs=0.005)
    assert walltime_improvement(alpha, gamma, 0) == pytest.approx(speed, abs=0.005)


@given(st.floats(0, 1), st.integers(0, 30))
def test_a_round_emits_what_its_positions_are_expected_to(alpha: float, gamma: int) -> None:
    reached = [alpha**position for position in range(gamma + 1)]  # the token at it is emitted
    assert expected_tokens(alpha, gamma) == pytest.approx(sum(reached), rel=1e-6)


def test_without_a_draft_nothing_changes() -> None:
    assert expected_tokens(0.7, 0) == pytest.approx(1)
    assert walltime_improvement(0.7, 0, 0.5) == pytest.approx(1)
    assert operations_factor(0.7, 0, 0.5) == pytest.approx(1)


@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0))
def test_a_draft_pays_where_alpha_is_more_than_c(alpha: float, c: float) -> None:
    """Corollary 3.9, with its bound for gamma 1."""
    if abs(alpha - c) < 1e-6:
        return
    gamma = best_gamma(alpha, c)
    assert (gamma > 0) == (alpha > c)
    if alpha > c:
        assert walltime_improvement(alpha, gamma, c) >= (1 + alpha) / (1 + c) - 1e-12


def test_a_dearer_check_lowers_the_gain() -> None:
    assert walltime_improvement(0.8, 4, 0.05, v=1.5) == pytest.approx(expected_tokens(0.8, 4) / 1.7)


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "v"),
    [(-0.1, 1, 0, 1), (1.1, 1, 0, 1), (0.5, -1, 0, 1), (0.5, 1, -1, 1), (0.5, 1, 0, 0), (float("nan"), 1, 0, 1)],
)
def test_what_makes_no_sense_is_refused(alpha: float, gamma: float, c: float, v: float) -> None:
    with pytest.raises(InvalidRequestError, match="got"):
        walltime_improvement(alpha, gamma, c, v)


def test_other_limits_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="limit"):
        best_gamma(0.5, 0.1, limit=-1)
    with pytest.raises(InvalidRequestError, match="c_hat"):
        operations_factor(0.5, 1, -1)
