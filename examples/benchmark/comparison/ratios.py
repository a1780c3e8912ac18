"""Paired ratios and how sure they are."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
COVERAGE = 0.95


@dataclass(frozen=True)
class Ratio:
    """How many times more ``slow`` costs than ``fast``.

    Args:
        median: of the paired ratios, all rows and repeats.
        low: where the interval of the median begins (bootstrap, 95 %).
        high: where it ends.
        total: of all that ``slow`` costs to all that ``fast`` costs: long rows weigh more.
    """

    median: float
    low: float
    high: float
    total: float


def paired(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]], seed: int = 0) -> Ratio:
    """The ratio of two systems that took turns.

    Args:
        slow: per row of the workload, its cost in each repeat.
        fast: likewise, in the same order.
        seed: of the bootstrap.

    Raises:
        ValueError: unless both have the same rows and repeats, at least one, and every cost is above 0.
    """
    if not slow or [len(row) for row in slow] != [len(row) for row in fast] or not all(slow):
        raise ValueError("Expected the same rows and repeats of both systems, at least one of each.")
    if min(map(min, [*slow, *fast])) <= 0:
        raise ValueError("Expected costs above 0.")
    pairs = [[a / b for a, b in zip(*rows, strict=True)] for rows in zip(slow, fast, strict=True)]
    low, high = interval(pairs, seed)
    total = sum(map(statistics.median, slow)) / sum(map(statistics.median, fast))
    return Ratio(_median(pairs), low, high, total)


def interval(rows: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """A bootstrap interval of the median of all values.

    Rows are drawn with all of their repeats, for repeats of a row are alike; of a single row, the repeats are drawn.
    """
    rng = random.Random(seed)
    units = [list(row) for row in rows] if len(rows) > 1 else [[value] for value in rows[0]]
    medians = sorted(_median(rng.choices(units, k=len(units))) for _ in range(RESAMPLES))
    cut = int((1 - COVERAGE) / 2 * RESAMPLES)
    return medians[cut], medians[-1 - cut]


def _median(rows: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for row in rows for value in row)
