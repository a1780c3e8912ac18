"""What happens in a run, written down while it happens: calls that begin and end, under the ids of whoever tells."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from agentspec.report.fold import Call, Kind, fold
from agentspec.report.schema import RunRecord
from agentspec.runtime.threads import lock_of


class Recorder:
    """The calls of one run. Telling it the same twice changes nothing; after ``close`` nothing does.

    Several threads may report to it. ``lock_of`` gives the lock, as it is renewed in a forked child.

    Args:
        name: of the run.
        budget_s: seconds that the run should take at most; only kept here.
        clock: gives seconds on a monotonic clock.
        time_of_day: gives seconds since 1970.
    """

    def __init__(
        self,
        name: str | None = None,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.budget_s = budget_s
        self.clock = clock
        self.is_closed = False
        self._time_of_day = time_of_day
        self._calls: dict[Any, Call] = {}
        self._began_at = time_of_day()
        self._error: str | None = None
        self._started = self._ended = clock()

    def begin(self, id: Any, kind: Kind, name: str, parent: Any = None, **fields: Any) -> None:
        """Record that a call begins; ``fields`` are further fields of ``Call``."""
        with lock_of(self):
            if not self.is_closed and id not in self._calls:
                self._ended = self.clock()
                self._calls[id] = Call(
                    id, kind, name, self._ended, parent=parent, began_at=self._time_of_day(), **fields
                )

    def token(self, id: Any, tokens: int | None = None, acceptance_rate: float | None = None) -> None:
        """Record text that was sent to callbacks; ``tokens`` is how many there are, one more where not known."""
        with self._going_on(id) as call:
            if call is not None:
                call.streamed, call.acceptance_rate = True, acceptance_rate
                call.tokens = call.tokens + 1 if tokens is None else tokens

    def progress(self, id: Any, tokens: int, acceptance_rate: float | None) -> None:
        """Record ``tokens`` more of a model that does not stream."""
        with self._going_on(id) as call:
            if call is not None:
                call.tokens += tokens
                call.acceptance_rate = acceptance_rate

    @contextmanager
    def _going_on(self, id: Any) -> Iterator[Call | None]:
        """Return the call that has a token now; None where it is over."""
        with lock_of(self):
            call = self._calls.get(id)
            if call is None or call.ended is not None:
                yield None
                return
            if call.first_token is None:
                call.first_token = self.clock()
            yield call

    def end(self, id: Any, error: str | None = None, **fields: Any) -> None:
        """Record the end of a call; ``fields`` are further fields of ``Call``."""
        with lock_of(self):
            call = self._calls.get(id)
            if call is None or call.ended is not None:
                return
            call.ended, call.error = self.clock(), error
            for name, value in fields.items():
                setattr(call, name, value)
            self._ended = call.ended

    def close(self, error: str | None = None) -> None:
        """End the run, and with it whatever still goes on."""
        with lock_of(self):
            if self.is_closed:
                return
            self.is_closed, self._error, self._ended = True, error, self.clock()
            for call in self._calls.values():
                if call.ended is None:
                    call.ended, call.error = self._ended, error or "still going on when the run ended"

    def record(self) -> RunRecord:
        """Return the run so far: up to the last call that began or ended, or to its end."""
        with lock_of(self):
            return fold(
                list(self._calls.values()),
                self._started,
                self._ended,
                name=self.name,
                began_at=self._began_at,
                budget_s=self.budget_s,
                error=self._error,
            )

    def now(self) -> tuple[float, list[Call]]:
        """Seconds since the run began, and all its calls in the order they began."""
        with lock_of(self):
            return self.clock() - self._started, list(self._calls.values())
