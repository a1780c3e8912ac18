"""Agents of LangChain and LangGraph, by a model that answers right: what the protocol asks for, and gets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
from answering import Rule, answering, call
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from agentspec import InvalidRequestError
from langchain_agentspec import ChatAgentSpec, track_latency

Made = Callable[..., ChatAgentSpec]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def get_time(zone: Literal["UTC", "CET"]) -> str:
    """The time of day in a zone."""
    return f"noon in {zone}"


class Report(BaseModel):
    """A report."""

    city: str
    good: bool


class Apology(BaseModel):
    """An apology."""

    reason: str


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes a chat model that answers by rules."""
    engines = []

    def make(rules: Sequence[Rule], **settings: Any) -> ChatAgentSpec:
        engine, _ = answering([*rules, (r"", "Nothing to say.")])
        engines.append(engine)
        return ChatAgentSpec(engine=engine, max_tokens=200, **settings)

    yield make
    for engine in engines:
        engine.close()


WEATHER: list[Rule] = [
    (r"sunny in Paris", "It is sunny."),
    (r"Paris", call("get_weather", '{"city": "Paris"}')),
]
QUESTION = {"messages": [("user", "How is Paris?")]}


def kinds(messages: Sequence[Any]) -> list[str]:
    return [message.type for message in messages]


def test_an_agent_calls_a_tool_and_answers(made: Made) -> None:
    agent: Any = create_agent(made(WEATHER), tools=[get_weather, get_time])
    messages = agent.invoke(QUESTION)["messages"]
    assert kinds(messages) == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"] == {"city": "Paris"}
    assert messages[-1].text == "It is sunny."
    assert [m.response_metadata["finish_reason"] for m in messages if m.type == "ai"] == ["tool_calls", "stop"]


async def test_async_and_streamed_runs_say_the_same(made: Made) -> None:
    agent: Any = create_agent(made(WEATHER), tools=[get_weather])
    expected = agent.invoke(QUESTION)["messages"]
    found = (await agent.ainvoke(QUESTION))["messages"]
    assert [m.content for m in found] == [m.content for m in expected]
    for streamed in (
        list(agent.stream(QUESTION, stream_mode="messages")),
        [piece async for piece in agent.astream(QUESTION, stream_mode="messages")],
    ):
        chunks = [chunk for chunk, _ in streamed if isinstance(chunk, AIMessageChunk)]
        assert "".join(chunk.text for chunk in chunks) == expected[-1].text
        assert len([chunk for chunk in chunks if chunk.text]) > 1
        calls = [c for chunk in chunks for c in chunk.tool_call_chunks]
        assert [(c["name"], json.loads(c["args"] or "")) for c in calls] == [("get_weather", {"city": "Paris"})]
        assert any(isinstance(message, ToolMessage) for message, _ in streamed)


async def test_the_event_stream_tells_of_models_and_tools(made: Made) -> None:
    agent: Any = create_agent(made(WEATHER), tools=[get_weather])
    events = [event["event"] async for event in agent.astream_events(QUESTION, version="v2")]
    assert events.count("on_chat_model_start") == events.count("on_chat_model_end") == 2
    assert events.count("on_tool_end") == 1
    assert "on_chat_model_stream" in events


def test_what_is_no_tool_and_what_is_said_twice_is_refused(made: Made) -> None:
    model = made([])
    unserialisable = {"type": "function", "function": {"name": "f", "parameters": {"default": object()}}}
    for thing in (object(), 3, unserialisable):
        with pytest.raises(InvalidRequestError, match="A tool is"):
            model.bind_tools([thing])
    with pytest.raises(InvalidRequestError, match="makes its own response_format"):
        model.with_structured_output(Report, response_format={"type": "json_object"})


@pytest.mark.parametrize("tools", [[], [get_weather]], ids=["no tools", "tools"])
def test_a_schema_is_provided_by_the_model_itself(made: Made, tools: list[Any]) -> None:
    report = '{"city": "Paris", "good": true}'
    model = made([(r"sunny in Paris", report), *([(r"Paris", report)] if not tools else WEATHER[1:])])
    agent: Any = create_agent(model, tools=tools, response_format=Report)
    state = agent.invoke(QUESTION)
    assert state["structured_response"] == Report(city="Paris", good=True)
    # Not by a tool that stands for the schema: the model's profile says that it can.
    assert kinds(state["messages"]) == (["human", "ai", "tool", "ai"] if tools else ["human", "ai"])
    assert state["messages"][-1].text == report


def test_a_schema_can_be_a_tool_and_one_of_several(made: Made) -> None:
    model = made([(r"Paris", call("Apology", '{"reason": "no data"}'))])
    agent: Any = create_agent(model, tools=[get_time], response_format=ToolStrategy(Report | Apology))
    assert agent.invoke(QUESTION)["structured_response"] == Apology(reason="no data")


def test_tools_are_called_in_parallel_where_that_is_wanted(made: Made) -> None:
    both = call("get_weather", '{"city": "Paris"}') + "\n" + call("get_time", '{"zone": "UTC"}')
    rules: list[Rule] = [(r"sunny.*noon", "Sunny at noon."), (r"sunny", "Just sunny."), (r"Paris", both)]
    for parallel, count in ((True, 2), (False, 1)):
        agent: Any = create_agent(made(rules, parallel_tool_calls=parallel), tools=[get_weather, get_time])
        with track_latency() as run:
            messages = agent.invoke({"messages": [("user", "Paris?")]})["messages"]
        assert len(messages[1].tool_calls) == count
        assert len({tool_call["id"] for tool_call in messages[1].tool_calls}) == count
        assert kinds(messages).count("tool") == count
        assert len(run.iterations[0].tools) == count


