"""Agents whose models write calls in other spellings than their template's, or in harmony."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.tools import tool
from turns import TurnsModel, speaking

from agentspec.chat import ChatFormat
from langchain_agentspec import ChatAgentSpec

Made = Callable[..., tuple[ChatAgentSpec, TurnsModel]]


@tool
def get_price(ticker: str, days: int = 1) -> str:
    """The price of a share."""
    return f"{ticker} costs {days}"


@tool
def now() -> str:
    """The time."""
    return "noon"


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes a chat model that says these scripts, turn by turn."""
    engines = []

    def make(template: str, scripts: Sequence[str], ends: Sequence[str] = (), **settings: Any) -> Any:
        engine, model = speaking(template, scripts, ends)
        engines.append(engine)
        return ChatAgentSpec(engine=engine, max_tokens=settings.pop("max_tokens", 200), **settings), model

    yield make
    for engine in engines:
        engine.close()


QUESTION = {"messages": [("user", "What is the price?")]}
PRICE = {"name": "get_price", "arguments": {"ticker": "ACME", "days": 3}}
LLAMA = {"name": "get_price", "parameters": {"ticker": "ACME", "days": 3}}
SPELLINGS = {
    "ours": json.dumps,
    "compact": lambda call: json.dumps(call, separators=(",", ":")),
    "indented": lambda call: json.dumps(call, indent=2),
    "fence": lambda call: f"```json\n{json.dumps(call, indent=2)}\n```",
    "plain fence": lambda call: f"```\n{json.dumps(call)}\n```",
    "tools": lambda call: f"<tools>\n{json.dumps(call)}\n</tools>",
    "list": lambda call: json.dumps([call]),
    "blank lines": lambda call: f"\n\n{json.dumps(call)}",
}
TEMPLATES = [("qwen", None), ("qwen3", None), ("qwen", "plain"), ("llama3", None)]


def script_of(template: str, spelling: str) -> str:
    return SPELLINGS[spelling](LLAMA if template == "llama3" else PRICE)


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("template", "dialect"), TEMPLATES)
def test_a_call_in_another_spelling_runs_the_tool(
    made: Made, template: str, dialect: str | None, spelling: str, gamma: int
) -> None:
    script = script_of(template, spelling)
    model, turns = made(template, [script, "It costs 3."], dialect=dialect, gamma=gamma)
    agent: Any = create_agent(model, tools=[get_price, now])
    messages = agent.invoke(QUESTION)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    _, called, result, answer = messages
    assert (called.content, called.response_metadata["finish_reason"]) == ("", "tool_calls")
    assert [(c["name"], c["args"]) for c in called.tool_calls] == [("get_price", {"ticker": "ACME", "days": 3})]
    assert (result.content, answer.content) == ("ACME costs 3", "It costs 3.")
    # The next prompt has the call as the dialect writes it, in the ids that the template's text is cut into.
    known = model.engine.tokenizer  # type: ignore[union-attr]
    chat = ChatFormat(known, dialect)
    prompt = known.decode(max(turns.contexts, key=len))
    assert chat.form.call("get_price", {"ticker": "ACME", "days": 3}) in prompt
    assert (script in prompt) == (spelling == "ours" or (template, spelling) == ("llama3", "blank lines"))


@pytest.mark.parametrize(("template", "dialect"), TEMPLATES)
def test_the_ids_of_a_call_in_another_spelling_are_not_said_again(
    made: Made, template: str, dialect: str | None
) -> None:
    script = script_of(template, "indented")
    model, turns = made(template, [script, "It costs 3."], dialect=dialect)
    known = model.engine.tokenizer  # type: ignore[union-attr]
    pieces = [*'{\n "name', script.removeprefix('{\n  "name')]  # other tokens than those of its encoding
    script = "".join(pieces)
    turns.scripts[0][:-1] = [i for piece in pieces for i in known.encode(piece, add_special_tokens=False)]
    agent: Any = create_agent(model, tools=[get_price, now])
    messages = agent.invoke(QUESTION)["messages"]
    called = messages[1]
    said = called.response_metadata["agentspec"]["token_ids"]
    assert known.decode(said) == script
    assert said != known.encode(script, add_special_tokens=False)
    assert called.tool_calls[0]["args"] == PRICE["arguments"]
    prompt = known.decode(max(turns.contexts, key=len))
    assert ChatFormat(known, dialect).form.call("get_price", {"ticker": "ACME", "days": 3}) in prompt
    assert script not in prompt


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("template", "dialect"), TEMPLATES)
def test_no_half_call_is_streamed_as_text(made: Made, template: str, dialect: str | None, spelling: str) -> None:
    model, _ = made(template, [script_of(template, spelling)], dialect=dialect)
    pieces = list(model.bind_tools([get_price]).stream("What is the price?"))
    assert "".join(piece.text for piece in pieces) == ""
    chunks = [chunk for piece in pieces for chunk in piece.tool_call_chunks]
    assert [(c["name"], json.loads(c["args"] or "")) for c in chunks] == [("get_price", PRICE["arguments"])]


