"""Many runs at once: percentiles of where their time went, and one set of runs against another.

Ratios are geometric means of A's seconds over B's: above 1, B is faster. Where runs can be paired, the interval is
Student's on the logarithms of the paired ratios; where they cannot, Welch's on the logarithms of both sets. Both take
logarithms of seconds to be about normal, which for few runs is the least that one can assume, and not known.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from agentspec.errors import InvalidRequestError
from agentspec.report.schema import Phases, RunRecord

CONFIDENCE = 0.95

Pairing = Literal["name", "order"]

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True)
class Percentiles:
    """Of one measure over some runs.

    Args:
        name: of the measure; all are seconds. What is part of another is set in.
        count: runs in which it is known.
    """

    name: str
    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Ratio:
    """One measure of A over the same of B.

    Args:
        name: of the measure.
        count: pairs, or runs of the smaller set where there are none.
        a: median of A, in seconds.
        b: median of B, in seconds.
        ratio: geometric mean of A over B; None where a value is 0.
        low: lower end of the interval; None where there are too few values.
        high: upper end.
    """

    name: str
    count: int
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """A against B.

    Args:
        paired_by: how runs were paired: by their names, by their order, or None where their numbers differ.
        method: of the interval.
        confidence: of the interval.
        ratios: by measure.
    """

    paired_by: Pairing | None
    method: str
    confidence: float
    ratios: list[Ratio]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def measures(run: RunRecord) -> dict[str, float]:
    """Seconds of a run by what they went into, and of its iterations; what is not known is left out."""
    found = {"total": run.total_s, "model": run.model_s}
    calls = [call for iteration in run.iterations for call in iteration.models if not call.cached]
    if calls and all(call.phases is not None for call in calls):
        found |= {name: sum(float(getattr(call.phases, phase)) for call in calls) for phase, name in _PHASES.items()}
    found |= {"tools": run.tool_s, "framework": run.framework_s, "of it idle": run.idle_s}
    return found | {f"iteration {number}": iteration.seconds for number, iteration in enumerate(run.iterations, 1)}


_PHASES = {phase: f"  {phase.removesuffix('_s').replace('_', ' ')}" for phase in Phases.model_fields}
_ORDER = ["total", "model", *_PHASES.values(), "tools", "framework", "of it idle"]


def percentiles(runs: Sequence[RunRecord]) -> list[Percentiles]:
    """Of every measure that some run has, in their order."""
    return [
        Percentiles(name, len(values), *map(float, np.quantile(values, (0.5, 0.9, 0.99))))
        for name, values in _by_measure(runs).items()
    ]


def compare(a: Sequence[RunRecord], b: Sequence[RunRecord], only: str | None = None) -> Comparison:
    """Compare A with B: paired by name where both have the same names, by order where there are as many, or not at all.

    Args:
        a: some runs.
        b: other runs.
        only: the one measure to compare; None for all that both know.

    Raises:
        InvalidRequestError: where one of them is empty.
    """
    if not a or not b:
        raise InvalidRequestError(f"A comparison needs runs on both sides, got {len(a)} and {len(b)}.")
    paired_by, pairs = pair(a, b)
    if pairs is None:
        of_a, of_b = _by_measure(a), _by_measure(b)
        ratios = [_unpaired(name, of_a[name], of_b[name]) for name in of_a if name in of_b and only in (None, name)]
        return Comparison(None, "Welch's interval on logarithms, unpaired", CONFIDENCE, ratios)
    measured = [(measures(one), measures(other)) for one, other in pairs]
    names = dict.fromkeys(name for one, other in measured for name in one if name in other and only in (None, name))
    ratios = [_paired(name, [(x[name], y[name]) for x, y in measured if name in x and name in y]) for name in names]
    return Comparison(paired_by, "Student's interval on logarithms of paired ratios", CONFIDENCE, ratios)


def pair(
    a: Sequence[RunRecord], b: Sequence[RunRecord]
) -> tuple[Pairing | None, list[tuple[RunRecord, RunRecord]] | None]:
    """Pair runs of A with those of B; equal names are paired in their order."""
    names = Counter(run.name for run in a)
    if len(names) > 1 and names == Counter(run.name for run in b):
        waiting: defaultdict[str | None, list[RunRecord]] = defaultdict(list)
        for run in b:
            waiting[run.name].append(run)
        return "name", [(run, waiting[run.name].pop(0)) for run in a]
    return ("order", list(zip(a, b, strict=True))) if len(a) == len(b) else (None, None)


def ratio_interval(ratios: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's interval for the geometric mean of positive ratios; None for fewer than two.

    Args:
        ratios: of pairs, independent of each other.
        confidence: how often such intervals hold the true ratio.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = student_quantile(0.5 + confidence / 2, len(logs) - 1) * error
    return math.exp(mean - reach), math.exp(mean + reach)


@functools.cache
def student_quantile(share: float, freedom: float) -> float:
    """Return the value below which Student's distribution has a share of its mass, from one half on.

    Args:
        share: from 0.5 to below 1.
        freedom: degrees of it, not necessarily whole.
    """
    low, high = 0.0, 1.0
    while _student_mass(high, freedom) < share - 0.5:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_mass(middle, freedom) < share - 0.5 else (low, middle)
    return (low + high) / 2


def _student_mass(x: float, freedom: float) -> float:
    """Return the mass of Student's distribution from 0 to x.

    Gauss' quadrature over the angle atan(x / sqrt(freedom)).
    """
    scale: float = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    angle = math.atan(x / math.sqrt(freedom))
    return scale * angle / 2 * float(_WEIGHTS @ np.cos(angle * (1 + _NODES) / 2) ** (freedom - 1))


def _paired(name: str, values: Sequence[tuple[float, float]]) -> Ratio:
    a, b = [one for one, _ in values], [other for _, other in values]
    medians = statistics.median(a), statistics.median(b)
    if min(*a, *b) <= 0:
        return Ratio(name, len(values), *medians, None, None, None)
    ratios = [one / other for one, other in values]
    ends = ratio_interval(ratios) or (None, None)
    return Ratio(name, len(values), *medians, statistics.geometric_mean(ratios), *ends)


def _unpaired(name: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    medians, count = (statistics.median(a), statistics.median(b)), min(len(a), len(b))
    if min(*a, *b) <= 0:
        return Ratio(name, count, *medians, None, None, None)
    ratio = statistics.geometric_mean(a) / statistics.geometric_mean(b)
    if count < 2:
        return Ratio(name, count, *medians, ratio, None, None)
    parts = [statistics.variance([math.log(value) for value in side]) / len(side) for side in (a, b)]
    error = sum(parts)
    if error == 0:
        return Ratio(name, count, *medians, ratio, ratio, ratio)
    freedom = error**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    reach = math.exp(student_quantile(0.5 + CONFIDENCE / 2, freedom) * math.sqrt(error))
    return Ratio(name, count, *medians, ratio, ratio / reach, ratio * reach)


def _by_measure(runs: Sequence[RunRecord]) -> Mapping[str, list[float]]:
    """Values by measure; iterations last, however many a run has."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in measures(run).items():
            found[name].append(value)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER) + int(name.removeprefix("iteration "))
