"""`PhaseTimer`: seconds by phase, each second counted once."""

from __future__ import annotations

import time
from types import TracebackType


class PhaseTimer:
    """Count the seconds of named phases; a phase entered inside another pauses it.

    ::

        timer = PhaseTimer()
        with timer("draft"):
            with timer("mask"):  # "draft" is paused
                ...
        timer.seconds  # {"draft_s": ..., "mask_s": ...}

    The phases add up to the time spent inside the outermost blocks. One thread uses a timer at a time.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds by phase, ``"<phase>_s"``, complete once the outermost block has ended."""
        self._open: list[str] = []  # keys of the phases that were entered, the innermost last
        self._next = ""
        self._since = 0.0

    def __call__(self, phase: str) -> PhaseTimer:
        """Return the context manager of a phase; enter it at once."""
        self._next = f"{phase}_s"
        return self

    def __enter__(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._count(self._open[-1], now)
        self._open.append(self._next)
        self._since = now

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.perf_counter()
        self._count(self._open.pop(), now)
        self._since = now

    @property
    def total_s(self) -> float:
        """Seconds of all phases so far."""
        return sum(self.seconds.values())

    def _count(self, key: str, now: float) -> None:
        self.seconds[key] = self.seconds.get(key, 0.0) + now - self._since