TEXTS = ['{"name": "Bob", "age": 3}', '{"answer": 1}', "```python\nnow()\n```", "<tools> are many", "[1, 2]"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("template", "dialect"), TEMPLATES)
def test_what_names_no_tool_is_an_answer_and_streamed(
    made: Made, template: str, dialect: str | None, text: str
) -> None:
    text += " And so it goes on, to the end."
    model, _ = made(template, [text], dialect=dialect)
    bound = model.bind_tools([get_price])
    answer = bound.invoke("What is the price?")
    assert (answer.content, answer.tool_calls) == (text, [])
    pieces = list(bound.stream("What is the price?"))
    assert "".join(piece.text for piece in pieces) == text
    assert len([piece for piece in pieces if piece.text]) > 3


@pytest.mark.parametrize("way", ["max_tokens", "stop"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_call_cut_short_is_an_invalid_call(made: Made, spelling: str, way: str) -> None:
    script = script_of("qwen", spelling)
    model, _ = made("qwen", [script], max_tokens=200)
    known = model.engine.tokenizer  # type: ignore[union-attr]
    until = len(known.encode(script[: script.index("ACME")], add_special_tokens=False))
    bound = model.bind_tools([get_price])
    cut = {"max_tokens": until} if way == "max_tokens" else {"stop": ["ACM"]}
    answer = bound.invoke("What is the price?", **cut)
    assert (answer.content, answer.tool_calls) == ("", [])
    [invalid] = answer.invalid_tool_calls
    assert invalid["name"] == "get_price"
    assert answer.response_metadata["finish_reason"] == ("length" if way == "max_tokens" else "stop")
    early = bound.invoke("What is the price?", stop=["price"])
    assert early.content == script[: script.index("price")]
    assert not early.invalid_tool_calls


@pytest.mark.parametrize("parallel", [False, True])
def test_several_objects_are_calls_where_that_is_wanted(made: Made, parallel: bool) -> None:
    both = f'{json.dumps(PRICE)}\n{{"name": "now", "arguments": {{}}}}'
    model, _ = made("qwen", [both, "Done.", "Done."], parallel_tool_calls=parallel)
    agent: Any = create_agent(model, tools=[get_price, now])
    messages = agent.invoke(QUESTION)["messages"]
    assert [call["name"] for call in messages[1].tool_calls] == ["get_price", "now"][: 1 + parallel]
    assert messages[1].response_metadata["finish_reason"] == "tool_calls"
    assert messages[1].content == ""


def test_a_call_behind_a_thought(made: Made) -> None:
    script = f"<think>\nOne, two.\n</think>\n\n{json.dumps(PRICE, indent=2)}"
    model, turns = made("qwen3", [script, "<think>\nThree.\n</think>\n\nIt costs 3."])
    agent: Any = create_agent(model, tools=[get_price])
    messages = agent.invoke(QUESTION)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].additional_kwargs["reasoning_content"] == "One, two."
    assert (messages[-1].content, messages[-1].additional_kwargs["reasoning_content"]) == ("It costs 3.", "Three.")
    prompt = model.engine.tokenizer.decode(max(turns.contexts, key=len))  # type: ignore[union-attr]
    assert "<think>\nOne, two.\n</think>\n\n<tool_call>\n{" in prompt


def test_calls_are_not_read_where_none_are_allowed_or_one_is_demanded(made: Made) -> None:
    script = json.dumps(PRICE)
    model, _ = made("qwen", [script])
    assert model.bind_tools([get_price], tool_choice="none").invoke("Hi").content == script
    demanded = model.bind_tools([get_price], tool_choice="get_price").invoke("Hi")
    assert [call["name"] for call in demanded.tool_calls] == ["get_price"]


# Harmony

THINK = "<|channel|>analysis<|message|>One, two.<|end|><|start|>assistant"
HEADERS = [
    "<|channel|>commentary to=functions.get_price <|constrain|>json",
    " to=functions.get_price<|channel|>commentary json",
]


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("lead", ["", THINK, f"{THINK}<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant"])
def test_an_agent_speaks_harmony(made: Made, lead: str, header: str, gamma: int) -> None:
    called = f'{lead}{header}<|message|>{{"ticker": "ACME", "days": 3}}'
    final = f"{THINK}<|channel|>final<|message|>It costs 3."
    model, turns = made("harmony", [called, final], ["<|call|>", "<|return|>"], gamma=gamma)
    agent: Any = create_agent(model, tools=[get_price, now])
    messages = agent.invoke(QUESTION)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    _, call, _, answer = messages
    assert call.content == ("Hm." if "Hm." in lead else "")
    assert call.additional_kwargs.get("reasoning_content", "") == ("One, two." if lead else "")
    assert [(c["name"], c["args"]) for c in call.tool_calls] == [("get_price", {"ticker": "ACME", "days": 3})]
    assert call.response_metadata["finish_reason"] == "tool_calls"
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("It costs 3.", "One, two.")
    prompt = model.engine.tokenizer.decode(max(turns.contexts, key=len))  # type: ignore[union-attr]
    assert f'{HEADERS[1]}<|message|>{{"ticker": "ACME", "days": 3}}<|call|><|start|>functions.get_price' in prompt
    assert '<|message|>"ACME costs 3"<|end|>' in prompt


def test_harmony_streams_thoughts_and_answers_as_they_come(made: Made) -> None:
    model, _ = made("harmony", [f"{THINK}<|channel|>final<|message|>It costs three of them."])
    for bound in (model, model.bind_tools([get_price])):
        whole = bound.invoke("Hi")
        pieces = list(bound.stream("Hi"))
        assert "".join(piece.text for piece in pieces) == whole.content == "It costs three of them."
        assert whole.additional_kwargs["reasoning_content"] == "One, two."
        assert not any("<|" in str(piece.content) + str(piece.additional_kwargs) for piece in pieces)
        assert len([piece for piece in pieces if piece.text]) > 2


@pytest.mark.parametrize("choice", ["any", "now"])
def test_harmony_calls_where_a_call_is_demanded(made: Made, choice: str) -> None:
    script = f"{THINK} to=functions.now<|channel|>commentary json<|message|>{{}}"
    model, _ = made("harmony", [script], ["<|call|>"])
    answer = model.bind_tools([get_price, now], tool_choice=choice).invoke("Hi")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("now", {})]
    other = model.bind_tools([get_price, now], tool_choice="get_price").invoke("Hi")
    assert {call["name"] for call in (*other.tool_calls, *other.invalid_tool_calls)} == {"get_price"}


