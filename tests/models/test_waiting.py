"""Callers keep a bound of their own, whatever holds the worker."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from enumeration import TableModel
from scripted import ScriptedModel, tokenizer
from torch import Tensor

import agentspec.engine.admission
from agentspec import (
    EngineClosedError,
    EngineStuckError,
    Grammar,
    LocalEngine,
    Request,
    RequestTimeoutError,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
)
from agentspec.drafters import NoDrafter
from agentspec.engine import scheduler as scheduler_module
from agentspec.engine import waiting as waiting_module
from agentspec.engine.metrics import Meter
from agentspec.engine.scheduler import Scheduler
from agentspec.engine.state import RequestState

TIMEOUT = 0.05
KNOWN = tokenizer()


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "GRACE_S", 0.05)
    monkeypatch.setattr(waiting_module, "HEARTBEAT_S", 0.05)


class Gate:
    """Blocks its callers while it is shut."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()

    def hold_here(self) -> None:
        self.entered.set()
        assert self.opened.wait(60)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


class HeldModel(TableModel):
    """Its passes, or its reading of prompts, are held."""

    max_context, max_rows = 1000, 4

    def __init__(self, gate: Gate, place: str) -> None:
        super().__init__(5)
        self._gate, self._place = gate, place

    def cached_tokens(self, context: list[int]) -> int:
        return 0

    def next_logits(self, contexts: Any, last: Any) -> Tensor:
        if self._place == ("pass" if any(last) else "prefill"):
            self._gate.hold_here()
        return super().next_logits(contexts, last)


class HeldDrafter(NoDrafter):
    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def propose(self, *arguments: Any) -> Any:
        self._gate.hold_here()
        return super().propose(*arguments)


PLACES = ("pass", "prefill", "draft", "logits_processor")


def held_engine(gate: Gate, place: str) -> tuple[LocalEngine, Request]:
    def processor(prefix: list[int], logits: Tensor) -> Tensor:
        if place == "logits_processor":
            gate.hold_here()
        return logits

    drafter = HeldDrafter(gate) if place == "draft" else None
    engine = LocalEngine(SpeculativeDecoder(HeldModel(gate, place), drafter))
    return engine, Request([0, 1], SamplingParams(max_tokens=3, logits_processor=(processor,)), timeout_s=TIMEOUT)


def generate(engine: LocalEngine, request: Request) -> Any:
    return engine.generate([request])


def stream(engine: LocalEngine, request: Request) -> Any:
    return list(engine.stream(request))


def astream(engine: LocalEngine, request: Request) -> Any:
    async def gather() -> Any:
        return [delta async for delta in engine.astream(request)]

    return asyncio.run(gather())


@pytest.mark.parametrize("ask", [generate, stream, astream])
@pytest.mark.parametrize("place", PLACES)
def test_a_worker_that_is_stuck_is_named_with_its_place(gate: Gate, place: str, ask: Any) -> None:
    engine, request = held_engine(gate, place)
    with pytest.raises(EngineStuckError, match=r"timeout of 0.05 s(.|\n)*hold_here") as told:
        ask(engine, request)
    assert ("reading prompts" if place == "prefill" else "in a round of 1 sequences") in str(told.value)
    assert isinstance(told.value, RequestTimeoutError)
    assert engine.metrics().requests["timeout"] == 1
    gate.opened.set()
    assert ask(engine, Request([0, 1], SamplingParams(max_tokens=3)))  # it goes on
    assert engine.metrics().requests["timeout"] == 1
    engine.close()


def test_a_request_of_several_that_is_overdue_is_found_whichever_is_waited_for(gate: Gate) -> None:
    engine, request = held_engine(gate, "pass")
    with pytest.raises(EngineStuckError, match=r"timeout of 0\.05 s"):
        engine.generate([Request([0]), request])
    gate.opened.set()
    engine.close()


