"""Read the content of LangChain's messages, which is text or a list of blocks of many providers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage

from agentspec import InvalidRequestError
from agentspec.errors import shown

TEXTS = {
    "text": "text",
    "text-plain": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Kinds of blocks that are text, and the key that holds it."""

CALLS = {
    "tool_call": ("id", "args"),
    "tool_use": ("id", "input"),
    "function_call": ("call_id", "arguments"),
}
"""Kinds of blocks that are calls, with the keys for id and arguments; LangChain has them in ``tool_calls`` too."""

BESIDE_TEXT = {"tool_call_chunk", "input_json_delta", "invalid_tool_call", "citation", "cachePoint", "cache_point"}
BESIDE_TEXT |= {"reasoning", "thinking", "redacted_thinking", "reasoning_content"}
"""Kinds of blocks that a prompt can do without, in any message."""

MEDIA = {"image", "image_url", "input_image", "audio", "input_audio", "video", "media"}
MEDIA |= {"file", "input_file", "document", "search_result", "text-plain"}
"""Kinds of blocks without which a message would say something else.

Other kinds in an assistant's message tell what a provider did before its model answered: the text stands without them.
"""


def text_of(message: BaseMessage) -> str:
    """Return the text of a message: an assistant's blocks are pieces of one text, those of others are lines.

    Raises:
        InvalidRequestError: for blocks without which the message would say something else (images, files, ...).
    """
    if isinstance(message.content, str):
        refusal = message.additional_kwargs.get("refusal")
        return message.content or (refusal if isinstance(refusal, str) and isinstance(message, AIMessage) else "")
    is_answer = isinstance(message, AIMessage)
    pieces = [piece for block in message.content if (piece := _text_of(block, is_answer)) is not None]
    return ("" if is_answer else "\n").join(pieces)


def _text_of(block: Any, is_answer: bool) -> str | None:
    """Return the text of a block; None for one that has none."""
    if isinstance(block, str):
        return block
    if not isinstance(block, Mapping):
        raise InvalidRequestError(f"A content block is text or a dict, got {shown(block)}.")
    kind = block.get("type") or next((name for name in ("text", "cachePoint") if name in block), None)
    if kind in TEXTS and not (kind == "text-plain" and "text" not in block):
        return _check_text(block.get(TEXTS[kind]), kind)
    if kind == "non_standard" and isinstance(block.get("value"), Mapping) and "type" in block["value"]:
        return _text_of(block["value"], is_answer)
    if kind in BESIDE_TEXT or kind in CALLS or (is_answer and isinstance(kind, str) and kind not in MEDIA):
        return None
    raise InvalidRequestError(f"Only text can be read by this model, got a content block of type {shown(kind)}.")


def _check_text(text: Any, kind: str) -> str:
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"A content block of type {shown(kind)} holds text, got {shown(text)}.")
    return text or ""


def reasoning_of(message: AIMessage) -> str:
    """Return the thought before an answer, as this and other integrations keep it."""
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str):
        return kept
    kinds = ((block, block.get("type")) for block in _blocks(message))
    return "\n".join(str(block[k]) for block, k in kinds if k in ("reasoning", "thinking") and block.get(k))


def calls_of(message: AIMessage) -> list[dict[str, Any]]:
    """Return the calls of a message in OpenAI's form: from its blocks, where it has them only there."""
    calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
    if not calls and not message.invalid_tool_calls:
        calls = list(_calls_in(_blocks(message)))
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in calls
    ]


def _calls_in(blocks: Iterable[Mapping[str, Any]]) -> Iterable[tuple[Any, Any, Any]]:
    for block in blocks:
        if block.get("type") in CALLS:
            call_id, arguments = (block.get(key) for key in CALLS[block["type"]])
            try:
                read = json.loads(arguments) if isinstance(arguments, str) else arguments
            except json.JSONDecodeError:  # a call that was cut short
                continue
            if isinstance(read, dict) and isinstance(block.get("name"), str):
                yield call_id, block["name"], read


def _blocks(message: BaseMessage) -> list[Mapping[str, Any]]:
    return [block for block in message.content if isinstance(block, Mapping)]
