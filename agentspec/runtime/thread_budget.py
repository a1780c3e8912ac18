"""Fewer threads compute while other processes keep the cores busy.

A team waits for its slowest thread, and libgomp waits by spinning. Where another process runs on a core of the team,
each of the hundreds of parallel regions of a pass may wait for a time slice of milliseconds, and what spins meanwhile
uses up the team's own share. One thread on a busy machine is then many times as fast as two. ``ThreadBudget`` looks at
how busy the cores are with other processes, and sets the number of threads of the thread that asks it.
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
"""Seconds over which processor time is compared: the system counts it in hundredths."""

_STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7  # columns of a core's line
_LEAVE, _RETURN = 0.5, 0.3  # shares of a core in use by others from which on it is left, up to which it is used again

_log = logging.getLogger("agentspec")


@dataclass(frozen=True)
class Times:
    """Processor time on the cores that this process may use.

    Args:
        at: seconds of ``time.perf_counter``.
        cores: how many they are.
        busy: seconds that they were busy since the machine started, without processes that give way.
        own: of these, seconds of this process.
    """

    at: float
    cores: int
    busy: float
    own: float


def read_times() -> Times | None:
    """Processor time until now; None where the system does not count it by core (Linux does)."""
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
    """Sets the number of threads of the calling thread, in the OpenMP that torch has loaded; None without one."""
    try:
        function = ctypes.CDLL(None).omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes, function.restype = [ctypes.c_int], None
    set_threads: Callable[[int], None] = function
    return set_threads


class ThreadBudget:
    """How many threads a thread may compute with now: as many as torch gives it, or as few as there are idle cores.

    Only what does not depend on the number of threads should ask: products of torch round otherwise on others.

    Args:
        read: gives the processor time until now.
    """

    def __init__(self, read: Callable[[], Times | None] = read_times) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._last = read()
        self._free = math.inf

    def apply(self) -> int:
        """Set the number of threads of the calling thread, by the load of the last moments; returns it."""
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
        """Replace the lock: another thread of the parent may hold it, and no such thread is in a forked child."""
        self._lock = threading.Lock()

    def threads(self, team: int) -> int:
        """How many of a team of threads find a core now; at least one."""
        with self._lock:
            if team > 1 and self._last is not None and time.perf_counter() - self._last.at >= WINDOW_S:
                self._look(self._last, self._read())
            return max(1, min(team, math.floor(min(self._free, team))))

    def _look(self, before: Times, now: Times | None) -> None:
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
"""That of this process; it begins to look as it is imported."""

if hasattr(os, "register_at_fork"):  # not on Windows; ``threads.in_forked_child`` imports this module
    os.register_at_fork(after_in_child=BUDGET.renew_lock)
