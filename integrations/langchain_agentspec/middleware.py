"""Middleware for LangChain's agents (needs the ``langchain`` package)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.runnables import Runnable, RunnableConfig

from langchain_agentspec.consistency import Ask, SelfConsistency, answer_of, in_own_loop


class SelfConsistencyMiddleware(AgentMiddleware):
    """Self-consistency of single steps of an agent: every model call is asked ``k`` times, and the vote goes on.

    Args:
        k: samples.
        settings: further ones of ``SelfConsistency``.
    """

    def __init__(self, k: int = 8, **settings: Any) -> None:
        super().__init__()
        extract = settings.pop("extract", None)
        ignored = settings.get("ignore_args", ())

        def of_response(response: ModelResponse) -> Any:
            if extract is not None:
                return extract(response)
            found = response.structured_response
            return answer_of(response.result[-1] if found is None else found, ignored)

        self._by = SelfConsistency(_Nothing(), k, extract=of_response, **{**settings, "return_all": True})

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> Any:
        """Ask several times."""

        async def _ask(*_: Any) -> Any:
            return await asyncio.to_thread(handler, request)

        return in_own_loop(lambda: self._voted(_ask))

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> Any:
        """Ask several times."""

        async def _ask(*_: Any) -> Any:
            return await handler(request)

        return await self._voted(_ask)

    async def _voted(self, ask: Ask) -> Any:
        return (await self._by.vote(ask)).output


class _Nothing(Runnable[Any, Any]):
    """Stands where a middleware asks by itself."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        raise NotImplementedError
