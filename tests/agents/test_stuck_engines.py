"""What LangChain hears of an engine that is stuck, of a queue that is full, and of too many samples."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from answering import answering
from langchain_core.exceptions import ModelTimeoutError
from torch import Tensor

from agentspec import EngineStuckError, InvalidRequestError
from agentspec.engine import waiting as waiting_module
from langchain_agentspec import AgentSpecLLM, ChatAgentSpec
from langchain_agentspec.structured_output import CallStuckError, CallTimeoutError


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(waiting_module, "GRACE_S", 0.05)
    opened = threading.Event()
    yield opened
    opened.set()


def stuck(gate: threading.Event) -> tuple[ChatAgentSpec, AgentSpecLLM]:
    """A chat model and a completion model over one engine, whose passes wait for the gate."""
    engine, model = answering([(r"", "One, two.")])
    play = model.next_logits

    def wait(contexts: list[list[int]], last: list[int]) -> Tensor:
        gate.wait(60)
        return play(contexts, last)

    model.next_logits = wait  # type: ignore[method-assign]
    return ChatAgentSpec(engine=engine, timeout=0.05), AgentSpecLLM(engine=engine, timeout=0.05)


async def test_a_stuck_engine_is_a_timeout_under_every_name(gate: threading.Event) -> None:
    chat, llm = stuck(gate)
    for ask in (
        lambda: chat.invoke("Hi"),
        lambda: list(chat.stream("Hi")),
        lambda: llm.invoke("Hi"),
        lambda: list(llm.stream("Hi")),
    ):
        with pytest.raises(CallStuckError, match=r"It has been (.|\n)*gate\.wait") as told:
            ask()
        assert isinstance(told.value, EngineStuckError | ModelTimeoutError)
        assert isinstance(told.value, CallTimeoutError)
    with pytest.raises(ModelTimeoutError):
        await chat.ainvoke("Hi")
    with pytest.raises(EngineStuckError):
        async for _ in chat.astream("Hi"):
            pass
    gate.set()
    assert chat.invoke("Hi", timeout=60).content == "One, two."


def test_too_many_samples_are_refused_before_anything_is_made_for_them(gate: threading.Event) -> None:
    chat, llm = stuck(gate)
    with pytest.raises(InvalidRequestError, match="1024 at most"):
        chat.invoke("Hi", n=200_000)
    with pytest.raises(InvalidRequestError, match="1024 at most"):
        llm.invoke("Hi", n=200_000)