def test_middleware_may_change_tools_and_the_choice(made: Made) -> None:
    seen: list[Any] = []

    @wrap_model_call
    def only_the_time(request: ModelRequest, handler: Any) -> Any:
        called = any(message.type == "tool" for message in request.messages)
        seen.append(request.tool_choice)
        return handler(request.override(tools=[get_time], tool_choice="none" if called else "get_time"))

    model = made([(r"noon", "It is noon."), (r"Paris", call("get_weather", '{"city": "Paris"}'))], max_retries=2)
    agent: Any = create_agent(model, tools=[get_weather, get_time], middleware=[only_the_time])
    messages = agent.invoke(QUESTION)["messages"]
    assert messages[1].tool_calls[0]["name"] == "get_time"
    assert messages[-1].text
    assert len(seen) == 2


def test_a_run_goes_on_from_its_checkpoint(made: Made) -> None:
    agent: Any = create_agent(
        made(WEATHER), tools=[get_weather], checkpointer=InMemorySaver(), interrupt_before=["tools"]
    )
    config = {"configurable": {"thread_id": "1"}}
    paused = agent.invoke(QUESTION, config)["messages"]
    assert kinds(paused) == ["human", "ai"]
    done = agent.invoke(None, config)["messages"]
    assert kinds(done) == ["human", "ai", "tool", "ai"]
    more = agent.invoke({"messages": [("user", "And now?")]}, config)["messages"]
    assert more[: len(done)] == done
    assert more[-1].text == "Nothing to say."


def test_messages_survive_their_serialised_form(made: Made) -> None:
    from langchain_core.messages import message_to_dict, messages_from_dict

    answer = made(WEATHER).bind_tools([get_weather]).invoke("How is Paris?")
    [again] = messages_from_dict([json.loads(json.dumps(message_to_dict(answer)))])
    assert again == answer


# Many at once


async def test_many_calls_share_rounds_and_block_no_loop() -> None:
    engine, model = answering([(r"", "One, two, three, four, five, six, seven.")], max_running=64)
    chat = ChatAgentSpec(engine=engine, gamma=0)
    play, scheduler = model.next_logits, engine._scheduler

    def when_all_are_there(contexts: Any, last: Any) -> Any:
        """The first round waits for everyone, so that no machine is too fast for them to meet."""
        for _ in range(2000):
            if model.rows or len(scheduler._waiting) + len(scheduler._running) == 50:
                break
            time.sleep(0.01)
        return play(contexts, last)

    model.next_logits = when_all_are_there  # type: ignore[method-assign]
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0.001)

    heart = asyncio.create_task(beat())
    answers = await asyncio.gather(*(chat.ainvoke([HumanMessage(f"Number {i}?")]) for i in range(50)))
    heart.cancel()
    assert {answer.content for answer in answers} == {"One, two, three, four, five, six, seven."}
    alone = len(answers[0].response_metadata) and answers[0].usage_metadata["output_tokens"]
    assert len(model.rows) < 50 * alone / 5  # rounds were shared
    assert max(model.rows) > 10
    assert beats > 10
    engine.close()


ENDLESS = "One, two, three, four, five, six, seven. " * 400


@pytest.mark.parametrize("way", ["cancel", "close", "timeout"])
async def test_who_leaves_frees_their_place_at_the_next_round(way: str) -> None:
    engine, model = answering([(r"", ENDLESS)], max_running=1)
    chat = ChatAgentSpec(engine=engine, gamma=0, max_tokens=100_000)
    if way == "cancel":
        task = asyncio.create_task(chat.ainvoke("Hi"))
        while not model.rows:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif way == "close":
        stream = chat.astream("Hi")
        await anext(stream)
        await stream.aclose()
    else:
        with pytest.raises(TimeoutError):
            await chat.ainvoke("Hi", timeout=0.05)
    before = len(model.rows)
    short = await chat.ainvoke("Hello", max_tokens=5)
    assert short.usage_metadata["output_tokens"] == 5
    assert len(model.rows) - before <= 5 + 2  # nobody else was served any more, but for a round on its way
    engine.close()


def test_a_timeout_is_an_error_of_langchains_core(made: Made) -> None:
    from langchain_core.exceptions import ModelTimeoutError

    model = made([(r"", ENDLESS)], timeout=0.05)
    with pytest.raises(ModelTimeoutError, match=r"timeout of 0.05 s; \d+ tokens"):
        model.invoke("Hi", max_tokens=100_000)
    with pytest.raises(ModelTimeoutError):
        list(model.stream("Hi", max_tokens=100_000))
    assert model.invoke("Hi", max_tokens=3, timeout=60).usage_metadata is not None


async def test_the_third_event_protocol_runs_through_an_agent(made: Made) -> None:
    agent: Any = create_agent(made(WEATHER), tools=[get_weather])
    with pytest.warns(match="v3 streaming protocol"):
        stream = await agent.astream_events(QUESTION, version="v3")
    events = [event async for event in stream]
    assert len(events) > 10
    assert any("It is sunny" in str(event) or "sunny" in str(event) for event in events)
