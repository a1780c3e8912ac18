"""Thoughts, dialects and checked answers through the chat model, with a model that says what the test wants."""

from __future__ import annotations

import json

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from scripted import QUESTION, Says, tokenizer

from agentspec import GrammarError, InvalidRequestError
from agentspec.chat import ChatFormat
from langchain_agentspec.messages import to_chat

CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def now() -> str:
    """The time."""
    return "noon"


def test_a_thought_stands_beside_the_answer(says: Says) -> None:
    model = says("<think>\nOne, two.\n</think>\n\nNoon.")
    answer = model.invoke(QUESTION)
    assert (answer.content, answer.additional_kwargs["reasoning_content"]) == ("Noon.", "One, two.")
    pieces = list(model.stream(QUESTION))
    whole = pieces[0].__add__(pieces[1:])
    assert whole.content == answer.content
    assert whole.additional_kwargs == answer.additional_kwargs
    assert len(pieces) > 3
    assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]


def test_a_thought_may_be_declined(says: Says) -> None:
    model = says("Noon.", reasoning=False)
    answer = model.invoke(QUESTION)
    assert answer.content == "Noon."
    assert "reasoning_content" not in answer.additional_kwargs


@pytest.mark.parametrize("budget", [0, 3, 6])
def test_a_budget_ends_a_thought(says: Says, budget: int) -> None:
    model = says("<think>\nOne, two, three, four, five, six, seven", thinking_budget=budget)
    answer = model.invoke(QUESTION, max_tokens=30)
    thought = answer.additional_kwargs.get("reasoning_content", "")
    assert len(model.engine.tokenizer.encode(thought)) <= budget  # type: ignore[union-attr]
    assert "One, two, three, four, five, six, seven".startswith(thought)
    assert "think>" not in answer.content


def test_a_thought_goes_before_a_demanded_call_and_before_a_structured_answer(says: Says) -> None:
    model = says("<think>\nOne.\n</think>\n\nno call", tools=[convert_to_openai_tool(now)])
    answer = model.bind_tools([now], tool_choice="any").invoke(QUESTION)
    assert answer.additional_kwargs["reasoning_content"] == "One."
    assert [call["name"] for call in answer.tool_calls] == ["now"]
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    made = says("<think>\nOne.\n</think>\n\nno JSON").with_structured_output(schema, include_raw=True).invoke(QUESTION)
    assert made["parsed"].keys() == {"ok"}
    assert made["raw"].additional_kwargs["reasoning_content"] == "One."


def test_thoughts_of_the_history_reach_the_template() -> None:
    chat = ChatFormat(tokenizer("qwen3"))
    call = {"name": "now", "args": {}, "id": "1"}
    kept = AIMessage("", additional_kwargs={"reasoning_content": "Hm."}, tool_calls=[call])
    blocks = AIMessage([{"type": "reasoning", "reasoning": "Hm."}], tool_calls=[call])
    texts = []
    for message in (kept, blocks):
        history = to_chat([HumanMessage(QUESTION), message, ToolMessage("noon", tool_call_id="1")])
        texts.append(tokenizer("qwen3").decode(chat.render(history)))
    assert texts[0] == texts[1]
    assert f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>" in texts[0]


UNEXPRESSED = {
    "title": "Count",
    "type": "object",
    "properties": {"count": {"type": "integer", "not": {"const": 12}}},
    "required": ["count"],
    "additionalProperties": False,
}


def test_what_a_grammar_cannot_express_is_refused_or_checked(says: Says) -> None:
    with pytest.raises(GrammarError, match="not"):
        says('{"count": 12}', "qwen").with_structured_output(UNEXPRESSED).invoke(QUESTION)
    checked = says('{"count": 12}', "qwen", validate_output=True).with_structured_output(UNEXPRESSED)
    with pytest.raises(OutputParserException, match=r"\$\.count"):
        checked.invoke(QUESTION)
    with pytest.raises(OutputParserException, match=r"\$\.count"):
        list(checked.stream(QUESTION))
    right = says('{"count": 13}', "qwen", validate_output=True).with_structured_output(UNEXPRESSED)
    assert right.invoke(QUESTION) == {"count": 13}


def test_wrong_wishes_say_what_was_expected(says: Says) -> None:
    with pytest.raises(InvalidRequestError, match="reasoning model"):
        says("Noon.", "qwen", thinking_budget=3).invoke(QUESTION)
    with pytest.raises(InvalidRequestError, match="dialect must be one of"):
        says("Noon.", dialect="klingon").invoke(QUESTION)
    with pytest.raises(GrammarError, match="thinking budget"):
        says("Noon.", thinking_budget=-1).invoke(QUESTION)


@pytest.mark.parametrize(
    ("template", "dialect"), [("mistral", None), ("mistral_args", None), ("llama3", None), ("qwen", "plain")]
)
def test_calls_of_every_dialect_come_out_as_langchains(says: Says, template: str, dialect: str | None) -> None:
    model = says("anything", template, dialect=dialect, acceptance="coupled")
    bound = model.bind_tools([now], tool_choice="any")
    answer = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("now", {})
    assert answer.content == ""
    chunks = [chunk for piece in bound.stream(QUESTION) for chunk in piece.tool_call_chunks]
    assert [(chunk["name"], json.loads(chunk["args"] or "")) for chunk in chunks] == [("now", {})]
    if template == "mistral":
        assert len(call["id"] or "") == 9


def test_structured_output_streams_what_there_is_of_it(says: Says) -> None:
    schema = {
        "title": "Person",
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    wanted = '{"name": "One, two, three", "age": 12}'
    pieces = list(says(wanted, "qwen").with_structured_output(schema).stream(QUESTION))
    assert pieces[-1] == json.loads(wanted)
    assert len(pieces) > 2
    names = [piece["name"] for piece in pieces if "name" in piece]
    assert names == sorted(names, key=len)
    assert all("One, two, three".startswith(name) for name in names)
