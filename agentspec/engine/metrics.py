"""Counters of an engine, which only grow, and the sequences that run and wait right now.

Everything is counted when it happens: tokens and seconds with their round, a request before its caller receives its
end. Seconds of a round count once, however many requests shared it: these are seconds of the machine. Only ``queue_s``
are seconds waited.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from agentspec.errors import EngineClosedError, RequestTimeoutError
from agentspec.stats import FORCED, RoundStats, add_counts

OUTCOMES = ("completed", "failed", "timeout", "cancelled", "closed")
"""Ends of a request: with all its samples, with an error, with its time up, cancelled by its caller, or with its
engine."""


@dataclass(frozen=True)
class EngineMetrics:
    """An engine's counters at one moment.

    Args:
        requests: by outcome (``OUTCOMES``). Requests that were refused before they started are not among them.
        samples: finished ones, by finish reason.
        prompt_tokens: of all samples that began.
        cached_tokens: of them, tokens that the target had computed before.
        generated_tokens: emitted by rounds.
        drafted: tokens by the name of their drafter; ``forced`` are those without an alternative in the grammar.
        accepted: of them, tokens accepted.
        seconds: by phase.
        rounds: of speculative decoding; each is a pass of the target.
        rows: sequences in all rounds together: over ``rounds``, the mean batch.
        running: sequences that have a batch slot now.
        waiting: sequences that wait for a slot now.
        max_running: slots.
        threads: of the worker's computations; fewer than torch's while other processes keep the cores busy, and 0
            before the first request.
    """

    requests: Mapping[str, int]
    samples: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    seconds: Mapping[str, float]
    rounds: int
    rows: int
    running: int
    waiting: int
    max_running: int
    threads: int = 0

    @property
    def forced_tokens(self) -> int:
        """Tokens without an alternative in the grammar."""
        return self.accepted.get(FORCED, 0)


class Meter:
    """Counts for ``EngineMetrics``. Written by the worker thread, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self._samples: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self.threads = 0

    def renew_lock(self) -> None:
        """Replace the lock: its holder stayed in the process that forked this one."""
        self._lock = threading.Lock()

    def add_prompt(self, tokens: int, cached: int) -> None:
        """Count a sample that begins."""
        with self._lock:
            self._counts.update(prompt_tokens=tokens, cached_tokens=cached)

    def add_seconds(self, **phases: float) -> None:
        """Count seconds outside of rounds."""
        with self._lock:
            self._add(phases)

    def add_round(self, stats: RoundStats) -> None:
        """Count a round, its rows and its seconds."""
        with self._lock:
            self._counts["rounds"] += 1
            self._counts["rows"] += len(stats.rows)
            for row in stats.rows:
                self._counts["generated_tokens"] += row.committed
                add_counts(self._drafted, row.drafted)
                add_counts(self._accepted, row.accepted)
            self._add(stats.seconds)

    def add_sample(self, finish_reason: str) -> None:
        """Count a finished sample."""
        with self._lock:
            self._samples[str(finish_reason)] += 1

    def add_request(self, outcome: str) -> None:
        """Count a request that is over."""
        with self._lock:
            self._requests[outcome] += 1

    def read(self, running: int = 0, waiting: int = 0, max_running: int = 0) -> EngineMetrics:
        """Return the counters, all of one moment."""
        with self._lock:
            return EngineMetrics(
                dict(self._requests),
                dict(self._samples),
                drafted=dict(self._drafted),
                accepted=dict(self._accepted),
                seconds=dict(self._seconds),
                running=running,
                waiting=waiting,
                max_running=max_running,
                threads=self.threads,
                **{name: self._counts[name] for name in _COUNTS},
            )

    def _add(self, phases: Mapping[str, float]) -> None:
        for phase, seconds in phases.items():
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds


_COUNTS = [field.name for field in dataclasses.fields(EngineMetrics) if field.name.endswith("_tokens")]
_COUNTS += ["rounds", "rows"]


def outcome_of(error: BaseException) -> str:
    """Return the outcome of a request that an error ended."""
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    return "closed" if isinstance(error, EngineClosedError) else "failed"
