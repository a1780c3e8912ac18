"""Percentiles and ratios over many runs: known cases, known quantiles, and intervals that hold what they promise."""

from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest
import recorded
from hypothesis import given
from hypothesis import strategies as st

from agentspec import InvalidRequestError
from agentspec.report import RunRecord
from agentspec.report.compare import (
    Ratio,
    compare,
    measures,
    pair,
    percentiles,
    ratio_interval,
    student_quantile,
)


def timed(total_s: float, name: str | None = "run") -> RunRecord:
    """A run whose one iteration is half a model of agentspec."""
    one = recorded.turn(0.0, total_s, total_s / 2, 0.0, models=[recorded.model(0.0, total_s / 2)])
    return recorded.run([one], total_s, name=name, idle_s=0.0)


def of(ratios: list[Ratio], name: str) -> Ratio:
    [found] = [ratio for ratio in ratios if ratio.name.strip() == name]
    return found


def test_measures_add_up_and_leave_out_what_is_unknown() -> None:
    known = measures(recorded.simple())
    assert list(known)[:4] == ["total", "model", "  queue", "  template"]
    assert sum(value for name, value in known.items() if name.startswith(" ")) == pytest.approx(known["model"])
    assert known["model"] + known["tools"] + known["framework"] == known["total"] == 8.0
    assert known["iteration 1"] + known["iteration 2"] == 8.0
    strange = measures(recorded.third_party())
    assert not any(name.startswith(" ") for name in strange)
    assert strange["model"] == 1.75


def test_percentiles_are_of_the_runs_that_know() -> None:
    found = {p.name.strip(): p for p in percentiles([timed(t) for t in (1.0, 2.0, 3.0)] + [recorded.third_party()])}
    assert found["total"].count == 4
    assert found["total"].p50 == 2.5
    assert found["verify"].count == 3
    assert found["verify"].p50 == pytest.approx(0.6)
    assert found["iteration 1"].count == 4
    assert found["iteration 2"].count == 1
    assert list(found)[-2:] == ["iteration 1", "iteration 2"]


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_percentiles_are_those_of_numpy(seconds: list[float]) -> None:
    [total] = [found for found in percentiles([timed(s) for s in seconds]) if found.name == "total"]
    assert (total.p50, total.p90, total.p99) == pytest.approx(tuple(np.percentile(seconds, (50, 90, 99))), rel=1e-9)


