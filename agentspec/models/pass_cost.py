"""What a pass costs: seconds of a model over blocks of tokens, measured once per device and refined while it runs.

A block of two tokens can cost more than one of five (another kernel), and a block in every row of a batch eight times
what it costs in one; no formula knows. The table is kept on disk under what the measurement depends on. A busy machine
only ever adds seconds, so the shortest of all passes counts, and every process that loads the table looks again at some
of it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from agentspec.models import LanguageModel
from agentspec.runtime.threads import apart

if TYPE_CHECKING:
    from agentspec.runtime.cache import DiskCache

WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
"""Tokens per row of the blocks that are measured."""

_CONTEXT = 64  # tokens before a measured block
_REPEATS = 3
_FIRST_SECONDS, _AGAIN_SECONDS = 10.0, 0.5  # for one model; what is left out is interpolated
_ENTRY_RATE, _LOAD_RATE = 0.02, 0.2  # by which one round moves an entry, and what all have in common
_SPIKE = 1.5  # the most that a small block costs of a larger one
_OUTLIER = 2.0  # a round that took longer than this multiple, or less than its inverse, counts as this


class PassCost:
    """Seconds of a pass by rows and by tokens per row.

    Args:
        seconds: ``{(rows, width): seconds}``; others are interpolated, in rows and in width.

    Raises:
        ValueError: without entries, or for entries that are no positive numbers.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        if not seconds or not all(0 < s < math.inf and min(key) >= 1 for key, s in seconds.items()):
            raise ValueError(f"Expected {{(rows, width): seconds}} with positive entries, got {dict(seconds)}.")
        self._of_rows: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for (rows, width), s in seconds.items():
            self._of_rows[rows][width] = s
        self._load = 1.0  # what rounds take now over what they took when this was measured

    def __call__(self, rows: int, width: int) -> float:
        """Seconds of a pass over ``width`` tokens in each of ``rows`` rows."""
        if rows in self._of_rows:
            return _between(self._of_rows[rows], width)
        return _between({r: _between(points, width) for r, points in self._of_rows.items()}, rows)

    def learn(self, rows: int, width: int, seconds: float) -> None:
        """Count the time of a pass. What all passes have in common (long contexts, a busy machine) moves no entry."""
        expected = self(rows, width)
        ratio = min(_OUTLIER, max(1 / _OUTLIER, seconds / (self._load * expected)))
        self._load *= ratio**_LOAD_RATE
        self._of_rows[rows][width] = expected * ratio**_ENTRY_RATE

    @property
    def seconds(self) -> dict[tuple[int, int], float]:
        """What is known: ``{(rows, width): seconds}``."""
        return {(rows, width): s for rows, points in self._of_rows.items() for width, s in points.items()}


@apart
def measured(model: LanguageModel, cache: DiskCache | None = None) -> PassCost:
    """Return a model's cost table: from the cache, where the same model, device and versions were measured before.

    Takes seconds and pushes other contexts out of the model's cache; changes no result.
    """
    key = _key(model)
    if cache is None or key is None:
        return PassCost(measure(model))
    kept = _read(cache.get(key))
    found = measure(model, _AGAIN_SECONDS if kept else _FIRST_SECONDS, known=kept)
    entries = kept | {at: min(seconds, kept.get(at, seconds)) for at, seconds in found.items()}
    if _key(model) != key:  # its passes could not be captured, as it had announced
        return PassCost(_without_spikes(found))
    cache.set(key, json.dumps([[*at, s] for at, s in sorted(entries.items())]).encode())
    return PassCost(_without_spikes(entries))


