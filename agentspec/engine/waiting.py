"""Where callers wait for the worker, with bounds of their own: a stuck worker keeps no caller.

The worker ends requests whose time is up between rounds. Where it does not come to it, the caller ends its request
itself, a moment later. Without a timeout a caller waits as long as there is a worker.
"""

from __future__ import annotations

import asyncio
import math
import queue
import time
from collections.abc import Sequence as SequenceOf
from contextlib import suppress

from agentspec.engine.scheduler import Scheduler
from agentspec.engine.state import Delta, RequestState
from agentspec.errors import EngineStuckError

GRACE_S = 1.0
"""Seconds past a request's timeout in which the worker may still end it."""

HEARTBEAT_S = 1.0
"""Seconds after which a caller that waits looks whether there is still a worker."""


class Watch:
    """What a caller looks at while it waits for some requests.

    Args:
        scheduler: whose worker is waited for.
        jobs: all requests of the caller.
    """

    def __init__(self, scheduler: Scheduler, jobs: SequenceOf[RequestState]) -> None:
        self._scheduler = scheduler
        self._jobs = jobs
        self._due = min((job.deadline for job in jobs), default=math.inf)  # looked up again when it has passed

    def patience_s(self) -> float:
        """Seconds to wait before ``check``."""
        return max(0.0, min(HEARTBEAT_S, self._due + GRACE_S - time.perf_counter()))

    def check(self, job: RequestState) -> None:
        """Make sure that there is something to wait for.

        Args:
            job: whose next delta is waited for.

        Raises:
            EngineStuckError: where the worker did not end a request whose time is up.
            EngineClosedError: where there is no worker any more.
        """
        if job.error is not None:
            raise job.error  # it could not be sent
        self._scheduler.check_alive()
        if time.perf_counter() <= self._due + GRACE_S:
            return
        first = min((job for job in self._jobs if not job.is_done), key=lambda job: job.deadline, default=None)
        self._due = math.inf if first is None else first.deadline
        if first is not None and time.perf_counter() > self._due + GRACE_S:
            self._give_up(first)

    def _give_up(self, job: RequestState) -> None:
        job.count("timeout")
        job.cancel()
        if self._scheduler.status.since > job.deadline:  # it is slow, not stuck
            raise job.timeout_error()
        raise EngineStuckError(
            f"{job.timeout_error()} The engine's worker thread has not come back to end it. "
            f"{self._scheduler.status.describe()}\n"
            "Where that is a long pass, allow for it in the timeout; where it never ends, close the engine and make "
            "another one."
        )


class _Box:
    """What both mailboxes do: an end that ``Watch.check`` finds waits until all has been read that came before it."""

    def __init__(self) -> None:
        self._end: BaseException | None = None

    def _check(self, job: RequestState, watch: Watch) -> None:
        if self._end is not None:
            raise self._end
        watch.check(job)


class Mailbox(_Box):
    """Deltas of one request, on their way from the worker to a thread that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._items: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self.put = self._items.put

    def get(self, job: RequestState, watch: Watch) -> Delta:
        """Wait for the next delta.

        Raises:
            EngineStuckError: as ``Watch.check``; so does it EngineClosedError.
        """
        while True:
            with suppress(queue.Empty):
                return _unwrap(self._items.get_nowait())
            try:
                self._check(job, watch)
            except Exception as error:
                with suppress(queue.Empty):  # the worker may have sent more since the first look
                    item = self._items.get_nowait()
                    self._end = error
                    return _unwrap(item)
                raise
            with suppress(queue.Empty):
                return _unwrap(self._items.get(timeout=watch.patience_s()))


class AsyncMailbox(_Box):
    """The same for a task; made in its event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Delta | BaseException] = asyncio.Queue()

    def put(self, item: Delta | BaseException) -> None:
        """Take an item from another thread."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    async def get(self, job: RequestState, watch: Watch) -> Delta:
        """Wait for the next delta; raise as ``Mailbox.get``."""
        while self._items.empty():
            try:
                self._check(job, watch)
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
