"""Where an agent's time went: a callback handler, and a context manager that attaches it by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.tracers.context import register_configure_hook

from agentspec.report import AgentRun, Call

_tracker: ContextVar[LatencyHandler | None] = ContextVar("agentspec_latency", default=None)


class LatencyHandler(BaseCallbackHandler):
    """Records model and tool calls into ``run``. Attached twice, it still counts once.

    Args:
        name: of the run.
    """

    run_inline = True  # on the caller's thread, so that the clock is read when things happen

    def __init__(self, name: str | None = None) -> None:
        self.run = AgentRun(name, started=time.perf_counter())
        self._runs = [self.run]
        self._calls: dict[UUID, Call] = {}

    def nested(self, name: str | None) -> LatencyHandler:
        """A handler of a run within this one: its calls are recorded in both."""
        inner = LatencyHandler(name)
        inner._runs = [*self._runs, inner.run]
        return inner

    def close(self) -> None:
        """The run ends now."""
        self.run.ended = time.perf_counter()

    def on_chat_model_start(
        self, serialized: dict[str, Any] | None, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model begins."""
        self._begin(run_id, _model_name(serialized, kwargs), "model_calls")

    def on_llm_start(
        self, serialized: dict[str, Any] | None, prompts: list[str], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """A model begins."""
        self._begin(run_id, _model_name(serialized, kwargs), "model_calls")

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """A model is done; what it says of its step is kept."""
        self._end(run_id, details=_step(response))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A model failed."""
        self._end(run_id, error=repr(error))

    def on_tool_start(self, serialized: dict[str, Any] | None, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool begins."""
        self._begin(run_id, kwargs.get("name") or (serialized or {}).get("name") or "tool", "tool_calls")

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool is done."""
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """A tool failed."""
        self._end(run_id, error=repr(error))

    def _begin(self, run_id: UUID, name: str, kind: str) -> None:
        if run_id in self._calls:
            return
        call = self._calls[run_id] = Call(name, started=time.perf_counter())
        for run in self._runs:
            getattr(run, kind).append(call)

    def _end(self, run_id: UUID, error: str | None = None, details: dict[str, Any] | None = None) -> None:
        call = self._calls.get(run_id)
        if call is None or call.ended is not None:
            return  # this handler is attached twice
        call.ended, call.error = time.perf_counter(), error
        call.cached = _is_old(details, call)
        call.details = None if call.cached else details
        self.run.ended = call.ended


register_configure_hook(_tracker, inheritable=True)


@contextmanager
def track_latency(name: str | None = None) -> Iterator[AgentRun]:
    """Account for everything that runs in the block: models, tools, and the framework around them.

    Runs in other tasks and threads are kept apart; a nested block is accounted for in both.

    Example:
        with track_latency("weather") as run:
            agent.invoke(...)
        run.print()
    """
    outer = _tracker.get()
    handler = outer.nested(name) if outer else LatencyHandler(name)
    token = _tracker.set(handler)
    try:
        yield handler.run
    finally:
        _tracker.reset(token)
        handler.close()


def _is_old(step: dict[str, Any] | None, call: Call) -> bool:
    """Whether a cache gave the answer: ours says so, and with any other the step ended before it was asked for."""
    return step is not None and (step.get("cached", False) or step["ended_at"] < call.began_at)


def _model_name(serialized: dict[str, Any] | None, kwargs: dict[str, Any]) -> str:
    metadata = kwargs.get("metadata") or {}
    return str(metadata.get("ls_model_name") or kwargs.get("name") or (serialized or {}).get("name") or "model")


def _step(response: LLMResult) -> dict[str, Any] | None:
    """What an agentspec model says of its step; None for other models."""
    for generations in response.generations:
        for generation in generations:
            is_chat = isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage)
            told = generation.message.response_metadata if is_chat else generation.generation_info  # type: ignore[union-attr]
            step = (told or {}).get("agentspec")
            if isinstance(step, dict):
                return step
    return None
