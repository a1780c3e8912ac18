"""The phase of an engine's worker thread, for the threads that wait for it."""

from __future__ import annotations

import threading
import time

from agentspec.runtime.threads import stack_of

IDLE = "waiting for requests"


class WorkerStatus:
    """The phase of the worker. Written by the worker, read by any thread."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self._at = (IDLE, time.perf_counter())

    def enter(self, phase: str) -> None:
        """Record that the worker enters another phase."""
        self._at = (phase, time.perf_counter())

    @property
    def is_idle(self) -> bool:
        """Whether the worker waits for requests."""
        return self._at[0] == IDLE

    @property
    def is_alive(self) -> bool:
        """Whether there is a worker."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def since(self) -> float:
        """Begin of the phase, on the clock of ``time.perf_counter``."""
        return self._at[1]

    def describe(self) -> str:
        """Describe the phase, its seconds, and the stack of the worker."""
        phase, since = self._at
        return f"It has been {phase} for {time.perf_counter() - since:.1f} s, and is at:\n{stack_of(self.thread)}"
