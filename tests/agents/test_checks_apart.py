"""The check of a finished text leaves the event loop free; without a check there is no thread for one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from answering import answering, call
from scripted import END, ScriptedModel, tokenizer

from agentspec import FinishReason, Grammar, LocalEngine, Request, SamplingParams, SpeculativeDecoder
from agentspec.engine import validation
from agentspec.engine.request import Delta
from agentspec.grammars.schema_tools import validator
from langchain_agentspec import ChatAgentSpec

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "string", "pattern": "^(?!b)[ab]+$"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.fixture
def searchers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that search for a pattern."""
    found: list[threading.Thread] = []
    plain = validator.matches
    monkeypatch.setattr(
        validator, "matches", lambda *given: (found.append(threading.current_thread()), plain(*given))[1]
    )
    return found


async def test_a_task_checks_its_texts_in_another_thread(searchers: list[threading.Thread]) -> None:
    known = tokenizer()
    script = known.encode('{"x": "ba"}' + END, add_special_tokens=False)
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 2, script)), known)
    params = SamplingParams(temperature=0, max_tokens=60)
    request = Request([1, 2], params, Grammar.json_schema(SCHEMA), validate=True)
    deltas = [delta async for delta in engine.astream(request)]
    assert "does not match" in str(deltas[-1].invalid)
    assert searchers
    assert threading.current_thread() not in searchers
    assert list(engine.stream(request))[-1].invalid == deltas[-1].invalid
    engine.close()


async def test_a_task_compiles_its_schema_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[threading.Thread] = []
    compiled = validation.validator
    monkeypatch.setattr(
        validation, "validator", lambda source: (found.append(threading.current_thread()), compiled(source))[1]
    )
    known = tokenizer()
    script = known.encode('{"x": "aa"}' + END, add_special_tokens=False)
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 2, script)), known)
    request = Request([1, 2], SamplingParams(temperature=0, max_tokens=60), Grammar.json_schema(SCHEMA), validate=True)
    deltas = [delta async for delta in engine.astream(request)]
    assert deltas[-1].invalid is None
    assert found
    assert threading.current_thread() not in found
    engine.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_task_checks_its_calls_in_another_thread(searchers: list[threading.Thread], streams: bool) -> None:
    engine, _ = answering([(r"", call("probe", '{"x": "ba"}'))])
    tool = {"type": "function", "function": {"name": "probe", "description": "probe", "parameters": SCHEMA}}
    chat = ChatAgentSpec(engine=engine, max_tokens=120).bind_tools([tool])
    message: Any = None
    if streams:
        async for chunk in chat.astream("Go on."):
            message = chunk if message is None else message + chunk
    else:
        message = await chat.ainvoke("Go on.")
    assert message.invalid_tool_calls
    assert searchers
    assert threading.current_thread() not in searchers
    engine.close()


@pytest.mark.parametrize("validate", [False, True])
async def test_what_is_not_checked_needs_no_thread(validate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("a thread for nothing")

    monkeypatch.setattr(asyncio, "to_thread", refuse)
    check = validation.Check(Request([1], grammar=Grammar.json_schema(SCHEMA), validate=validate))
    reason = None if validate else FinishReason.STOP  # a text that goes on; a finished one without a check
    delta = Delta(0, (1,), "a", finish_reason=reason)
    assert await check.in_thread(delta) == delta