def measure(
    model: LanguageModel, budget_s: float = _FIRST_SECONDS, *, known: Collection[tuple[int, int]] = ()
) -> dict[tuple[int, int], float]:
    """``{(rows, width): seconds}``: the shortest of some passes each, as many as fit into ``budget_s`` seconds.

    The outline of the table is measured in any case, then the rest of it; entries already ``known`` come last, in
    another order every time. Everything is gone through again and again: a busy second shall not meet one entry alone.
    """
    began = time.perf_counter()
    found: dict[tuple[int, int], float] = {}
    longest = max(WIDTHS)
    most = model.max_running if model.is_cached else 8
    room = min(_CONTEXT + longest, _CONTEXT + longest if model.max_context is None else model.max_context)
    outline, grid = _grid(most, min(longest, room - 1))
    # On a GPU the first passes of a shape choose kernels and capture a graph.
    first_tries = 1 if model.device.type == "cpu" else 3
    again = random.sample(sorted(known), len(known))
    needed, rest = ([at for at in cells if at not in known] for cells in (outline, grid))
    for number, (rows, width) in enumerate([*needed, *[*rest, *again] * _REPEATS]):
        if number >= max(1, len(needed)) and time.perf_counter() - began > budget_s:
            break
        seconds = [_pass_s(model, rows, room, width) for _ in range(1 if (rows, width) in found else first_tries)]
        found[rows, width] = min(*seconds, found.get((rows, width), math.inf))
    return found


def _pass_s(model: LanguageModel, rows: int, length: int, width: int) -> float:
    """Seconds of a pass over the last ``width`` tokens of contexts of ``length``."""
    contexts = _contexts(rows, length, model.vocab_size)
    model.next_logits([context[:-width] for context in contexts], [1] * rows)
    started = time.perf_counter()
    float(model.next_logits(contexts, [width] * rows).values[0, 0, 0])  # which waits for the device
    return max(time.perf_counter() - started, 1e-9)


def _without_spikes(entries: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Entries far above that of a larger block are a machine that was busy, and nothing else."""
    return {
        (rows, width): min(s, *(_SPIKE * t for (r, w), t in entries.items() if r >= rows and w >= width))
        for (rows, width), s in entries.items()
    }


def _grid(most_rows: int, longest: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the widths to measure: a coarse outline, and all of them."""
    rows = sorted({1, most_rows} | {2**k for k in range(1, most_rows.bit_length()) if 2**k < most_rows})
    widths = [width for width in WIDTHS if width <= longest]
    outline = [(r, w) for r in (1, most_rows) for w in (1, 5, widths[-1]) if w in widths]
    return outline, [(r, w) for r in rows for w in widths]


def _contexts(rows: int, length: int, vocab_size: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(rows)
    contexts: list[list[int]] = torch.randint(vocab_size, (rows, length), generator=rng).tolist()
    return contexts


def _between(points: Mapping[int, float], x: int) -> float:
    """Piecewise linear through ``points``; beyond the last, on along the line from the first to it."""
    if x in points:
        return points[x]
    at = sorted(points)
    if x < at[0] or len(at) == 1:
        return points[at[0]]
    if x > at[-1]:
        first, last = at[0], at[-1]
        return points[last] + max(0.0, points[last] - points[first]) * (x - last) / (last - first)
    left, right = next(pair for pair in pairwise(at) if pair[0] < x < pair[1])
    return points[left] + (points[right] - points[left]) * (x - left) / (right - left)


def _key(model: LanguageModel) -> str | None:
    """Return what a measurement depends on; None for a model that cannot say what it is."""
    fingerprint = model.fingerprint
    if fingerprint is None:
        return None
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.processor()} {os.cpu_count()}"
    parts = (fingerprint, device.type, name, torch.get_num_threads(), torch.__version__, platform.node())
    return "pass cost 1: " + json.dumps(parts)


def _read(value: bytes | None) -> dict[tuple[int, int], float]:
    """Return the table in a cache entry; an empty one for what is none."""
    try:
        entries: Sequence[tuple[int, int, float]] = json.loads(value or b"[]")
        return PassCost({(int(rows), int(width)): float(seconds) for rows, width, seconds in entries}).seconds
    except (ValueError, TypeError):
        return {}
