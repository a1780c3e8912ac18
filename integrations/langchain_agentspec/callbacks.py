"""Where an agent's time went: a callback handler, and a context manager that attaches it by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from contextvars import ContextVar, Token
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers.context import register_configure_hook

from agentspec import Delta
from agentspec.report import AgentRun, Recorder
from agentspec.report.budget import OnOverBudget, check_budget, check_budget_settings
from agentspec.report.fold import Kind
from agentspec.report.views.live import following
from langchain_agentspec.callback_events import CountedChunk, answer, began

_tracker: ContextVar[LatencyHandler | None] = ContextVar("agentspec_latency", default=None)


class LatencyHandler(BaseCallbackHandler):
    """Records chains, models and tools into ``run``, which goes from here to the end of the last of them.

    Attached twice, it still counts once. May be attached anywhere in LangChain: ``config={"callbacks": [handler]}``.

    Args:
        name: of the run.
        recorders: of the runs to record; None for one of its own.
    """

    run_inline = True  # on the caller's thread, so that the clock is read when things happen

    def __init__(self, name: str | None = None, recorders: tuple[Recorder, ...] | None = None) -> None:
        self.recorders = recorders or (Recorder(name),)
        self.run = AgentRun(self.recorders[-1])

    def on_chat_model_start(
        self, serialized: dict[str, Any] | None, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Record that a model call begins."""
        self._begin(run_id, "model", serialized, kwargs)

    def on_llm_start(
        self, serialized: dict[str, Any] | None, prompts: list[str], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Record that a model call begins."""
        self._begin(run_id, "model", serialized, kwargs)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record a model's progress; models of agentspec report how many tokens there are."""
        chunk = kwargs.get("chunk")
        for recorder in self.recorders:
            if isinstance(chunk, CountedChunk):
                recorder.token(run_id, chunk.tokens_so_far, chunk.acceptance_rate)
            else:
                recorder.token(run_id)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a model call, with the steps that it reports."""
        self._end(run_id, **answer(response))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a model call failed."""
        self._end(run_id, error)

    def on_tool_start(self, serialized: dict[str, Any] | None, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a tool begins."""
        self._begin(run_id, "tool", serialized, kwargs)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a tool. Some report a failure by their message, not by an exception."""
        failed = getattr(output, "status", None) == "error"
        self._end(run_id, str(getattr(output, "content", output)) if failed else None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a tool failed."""
        self._end(run_id, error)

    def on_chain_start(self, serialized: dict[str, Any] | None, inputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a chain, graph or node begins."""
        self._begin(run_id, "chain", serialized, kwargs)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a chain."""
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a chain failed."""
        self._end(run_id, error)

    def on_retriever_start(self, serialized: dict[str, Any] | None, query: str, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a retriever begins: part of the framework."""
        self._begin(run_id, "chain", serialized, kwargs)

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the end of a retriever."""
        self._end(run_id)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Record that a retriever failed."""
        self._end(run_id, error)

    def _begin(self, run_id: UUID, kind: Kind, serialized: dict[str, Any] | None, kwargs: dict[str, Any]) -> None:
        fields = began(kind, serialized, kwargs)
        for recorder in self.recorders:
            recorder.begin(run_id, kind, parent=kwargs.get("parent_run_id"), **fields)

    def _end(self, run_id: UUID, error: BaseException | str | None = None, **fields: Any) -> None:
        text = error if error is None or isinstance(error, str) else repr(error)
        for recorder in self.recorders:
            recorder.end(run_id, text, **fields)


register_configure_hook(_tracker, inheritable=True)


class LatencyTracker:
    """Accounts for everything that runs in its block, ``with`` or ``async with``; made by ``track_latency``."""

    def __init__(self, recorder: Callable[[], Recorder], on_over_budget: OnOverBudget, live: bool) -> None:
        self._recorder = recorder
        self._on_over_budget = on_over_budget
        self._live = live
        self._entered: list[tuple[Recorder, AgentRun, Token[LatencyHandler | None], ExitStack]] = []

    def __enter__(self) -> AgentRun:
        """Begin the run."""
        outer, view = _tracker.get(), ExitStack()
        recorder = self._recorder()
        handler = LatencyHandler(recorders=(*(outer.recorders if outer else ()), recorder))
        if self._live:
            view.enter_context(following(recorder))
        self._entered.append((recorder, handler.run, _tracker.set(handler), view))
        return handler.run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the run, with the exception that ended it if there is one."""
        recorder, run, token, view = self._entered.pop()
        with suppress(ValueError):  # an async generator may be closed in another context, which has no tracker to reset
            _tracker.reset(token)
        recorder.close(None if error is None else repr(error))
        view.close()
        check_budget(run, "warn" if error else self._on_over_budget)

    async def __aenter__(self) -> AgentRun:
        """Begin the run."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """End the run, with the exception that ended it if there is one."""
        self.__exit__(kind, error, trace)


def track_latency(
    name: str | None = None,
    budget_s: float | None = None,
    *,
    on_over_budget: OnOverBudget = "warn",
    live: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyTracker:
    """Account for everything that runs in the block: models, tools, and the framework around them.

    Runs in other tasks and threads are kept apart; a nested block is accounted for in both. What goes on when the
    block ends is closed with it. Threads that are started in the block by hand, outside LangChain, belong to no run.

    Args:
        name: of the run.
        budget_s: seconds that the block should take at most; None for no limit.
        on_over_budget: "warn" with a ``BudgetWarning`` at the end of the block, or "raise" a ``BudgetExceededError``
            (not over an exception that already ends the block).
        live: show on the terminal what the run is doing; nothing where there is none. Meant for one run at a time.
        clock: gives seconds on a monotonic clock.

    Raises:
        InvalidRequestError: for a budget that is no number of seconds, or an unknown ``on_over_budget``.

    Example:
        with track_latency("weather", budget_s=10) as run:
            agent.invoke(...)
        run.print()
    """
    check_budget_settings(budget_s, on_over_budget)
    return LatencyTracker(lambda: Recorder(name, budget_s, clock), on_over_budget, live)


PROGRESS_S = 0.1
"""Seconds between what a ``follower`` hears of a call that is not streamed."""


def follower(run_manager: Any) -> Callable[[Delta], Delta]:
    """Return a function that passes on the deltas of a model call and reports its progress to the recorders."""
    handlers = [h for h in getattr(run_manager, "handlers", ()) if isinstance(h, LatencyHandler)]
    recorders = dict.fromkeys(recorder for handler in handlers for recorder in handler.recorders)

    def send(delta: Delta) -> Delta:
        for recorder in recorders:
            recorder.progress(run_manager.run_id, len(delta.tokens), delta.acceptance_rate)
        return delta

    return send
