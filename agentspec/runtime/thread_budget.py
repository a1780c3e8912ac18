"""Compute with fewer threads while other processes keep the cores busy.

A team waits for its slowest thread, and libgomp waits by spinning. If another process runs on a core of the team, each
of the hundreds of parallel regions of a pass may wait for a time slice of milliseconds. The spinning threads meanwhile
use up the team's own share: one thread on a busy machine is then many times as fast as two. ``ThreadBudget`` measures
how busy other processes keep the cores, and sets the number of threads of the calling thread.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

WINDOW_S = 0.2
"""Seconds over which processor time is compared; the system counts it in hundredths."""

_STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7  # columns of a core's line
_LEAVE, _RETURN = 0.5, 0.3  # a core is left above, used again below this share in use by others

_log = logging.getLogger("agentspec")


@dataclass(frozen=True)
class Times:
    """Processor time on the cores that this process may use.

    Args:
        at: seconds of ``time.perf_counter``.
        cores: number of these cores.
        busy: seconds of use since the machine started, without processes of lower priority than this one.
        own: of these, seconds of this process.
    """

    at: float
    cores: int
    busy: float
    own: float


def read_times() -> Times | None:
    """Read the processor time until now; None on a system that does not count it by core (Linux does)."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
        gives_way = os.getpriority(os.PRIO_PROCESS, 0) > 0
        ticks = os.sysconf("SC_CLK_TCK")
        counted = [[int(field) for field in line[1:]] for line in lines if line[0] in cores]
        columns = [_USER, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL, *([_NICE] if gives_way else [])]
        busy = sum(fields[column] for fields in counted for column in columns) / ticks
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return Times(time.perf_counter(), len(counted), busy, time.process_time()) if counted else None


@functools.cache
def _openmp() -> Callable[[int], None] | None:
    """Return what sets the calling thread's number of threads in the OpenMP that torch loaded; None without one."""
    try:
        function = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    set_threads: Callable[[int], None] = function
    return set_threads


class ThreadBudget:
    """The number of threads to compute with now: torch's own, or that of the idle cores if there are fewer.

    Only for results that do not depend on the number of threads: products of torch round differently on other numbers.

    Args:
        read: returns the processor time until now.
    """

    def __init__(self, read: Callable[[], Times | None] = read_times) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._last = read()
        self._free = math.inf

    def apply(self) -> int:
        """Set the number of threads of the calling thread by the recent load; return it."""
        team: int | None = getattr(self._of_thread, "team", None)
        if team is None:
            team = self._of_thread.team = self._of_thread.now = torch.get_num_threads()
        wanted, set_threads = self.threads(team), _openmp()
        if wanted != self._of_thread.now and set_threads is not None:
            set_threads(wanted)
            self._of_thread.now = wanted
        now: int = self._of_thread.now
        return now

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: its holder, another thread of the parent, does not exist here."""
        self._lock = threading.Lock()

    def threads(self, team: int) -> int:
        """Return how many of a team of threads find an idle core now, at least one."""
        with self._lock:
            if team > 1 and self._last is not None and time.perf_counter() - self._last.at >= WINDOW_S:
                self._measure(self._last, self._read())
            return max(1, min(team, math.floor(min(self._free, team))))

    def _measure(self, before: Times, now: Times | None) -> None:
        self._last = now
        if now is None or now.own < before.own or now.at - before.at < WINDOW_S:  # a fork begins again at 0
            return
        others = max(0.0, now.busy - before.busy - (now.own - before.own)) / (now.at - before.at)
        fewer, more = (math.floor(now.cores - others + share) for share in (_LEAVE, _RETURN))
        free = fewer if fewer < self._free else max(self._free, more)
        if free != self._free and min(free, self._free) < now.cores:
            _log.info(
                "other processes keep %.1f of %d cores busy: %d threads may compute", others, now.cores, max(1, free)
            )
        self._free = free


BUDGET = ThreadBudget()
"""The budget of this process; it measures from its import on."""

if hasattr(os, "register_at_fork"):  # not on Windows; ``threads.in_forked_child`` imports this module
    os.register_at_fork(after_in_child=BUDGET.renew_lock)
