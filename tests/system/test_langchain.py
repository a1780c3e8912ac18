"""``ChatAgentSpec`` as LangChain uses it: every way to ask gives the same valid answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError as CoreContextOverflowError
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, ValidationError
from typing_extensions import TypedDict

from agentspec import (
    Cascade,
    CausalLM,
    InvalidRequestError,
    LocalEngine,
    ModelLoadError,
    PromptLookupDrafter,
    SpeculativeDecoder,
)
from agentspec.report.fold import union_seconds
from langchain_agentspec import ChatAgentSpec, LatencyHandler, track_latency

pytestmark = pytest.mark.embedded


@tool
def get_weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


@tool
def get_time(zone: Literal["UTC", "CET"]) -> str:
    """The time of day in a zone."""
    return "noon"


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    role: Literal["cook", "baker"]


class PersonDict(TypedDict):
    """A person."""

    name: str
    age: int


@pytest.fixture(scope="module")
def engine(embedded_model: tuple[CausalLM, Any]) -> Iterator[LocalEngine]:
    target, tokenizer = embedded_model
    engine = LocalEngine(SpeculativeDecoder(target, Cascade([PromptLookupDrafter()])), tokenizer)
    yield engine
    engine.close()


@pytest.fixture
def model(engine: LocalEngine) -> ChatAgentSpec:
    return ChatAgentSpec(engine=engine, max_tokens=48)


VOLATILE = ("cached_tokens", "ended_at", "verify_costs")


def steps(message: Any) -> dict[str, Any]:
    """What does not depend on the clock or on what is cached."""
    told: dict[str, Any] = message.response_metadata["agentspec"]
    return {name: value for name, value in told.items() if not name.endswith("_s") and name not in VOLATILE}


async def test_every_way_to_ask_gives_the_same_message(model: ChatAgentSpec) -> None:
    question = "Name three colours."
    invoked = model.invoke(question)
    assert isinstance(invoked, AIMessage)
    whole: Any = None
    pieces = 0
    for chunk in model.stream(question):
        whole, pieces = chunk if whole is None else whole + chunk, pieces + 1
    assert pieces > 3
    awaited = await model.ainvoke(question)
    streamed = [chunk async for chunk in model.astream(question)]
    for other in (whole, awaited, sum(streamed[1:], streamed[0])):
        assert other.content == invoked.content
        assert other.usage_metadata["output_tokens"] == invoked.usage_metadata["output_tokens"]
        assert other.response_metadata["finish_reason"] == invoked.response_metadata["finish_reason"]
        assert other.response_metadata["model_name"] == "embedded"
        assert steps(other) == steps(invoked)
    assert isinstance(streamed[-1], AIMessageChunk)
    assert streamed[-1].chunk_position == "last"


def test_a_second_call_reads_the_prompt_from_the_cache(model: ChatAgentSpec) -> None:
    model.invoke("How many legs has a spider?")
    usage = model.invoke("How many legs has a spider?").usage_metadata
    assert usage is not None
    assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("choice", ["any", "required", True, "get_time", {"function": {"name": "get_time"}}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_demanded_call_is_made_and_valid(model: ChatAgentSpec, choice: Any, temperature: float) -> None:
    answer = model.bind_tools([get_weather, get_time], tool_choice=choice).invoke(
        "Hello!", temperature=temperature, seed=1
    )
    if answer.response_metadata["finish_reason"] == "length":
        assert answer.invalid_tool_calls
        return
    [call] = answer.tool_calls
    assert call["name"] == "get_time" if isinstance(choice, str | dict) and "get_time" in str(choice) else True
    schema = {"get_weather": get_weather, "get_time": get_time}[call["name"]].get_input_jsonschema()
    jsonschema.validate(call["args"], schema)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.content == ""
    assert call["id"]


def test_parallel_calls_are_all_valid(model: ChatAgentSpec) -> None:
    bound = model.bind_tools([get_weather, get_time], tool_choice="any", parallel_tool_calls=True)
    counts = set()
    for seed in range(4):
        answer = bound.invoke("Weather and time in Paris?", temperature=1.0, seed=seed, max_tokens=120)
        counts.add(len(answer.tool_calls))
        for call in answer.tool_calls:
            schema = {"get_weather": get_weather, "get_time": get_time}[call["name"]].get_input_jsonschema()
            jsonschema.validate(call["args"], schema)
        assert len({call["id"] for call in answer.tool_calls}) == len(answer.tool_calls)
    assert max(counts) > 1


@pytest.mark.parametrize("choice", ["none", False])
def test_no_call_is_made_where_calls_are_forbidden(model: ChatAgentSpec, choice: Any) -> None:
    answer = model.bind_tools([get_time], tool_choice=choice).invoke("What time is it in UTC?")
    assert not answer.tool_calls
    assert answer.content


def test_streamed_calls_carry_index_id_name_and_args(model: ChatAgentSpec) -> None:
    bound = model.bind_tools([get_time], tool_choice="any")
    chunks = [c for chunk in bound.stream("What time is it?") for c in chunk.tool_call_chunks]
    assert chunks[0]["index"] == 0
    assert chunks[0]["id"]
    assert chunks[0]["name"] == "get_time"
    assert json.loads("".join(c["args"] or "" for c in chunks))["zone"] in ("UTC", "CET")


def test_a_call_cut_short_is_an_invalid_call(model: ChatAgentSpec) -> None:
    bound = model.bind_tools([get_weather], tool_choice="any")
    for answer in (bound.invoke("Weather?", max_tokens=12), list(bound.stream("Weather?", max_tokens=12))[-1]):
        assert answer.response_metadata["finish_reason"] == "length"
        assert not answer.tool_calls
        [call] = answer.invalid_tool_calls
        assert call["args"].startswith("cut short: <tool_call>")


def test_a_history_of_all_kinds_of_messages_is_understood(model: ChatAgentSpec) -> None:
    call = {"name": "get_time", "args": {"zone": "UTC"}, "id": "1"}
    history = [
        SystemMessage("Be brief."),
        SystemMessage("Be kind."),
        HumanMessage([{"type": "text", "text": "What time"}, "is it?"]),
        HumanMessage("In UTC."),
        AIMessage("", tool_calls=[call]),
        ToolMessage("noon", tool_call_id="1"),
    ]
    assert model.bind_tools([get_time]).invoke(history).usage_metadata is not None


def test_content_that_is_not_text_is_refused(model: ChatAgentSpec) -> None:
    with pytest.raises(InvalidRequestError, match="image_url"):
        model.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_instance(model: ChatAgentSpec, method: Any) -> None:
    found = model.with_structured_output(Person, method=method).invoke("Ann, 31, is a cook.")
    assert isinstance(found, Person)
    both = model.with_structured_output(Person, method=method, include_raw=True).invoke("Ann, 31, is a cook.")
    assert both["parsed"] == found
    assert both["parsing_error"] is None
    assert isinstance(both["raw"], AIMessage)


def test_structured_output_by_typed_dict_and_by_schema(model: ChatAgentSpec) -> None:
    assert set(model.with_structured_output(PersonDict).invoke("Ann is 31.")) == {"name", "age"}
    schema = {"title": "Age", "type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert isinstance(model.with_structured_output(schema).invoke("Ann is 31.")["age"], int)
    mode = model.with_structured_output(schema, method="json_mode", include_raw=True)
    assert mode.invoke("Ann is 31.")["raw"].content.startswith("{")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("schema", [Person, PersonDict])
def test_structured_output_cut_short_is_a_parsing_error(engine: LocalEngine, schema: Any, method: Any) -> None:
    short = ChatAgentSpec(engine=engine, max_tokens=6)
    made = short.with_structured_output(schema, method=method, include_raw=True).invoke("Ann, 31, cook.")
    assert made["parsed"] is None
    assert isinstance(made["parsing_error"], OutputParserException)
    with pytest.raises(OutputParserException, match="cut short"):
        short.with_structured_output(schema, method=method).invoke("Ann, 31, cook.")


def test_a_schema_needs_no_title_and_invents_no_properties(model: ChatAgentSpec) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    for method in ("json_schema", "function_calling"):
        assert set(model.with_structured_output(schema, method=method).invoke("Ann is 31.")) == {"age"}


async def test_a_prompt_beyond_the_context_is_an_error_of_langchains_core(model: ChatAgentSpec) -> None:
    long = "word " * 9000
    with pytest.raises(CoreContextOverflowError, match="8192"):
        model.invoke(long)
    with pytest.raises(CoreContextOverflowError):
        await model.ainvoke(long)
    with pytest.raises(CoreContextOverflowError):
        list(model.stream(long))


async def test_n_samples_differ_and_stop_strings_stop(model: ChatAgentSpec) -> None:
    result = await model.agenerate([[HumanMessage("Tell me a story.")]], n=3, temperature=1.0, seed=4)
    texts = [generation.text for generation in result.generations[0]]
    assert len(set(texts)) == 3
    stopped = model.invoke("Count: one, two, three, four.", stop=[",", "."])
    assert "," not in stopped.content
    assert stopped.response_metadata["finish_reason"] == "stop"


def test_logprobs_are_reported_per_token(model: ChatAgentSpec) -> None:
    answer = model.invoke("Hi", temperature=1.0, seed=1, logprobs=2, max_tokens=5)
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == answer.usage_metadata["output_tokens"]  # type: ignore[index]
    assert all(entry["logprob"] < 0 and len(entry["top_logprobs"]) == 2 for entry in content)
    greedy = model.invoke("Hi", logprobs=0, max_tokens=5).response_metadata["logprobs"]["content"]
    assert all(-20 < entry["logprob"] < 0 for entry in greedy)
    assert isinstance(greedy[0]["token"], str)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"gamma": -1}, "gamma"),
    ({"n": 0}, "n is the number"),
    ({"top_p": 0}, "top_p"),
    ({"acceptance": "hopeful"}, "acceptance"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_wrong_settings_are_found_when_constructed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidRequestError, ValidationError), match=message):
        ChatAgentSpec(**settings)


def test_wrong_calls_say_what_was_expected(model: ChatAgentSpec) -> None:
    with pytest.raises(InvalidRequestError, match="get_time"):
        model.bind_tools([get_time], tool_choice="get_tine")
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        model.bind_tools([], tool_choice="any")
    with pytest.raises(InvalidRequestError, match="frequency"):
        model.invoke("Hi", frequency=3)
    with pytest.raises(InvalidRequestError, match="Only one sample"):
        list(model.stream("Hi", n=2))
    with pytest.raises(InvalidRequestError, match="method"):
        model.with_structured_output(Person, method="telepathy")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="response_format"):
        model.invoke("Hi", response_format={"type": "xml"})
    with pytest.raises(InvalidRequestError, match="empty"):
        model.invoke([])


def test_constructing_loads_nothing() -> None:
    models = [ChatAgentSpec(model=f"/nowhere/{i}") for i in range(10)]  # loading any of these would raise
    with pytest.raises(ModelLoadError, match="nowhere"):
        models[0].invoke("Hi")


def test_two_models_with_other_settings_have_other_identities() -> None:
    assert ChatAgentSpec()._get_llm_string() != ChatAgentSpec(seed=1)._get_llm_string()
    assert ChatAgentSpec()._get_llm_string() != ChatAgentSpec(draft="x")._get_llm_string()


class Course(ChatAgentSpec):
    """Demands a call until there is a result: a model of this size does not choose by itself."""

    def _generate(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        called = any(isinstance(message, ToolMessage) for message in messages)
        return super()._generate(messages, *args, **{**kwargs, "tool_choice": "none" if called else "any"})


def test_an_agent_runs_and_every_second_has_a_name(engine: LocalEngine) -> None:
    agent: Any = create_agent(Course(engine=engine, max_tokens=64), tools=[get_time])
    with track_latency("outer") as outer, track_latency("inner") as run:
        messages = agent.invoke({"messages": [("user", "What time is it in UTC?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    told = run.to_dict()
    assert [len(iteration["tools"]) for iteration in told["iterations"]] == [1, 0]
    assert told["model_s"] + told["tool_s"] + told["framework_s"] == pytest.approx(told["total_s"])
    parts = [iteration[part] for iteration in told["iterations"] for part in ("model_s", "tool_s", "framework_s")]
    assert sum(parts) == pytest.approx(told["total_s"])
    assert min(parts) >= 0
    assert all(iteration["models"][0]["step"]["new_tokens"] for iteration in told["iterations"])
    assert len(outer.model_calls) == 2
    assert json.loads(json.dumps(told)) == told
    run.print()


def test_a_handler_attached_twice_counts_once(model: ChatAgentSpec) -> None:
    handler = LatencyHandler()
    model.invoke("Hi", config={"callbacks": [handler, handler]}, max_tokens=2)
    assert len(handler.run.model_calls) == 1
    assert handler.run.total_s >= handler.run.model_s > 0


def test_overlapping_model_calls_are_counted_once(model: ChatAgentSpec) -> None:
    with track_latency() as run:
        model.batch(["One?", "Two?", "Three?"], max_tokens=8)
    told = run.to_dict()
    parts = [iteration[part] for iteration in told["iterations"] for part in ("model_s", "tool_s", "framework_s")]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(told["total_s"])


def test_a_failing_model_is_in_the_account(model: ChatAgentSpec) -> None:
    with track_latency() as run, pytest.raises(InvalidRequestError):
        model.invoke("Hi", temperature=-1)
    assert "temperature" in (run.model_calls[0].error or "")
    assert run.model_calls[0].step is None


def test_parallel_calls_overlap() -> None:
    assert union_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == 4.0
