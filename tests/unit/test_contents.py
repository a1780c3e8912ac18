"""Messages of other models are read whole: text is joined as it was said, and what cannot be read is refused."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from scripted import tokenizer

from agentspec import InvalidRequestError
from agentspec.chat import ChatFormat
from langchain_agentspec.messages import to_chat

TEXT = {"type": "text", "text": "Hi"}


def chat(message: Any) -> dict[str, Any]:
    [made] = to_chat([message])
    return made


@pytest.mark.parametrize("cls", [AIMessage, AIMessageChunk])
def test_an_assistants_blocks_are_pieces_of_one_text(cls: Any) -> None:
    said = cls(
        [{"type": "text", "text": "It is "}, "in ", {"type": "text", "text": "Paris", "citations": []}, {"text": "."}]
    )
    assert chat(said)["content"] == "It is in Paris."
    assert chat(cls([TEXT, {"type": "reasoning", "reasoning": "x"}, TEXT]))["content"] == "HiHi"


def test_blocks_of_others_are_lines() -> None:
    for cls in (HumanMessage, SystemMessage):
        assert chat(cls(["One", TEXT]))["content"] == "One\nHi"
    assert chat(ToolMessage([TEXT, TEXT], tool_call_id="1"))["content"] == "Hi\nHi"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "refusal", "refusal": "No. "}, "No. "),
        ({"type": "output_text", "text": "So. "}, "So. "),
        ({"type": "text-plain", "text": "A file. ", "mime_type": "text/plain"}, "A file. "),
        ({"type": "non_standard", "value": {"type": "refusal", "refusal": "No. "}}, "No. "),
        ({"type": "text"}, ""),
        ({"type": "text", "text": None}, ""),
        ({"type": "redacted_thinking", "data": "x"}, ""),
        ({"type": "thinking", "thinking": "x", "signature": "y"}, ""),
        ({"type": "reasoning", "summary": []}, ""),
        ({"type": "non_standard", "value": {}}, ""),
        ({"type": "server_tool_call", "id": "1", "name": "s", "args": {}}, ""),
        ({"type": "server_tool_result", "tool_call_id": "1", "status": "success"}, ""),
        ({"type": "web_search_call", "id": "1"}, ""),
        ({"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}, ""),
        ({"type": "tool_use", "name": "f", "input": {}, "id": "1"}, ""),
        ({"cachePoint": {"type": "default"}}, ""),
        ({"type": "executable_code", "code": "1 + 1"}, ""),
        ({"type": "a kind of next year", "data": "x"}, ""),
    ],
    ids=str,
)
def test_blocks_that_are_text_or_stand_beside_it_are_taken(block: dict[str, Any], text: str) -> None:
    assert chat(AIMessage([block, TEXT]))["content"] == f"{text}Hi"


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "image", "base64": "x"},
        {"type": "input_image", "image_url": "x"},
        {"type": "audio", "base64": "x"},
        {"type": "video", "url": "x"},
        {"type": "file", "file_id": "x"},
        {"type": "document", "source": {}},
        {"type": "text-plain", "url": "x", "mime_type": "text/plain"},
        {"type": "non_standard", "value": {"type": "image", "base64": "x"}},
        {"data": "x"},
        {"type": "text", "text": 7},
        7,
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [AIMessage, HumanMessage])
def test_blocks_without_which_a_message_says_something_else_are_refused(cls: Any, block: Any) -> None:
    with pytest.raises(InvalidRequestError, match="block"):
        to_chat([cls.model_construct(content=[TEXT, block])])


@pytest.mark.parametrize("kind", ["non_standard", "server_tool_result", "web_search_call"])
def test_in_the_words_of_a_user_no_such_block_can_be_left_out(kind: str) -> None:
    with pytest.raises(InvalidRequestError, match=kind):
        to_chat([HumanMessage([TEXT, {"type": kind}])])


@pytest.mark.parametrize(
    "block",
    [
        {"type": "function_call", "name": "f", "arguments": '{"a": 1}', "call_id": "c1"},
        {"type": "tool_use", "name": "f", "input": {"a": 1}, "id": "c1"},
        {"type": "tool_call", "name": "f", "args": {"a": 1}, "id": "c1"},
    ],
    ids=str,
)
def test_calls_that_stand_in_blocks_alone_are_calls(block: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert chat(AIMessage([block]))["tool_calls"] == [call]
    both = AIMessage([block], tool_calls=[{"name": "f", "args": {"a": 1}, "id": "c1"}])
    assert chat(both)["tool_calls"] == [call]


def test_a_call_of_a_block_that_was_cut_short_is_no_call() -> None:
    cut = {"type": "function_call", "name": "f", "arguments": '{"a": ', "call_id": "1"}
    assert "tool_calls" not in chat(AIMessage([cut, TEXT]))


def test_thoughts_and_refusals_are_kept_wherever_they_stand() -> None:
    assert chat(AIMessage([{"type": "thinking", "thinking": "So."}, TEXT]))["reasoning_content"] == "So."
    assert chat(AIMessage("", additional_kwargs={"refusal": "No."}))["content"] == "No."
    assert chat(AIMessage("Yes.", additional_kwargs={"refusal": None}))["content"] == "Yes."


@pytest.mark.parametrize("kept", ["x", None, [], {"token_ids": [-1]}, {"token_ids": "abc"}, {"token_ids": [2**90]}])
def test_metadata_that_others_wrote_does_no_harm(kept: Any) -> None:
    known = tokenizer("qwen")
    said = AIMessage("Yes", response_metadata={"agentspec": kept})
    history = to_chat([HumanMessage("Hi"), said, HumanMessage("Sure?")])
    plain = to_chat([HumanMessage("Hi"), AIMessage("Yes"), HumanMessage("Sure?")])
    assert ChatFormat(known).render(history) == ChatFormat(known).render(plain)


def test_broken_text_reaches_the_model_as_replacement_characters() -> None:
    known = tokenizer("qwen")
    history = to_chat([HumanMessage("a file \udcff\0"), ChatMessage("note", role="user"), HumanMessage(["\ud800"])])
    assert "a file \ufffd\0" in known.decode(ChatFormat(known).render(history))