@pytest.mark.parametrize("moved", [False, True])
def test_a_worker_that_is_only_slow_is_not_called_stuck(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(SpeculativeDecoder(TableModel()), 1)
    scheduler.status.thread = threading.current_thread()
    state = RequestState([Sequence([0])], lambda item: None, Meter(), timeout_s=1.0, spent_s=2.0)
    if moved:  # since the deadline, a second ago
        scheduler.status.enter("in a round of 1 sequences")
    else:
        state.deadline = scheduler.status.since
        monkeypatch.setattr(waiting_module, "GRACE_S", 0.0)
    with pytest.raises(RequestTimeoutError) as told:
        waiting_module.Watch(scheduler, [state]).check(state)
    assert type(told.value) is (RequestTimeoutError if moved else EngineStuckError)
    assert state.is_over


def test_without_a_timeout_a_caller_waits_as_long_as_there_is_a_worker(gate: Gate) -> None:
    engine, _ = held_engine(gate, "pass")
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(engine.generate([Request([0], SamplingParams(max_tokens=2))]))
    )
    thread.start()
    gate.entered.wait(30)
    thread.join(0.3)  # several heartbeats
    assert thread.is_alive()
    gate.opened.set()
    thread.join(30)
    assert found
    engine.close()


@pytest.mark.parametrize("ask", [generate, stream, astream])
def test_a_worker_that_is_gone_is_noticed(gate: Gate, ask: Any) -> None:
    engine, _ = held_engine(gate, "pass")
    other = threading.Thread(target=lambda: None)
    other.start()
    other.join()

    def lose_worker() -> None:
        gate.entered.wait(30)
        engine._scheduler.status.thread = other

    threading.Thread(target=lose_worker).start()
    with pytest.raises(EngineClosedError, match="worker is gone"):
        ask(engine, Request([0]))
    gate.opened.set()


@pytest.mark.parametrize("ask", [generate, stream, astream])
def test_a_grammar_that_compiles_forever_is_bounded(gate: Gate, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(*arguments: Any) -> Any:
        gate.hold_here()

    monkeypatch.setattr(agentspec.engine.admission, "begin", compiles)
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(KNOWN), 2, [])), KNOWN)
    request = Request([0, 1], SamplingParams(max_tokens=3), Grammar.regex("a+"), timeout_s=TIMEOUT)
    with pytest.raises(EngineStuckError, match=r"still being compiled(.|\n)*hold_here"):
        ask(engine, request)
    engine.close()


def test_closing_a_stuck_engine_ends_its_callers_and_returns(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_module, "CLOSE_S", 0.05)
    engine, _ = held_engine(gate, "pass")
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            engine.generate([Request([0])])
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    gate.entered.wait(30)
    with caplog.at_level(logging.WARNING, "agentspec"):
        engine.close()
    assert "hold_here" in caplog.text
    thread.join(30)
    assert not thread.is_alive()
    assert "stuck" in str(errors[0])


def test_an_item_that_cannot_be_handed_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(waiting_module.Mailbox):
        def __init__(self) -> None:
            super().__init__()
            self.put = self.refuse

        def refuse(self, item: Any) -> None:
            raise MemoryError("no room for an answer")

    monkeypatch.setattr("agentspec.engine.local.Mailbox", Full)
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    with pytest.raises(MemoryError, match="no room"):
        engine.generate([Request([0], SamplingParams(max_tokens=2))])
    engine.close()


def test_an_interrupted_caller_cancels_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    plain = waiting_module.Mailbox.get

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting_module.Mailbox, "get", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request([0], SamplingParams(max_tokens=10**6))])
    monkeypatch.setattr(waiting_module.Mailbox, "get", plain)
    assert engine.generate([Request([0], SamplingParams(max_tokens=2))])
    for _ in range(1000):
        if engine.metrics().requests["cancelled"]:
            break
        time.sleep(0.01)
    assert engine.metrics().requests["cancelled"] == 1
    engine.close()


async def test_a_cancelled_task_is_cancelled_however_fast_its_deltas_come() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()), max_running=2)

    async def read() -> None:
        async for _ in engine.astream(Request([0], SamplingParams(max_tokens=10**6))):
            pass

    for _ in range(20):
        task = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
    engine.close()