@pytest.mark.parametrize(
    ("share", "freedom", "known"),
    [
        (0.975, 1, math.tan(math.pi * 0.475)),  # in closed form
        (0.975, 2, 0.95 / math.sqrt(2 * 0.975 * 0.025)),  # in closed form
        (0.975, 4, 2.7764451051978),
        (0.975, 10, 2.2281388519649),
        (0.975, 1000, 1.9623390808264),
        (0.95, 5, 2.0150483726691),
        (0.5, 3, 0.0),
    ],
)
def test_student_s_quantiles_are_those_of_the_tables(share: float, freedom: float, known: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(known, rel=1e-9, abs=1e-9)


def test_degrees_of_freedom_need_not_be_whole() -> None:
    assert student_quantile(0.975, 3) < student_quantile(0.975, 2.5) < student_quantile(0.975, 2)


def test_paired_runs_give_their_ratio_whatever_the_day_was_like() -> None:
    days = [1.0, 7.0, 3.0, 20.0]
    found = compare([timed(2 * day) for day in days], [timed(day) for day in days])
    total = of(found.ratios, "total")
    assert found.paired_by == "order"
    assert "Student" in found.method
    assert (total.count, total.a, total.b) == (4, 10.0, 5.0)
    assert total.ratio == pytest.approx(2)
    assert (total.low, total.high) == (pytest.approx(2), pytest.approx(2))


def test_the_interval_is_student_s_on_logarithms() -> None:
    ratios = [1.0, 2.0, 4.0]
    total = of(compare([timed(r) for r in ratios], [timed(1.0)] * 3).ratios, "total")
    reach = 4.302653 * math.log(2) / math.sqrt(3)
    assert total.ratio == pytest.approx(2)
    assert total.low == pytest.approx(2 * math.exp(-reach))
    assert total.high == pytest.approx(2 * math.exp(reach))


def test_runs_are_paired_by_name_where_names_agree() -> None:
    a = [timed(2.0, "x"), timed(6.0, "y"), timed(10.0, "x")]
    b = [timed(3.0, "y"), timed(1.0, "x"), timed(5.0, "x")]
    how, pairs = pair(a, b)
    assert how == "name"
    assert pairs is not None
    assert [(one.total_s, other.total_s) for one, other in pairs] == [(2, 1), (6, 3), (10, 5)]
    assert pair(a, [*b[:2], timed(5.0, "z")])[0] == "order"
    assert pair([timed(1.0, "fast")] * 2, [timed(1.0, "plain")] * 2)[0] == "order"


def test_without_pairs_the_interval_says_so() -> None:
    found = compare([timed(t) for t in (2.0, 4.0, 8.0)], [timed(t) for t in (1.0, 2.0)])
    total = of(found.ratios, "total")
    assert found.paired_by is None
    assert "unpaired" in found.method
    assert total.ratio == pytest.approx(4 / math.sqrt(2))
    assert total.low is not None
    assert total.high is not None
    # Variances of the logarithms are 1 and 1/2 times log(2)^2, of their means 1/3 and 1/4; freedom by Welch.
    reach = student_quantile(0.975, (7 / 12) ** 2 / ((1 / 3) ** 2 / 2 + (1 / 4) ** 2)) * math.log(2) * math.sqrt(7 / 12)
    assert total.low == pytest.approx(total.ratio / math.exp(reach))
    assert total.high == pytest.approx(total.ratio * math.exp(reach))
    same = of(compare([timed(2.0)] * 3, [timed(1.0)] * 2).ratios, "total")
    assert (same.low, same.ratio, same.high) == (2, 2, 2)


def test_too_few_runs_have_no_interval_and_zeros_no_ratio() -> None:
    alone = compare([timed(2.0)], [timed(1.0)])
    assert of(alone.ratios, "total").ratio == 2
    assert of(alone.ratios, "total").low is None
    assert of(alone.ratios, "tools").ratio is None
    assert of(compare([timed(2.0)] * 2, [timed(1.0)]).ratios, "total").low is None
    assert ratio_interval([2.0]) is None
    with pytest.raises(InvalidRequestError, match="3 and 0"):
        compare([timed(1.0)] * 3, [])


def test_a_measure_that_one_side_does_not_know_is_not_compared() -> None:
    found = compare([timed(2.0), timed(3.0)], [recorded.third_party()] * 2)
    names = [ratio.name for ratio in found.ratios]
    assert "total" in names
    assert not any(name.startswith(" ") for name in names if "idle" not in name)
    assert json.loads(json.dumps(found.to_dict()))["ratios"][0]["name"] == "total"


@pytest.mark.parametrize("counts", [(5, 5), (4, 9)])
def test_intervals_hold_the_true_ratio_as_often_as_they_say(counts: tuple[int, int]) -> None:
    """Pinned seed; of 400 intervals at 95 %, 380 are expected, with a standard deviation of 4.4."""
    rng, held, trials = random.Random(7), 0, 400
    for _ in range(trials):
        a = [timed(math.exp(rng.gauss(math.log(3), 0.4))) for _ in range(counts[0])]
        b = [timed(math.exp(rng.gauss(0, 0.2))) for _ in range(counts[1])]
        total = compare(a, b, only="total").ratios[0]
        assert total.low is not None
        assert total.high is not None
        held += total.low <= 3 <= total.high
    assert abs(held - 0.95 * trials) <= 4 * math.sqrt(trials * 0.95 * 0.05)


def test_the_ratio_is_a_geometric_mean() -> None:
    ratios = [0.5, 2.0, 3.0]
    total = of(compare([timed(r) for r in ratios], [timed(1.0)] * 3).ratios, "total")
    assert total.ratio == pytest.approx(statistics.geometric_mean(ratios))