def test_harmony_gives_structured_answers_and_keeps_a_budget(made: Made) -> None:
    schema = {"title": "T", "type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    script = f'{THINK}<|channel|>final <|constrain|>json<|message|>{{"ok": true}}'
    model, _ = made("harmony", [script])
    assert model.with_structured_output(schema, method="json_schema").invoke("Hi") == {"ok": True}
    limited, _ = made("harmony", ["<|channel|>analysis<|message|>One, two, three, four"], thinking_budget=3)
    answer = limited.invoke("Hi", max_tokens=30)
    known = limited.engine.tokenizer  # type: ignore[union-attr]
    assert len(known.encode(answer.additional_kwargs["reasoning_content"], add_special_tokens=False)) == 3


def test_a_harmony_call_cut_short_is_an_invalid_call(made: Made) -> None:
    model, _ = made("harmony", [f'{HEADERS[0]}<|message|>{{"ticker": "ACME"}}'], ["<|call|>"])
    answer: AIMessage = model.bind_tools([get_price]).invoke("Hi", stop=["ACM"])
    assert (answer.content, answer.tool_calls) == ("", [])
    assert [call["name"] for call in answer.invalid_tool_calls] == ["get_price"]
    chunks = list(model.bind_tools([get_price]).stream("Hi", max_tokens=12))
    assert all(isinstance(chunk, AIMessageChunk) and not chunk.text for chunk in chunks)
