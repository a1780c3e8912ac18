"""The engine seam: requests in, completions or deltas out. An engine may be local or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from agentspec.engine.local import LocalEngine
from agentspec.engine.metrics import EngineMetrics
from agentspec.engine.request import Completion, Delta, Request

__all__ = ["Completion", "Delta", "Engine", "EngineMetrics", "LocalEngine", "Request"]


class Engine(Protocol):
    """Serves requests; several callers, threads and tasks may share one."""

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode to the end; return the samples of each request, in order."""
        ...

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Yield deltas as they settle, of a sample at most one in ``every_s`` seconds.

        Closing the iterator cancels the request.
        """
        ...

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of ``stream`` without ever blocking the event loop."""
        ...

    def metrics(self) -> EngineMetrics:
        """Return the counters since the engine was made."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


if TYPE_CHECKING:
    _fits: type[Engine] = LocalEngine
