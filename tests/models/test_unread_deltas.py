"""What the worker sent before an end is read before the end, also by tasks whose event loop was blocked."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, cast

import pytest
from enumeration import TableModel
from torch import Tensor

from agentspec import EngineClosedError, LocalEngine, Request, RequestTimeoutError, SamplingParams, SpeculativeDecoder
from agentspec.engine.request import Delta
from agentspec.engine.state import RequestState
from agentspec.engine.waiting import AsyncMailbox, Mailbox, Watch

TOKENS = 12


def block_until(engine: LocalEngine, outcome: str) -> None:
    """Hold the event loop until the worker is done, and end the worker."""
    while not engine.metrics().requests[outcome]:
        time.sleep(0.001)
    engine.close()


async def test_an_engine_that_is_closed_while_its_loop_is_blocked_loses_no_delta() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    request = Request([0, 1], SamplingParams(max_tokens=TOKENS, seed=5))
    [[expected]] = LocalEngine(SpeculativeDecoder(TableModel())).generate([request])
    async with aclosing(engine.astream(request)) as deltas:
        found = [await anext(deltas)]
        block_until(engine, "completed")
        found += [delta async for delta in deltas]
    assert tuple(token for delta in found for token in delta.tokens) == expected.tokens
    assert len(expected.tokens) == TOKENS


async def test_tokens_before_an_error_come_before_it() -> None:
    def processor(prefix: list[int], logits: Tensor) -> Tensor:
        if len(prefix) == 2 + 4:
            raise ArithmeticError("the fifth")
        return logits

    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    request = Request([0, 1], SamplingParams(max_tokens=TOKENS, logits_processor=(processor,)))
    async with aclosing(engine.astream(request)) as deltas:
        found = [await anext(deltas)]
        block_until(engine, "failed")
        found += [await anext(deltas) for _ in range(3)]
        with pytest.raises(ArithmeticError, match="the fifth"):
            await anext(deltas)
    assert [len(delta.tokens) for delta in found] == [1] * 4


class Ending:
    """Finds an end once, just as the last deltas are put; a request that was given up is no longer looked at."""

    def __init__(self, box: Any, error: Exception) -> None:
        self._box, self._error = box, error
        self.checks = 0

    def patience_s(self) -> float:
        return 60.0

    def check(self, request: RequestState) -> None:
        self.checks += 1
        assert self.checks == 1, "the end was forgotten"
        self._box.put(Delta(0, (1,)))
        self._box.put(Delta(0, (2,)))
        raise self._error


ERRORS = [EngineClosedError("closed"), RequestTimeoutError("late"), ArithmeticError("failed")]
NO_REQUEST = cast(RequestState, None)


@pytest.mark.parametrize("error", ERRORS, ids=str)
async def test_a_task_reads_what_came_and_then_the_end(error: Exception) -> None:
    box = AsyncMailbox()
    watch = cast(Watch, Ending(box, error))
    assert [(await box.get(NO_REQUEST, watch)).tokens for _ in range(2)] == [(1,), (2,)]
    with pytest.raises(type(error)):
        await box.get(NO_REQUEST, watch)


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_a_thread_reads_what_came_and_then_the_end(error: Exception) -> None:
    box = Mailbox()
    watch = cast(Watch, Ending(box, error))
    assert [box.get(NO_REQUEST, watch).tokens for _ in range(2)] == [(1,), (2,)]
    with pytest.raises(type(error)):
        box.get(NO_REQUEST, watch)
