"""The engine seam: requests in, completions or deltas out. An engine may be local or elsewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from agentspec.engine.request import Completion, Request
from agentspec.engine.state import Delta


class Engine(Protocol):
    """Serves requests; several callers, threads and tasks may share one."""

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode to the end; per request, its samples in order."""
        ...

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Deltas as they settle, of a sample ``every_s`` seconds at most. Closing the iterator cancels the request."""
        ...

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """``stream`` for an event loop, which is never blocked."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...
