"""Callers wait for the worker, with bounds of their own: a stuck worker blocks no caller forever.

The worker ends requests whose time is up between rounds. If it does not come to it, the caller ends its request itself,
``GRACE_S`` later. Without a timeout a caller waits as long as there is a worker.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from agentspec.engine.request import Delta
from agentspec.engine.scheduler import Scheduler
from agentspec.engine.state import RequestState
from agentspec.errors import EngineStuckError

GRACE_S = 1.0
"""Seconds past a request's timeout in which the worker may still end it."""

HEARTBEAT_S = 1.0
"""Seconds after which a waiting caller checks that there is still a worker."""


class Watch:
    """The bounds of a caller that waits for some requests.

    Args:
        scheduler: owner of the worker that serves them.
        requests: all requests of the caller.
    """

    def __init__(self, scheduler: Scheduler, requests: SequenceOf[RequestState]) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._due = min((request.deadline for request in requests), default=math.inf)  # renewed when it has passed

    def patience_s(self) -> float:
        """Return the seconds to wait before ``check``."""
        return max(0.0, min(HEARTBEAT_S, self._due + GRACE_S - time.perf_counter()))

    def check(self, request: RequestState) -> None:
        """Check that there is something to wait for.

        Args:
            request: whose next delta the caller waits for.

        Raises:
            EngineStuckError: if the worker did not end a request whose time is up.
            EngineClosedError: if there is no worker any more.
        """
        if request.error is not None:
            raise request.error  # it could not be sent
        self._scheduler.check_alive()
        if time.perf_counter() <= self._due + GRACE_S:
            return
        left = [other for other in self._requests if not other.is_done]
        first = min(left, key=lambda other: other.deadline, default=None)
        self._due = math.inf if first is None else first.deadline
        if first is not None and time.perf_counter() > self._due + GRACE_S:
            self._give_up(first)

    def _give_up(self, request: RequestState) -> None:
        request.count("timeout")
        request.cancel()
        if self._scheduler.status.since > request.deadline:  # it is slow, not stuck
            raise request.timeout_error()
        raise EngineStuckError(
            f"{request.timeout_error()} The engine's worker thread has not come back to end it. "
            f"{self._scheduler.status.describe()}\n"
            "Where that is a long pass, allow for it in the timeout; where it never ends, close the engine and make "
            "another one."
        )


class _Box:
    """Common part of the mailboxes: an end that ``Watch.check`` finds is raised after all that was sent before it."""

    def __init__(self) -> None:
        self._end: BaseException | None = None

    def _check(self, request: RequestState, watch: Watch) -> None:
        if self._end is not None:
            raise self._end
        watch.check(request)


class Mailbox(_Box):
    """Deltas of one request, on their way from the worker to a thread that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._items: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self.put = self._items.put

    def get(self, request: RequestState, watch: Watch) -> Delta:
        """Wait for the next delta.

        Raises:
            EngineStuckError: as ``Watch.check``.
            EngineClosedError: as ``Watch.check``.
        """
        while True:
            with suppress(queue.Empty):
                return _unwrap(self._items.get_nowait())
            try:
                self._check(request, watch)
            except Exception as error:
                with suppress(queue.Empty):  # the worker may have sent more since the first look
                    item = self._items.get_nowait()
                    self._end = error
                    return _unwrap(item)
                raise
            with suppress(queue.Empty):
                return _unwrap(self._items.get(timeout=watch.patience_s()))


class AsyncMailbox(_Box):
    """Deltas of one request, on their way from the worker to a task; made in the task's event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    def put(self, item: Delta | BaseException) -> None:
        """Take an item, from any thread."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self, request: RequestState, watch: Watch) -> Delta:
        """Wait for the next delta; raise as ``Mailbox.get``."""
        while self._items.empty():
            try:
                self._check(request, watch)
            except Exception as error:
                await asyncio.sleep(0)  # what was put while the loop was blocked arrives now
                if self._items.empty():
                    raise
                self._end = error
                break
            try:
                async with asyncio.timeout(watch.patience_s()):  # wait_for may swallow that the task was cancelled
                    item = await self._items.get()
            except TimeoutError:
                continue
            return _unwrap(item)
        return _unwrap(self._items.get_nowait())


def _unwrap(item: Delta | BaseException) -> Delta:
    if isinstance(item, BaseException):
        raise item
    return item
