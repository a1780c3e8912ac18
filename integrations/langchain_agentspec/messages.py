"""LangChain's messages to plain chat messages, and deltas to LangChain's messages."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    InvalidToolCall,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatResult

from agentspec import Delta, FinishReason, InvalidRequestError, StepStats, TokenLogprob
from agentspec.chat import CheckedTool, Parser, Piece, ToolCall
from agentspec.errors import shown
from langchain_agentspec.contents import calls_of, reasoning_of, text_of

CUT_SHORT = "cut short: "
"""Stands before the text of a call that was not written to its end, so that no reader takes it for one that was."""

INVALID = "invalid: "
"""Stands before the reason and the text of a call that its tool's schema refuses, while a message is streamed."""

ROLES = {"human": "user", "system": "system", "ai": "assistant", "tool": "tool", "function": "tool"}


def to_chat(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """LangChain messages as plain chat messages.

    Raises:
        InvalidRequestError: for content that is not text, or a kind of message that has no role.
    """
    return [_to_chat(message) for message in messages]


def _to_chat(message: BaseMessage) -> dict[str, Any]:
    role = message.role if isinstance(message, ChatMessage) else ROLES.get(message.type.removesuffix("MessageChunk"))
    if isinstance(message, AIMessage):
        role = "assistant"
    if role is None:
        raise InvalidRequestError(
            f"A message of type {shown(message.type)} has no role in a chat; got {shown(message)}."
        )
    chat: dict[str, Any] = {"role": role, "content": text_of(message)}
    if isinstance(message, AIMessage) and (calls := calls_of(message)):
        chat["tool_calls"] = calls
    if isinstance(message, AIMessage) and (reasoning := reasoning_of(message)):
        chat["reasoning_content"] = reasoning
    if isinstance(message, AIMessage) and (ids := _own_metadata(message).get("token_ids")):
        chat["token_ids"] = ids
    if isinstance(message, ToolMessage):
        chat["tool_call_id"] = message.tool_call_id
    if isinstance(message, ToolMessage | FunctionMessage) and message.name:
        chat["name"] = message.name
    return chat


def _own_metadata(message: AIMessage) -> dict[str, Any]:
    """Return this package's metadata of a message; {} for the messages of others, and for metadata of another form."""
    found = message.response_metadata.get("agentspec")
    return found if isinstance(found, dict) else {}


class ChunkMaker:
    """Makes a sample's message chunks of its deltas; their sum is the message.

    Args:
        model_name: for the response's metadata.
        parser: takes reasoning and calls out of the text; None where there can be none.
        decode: ids to text, for log-probabilities.
        own_ids: the ids that a text was emitted in, where they are to be kept (``ChatFormat.own_ids``).
        template_s: seconds that the making of the request took; they are part of the step.
        checked: the tools whose calls are checked and not enforced whole, for the metadata.
    """

    def __init__(
        self,
        model_name: str,
        parser: Parser | None,
        decode: Callable[[list[int]], str],
        own_ids: Callable[[str, list[int], str], list[int] | None],
        template_s: float = 0.0,
        checked: Sequence[CheckedTool] = (),
    ) -> None:
        self._template_s = template_s
        self._checked = checked
        self._model_name = model_name
        self._decode = decode
        self._own_ids = own_ids
        self._parser = parser
        self._text = ""
        self._content = ""  # what of it a history renders as text
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def tokens(self) -> int:
        """Tokens of the message so far."""
        return len(self._tokens)

    def chunk(self, delta: Delta) -> AIMessageChunk:
        """Return the chunk of one delta; the last one carries calls, usage and metadata."""
        self._logprobs += delta.logprobs
        self._text += delta.text
        self._tokens += delta.tokens
        piece = self._parser.push(delta.text) if self._parser else Piece(delta.text)
        self._content += piece.text + piece.reasoning
        if delta.finish_reason is None or delta.stats is None:
            return AIMessageChunk(content=piece.text, additional_kwargs=_thought(piece.reasoning))
        rest, calls = self._parser.finish() if self._parser else (Piece(), [])
        self._content += rest.text + rest.reasoning + "".join(call.arguments for call in calls if call.is_valid)
        made = [_call_chunk(index, call) for index, call in enumerate(calls)]
        reasons = {str(chunk["id"]): call.invalid for chunk, call in zip(made, calls, strict=True) if call.invalid}
        last = AIMessageChunk(
            content=piece.text + rest.text,
            additional_kwargs=_thought(piece.reasoning + rest.reasoning),
            tool_call_chunks=made,
            usage_metadata=_usage(delta.stats),
            response_metadata=self._metadata(
                _finish_reason(delta.finish_reason, calls), delta.stats, delta.invalid, reasons
            ),
            chunk_position="last",
        )
        last.invalid_tool_calls = _with_reasons(last)
        return last

    async def achunk(self, delta: Delta) -> AIMessageChunk:
        """``chunk`` for an event loop, which no long check of calls may block: a pattern takes seconds at worst."""
        if delta.finish_reason is None or not self._checked:
            return self.chunk(delta)
        return await asyncio.to_thread(self.chunk, delta)

    def _metadata(
        self, finish_reason: str, stats: StepStats, invalid: str | None, reasons: dict[str, str]
    ) -> dict[str, Any]:
        reported = {
            "token_ids": self._own_ids(self._text, self._tokens, self._content),
            "invalid": invalid,
            "checked_tools": [tool.to_dict() for tool in self._checked],
            "invalid_calls": reasons,
        }
        metadata: dict[str, Any] = {
            "finish_reason": finish_reason,
            "model_name": self._model_name,
            "model_provider": "agentspec",
            "agentspec": stats.after(self._template_s).to_dict()
            | {name: value for name, value in reported.items() if value},
        }
        if self._logprobs:
            metadata["logprobs"] = {"content": [self._logprob(entry) for entry in self._logprobs]}
        return metadata

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        """In OpenAI's form, with the id beside the text."""
        top = [{"token": self._decode([i]), "id": i, "logprob": logprob} for i, logprob in entry.top]
        return {
            "token": self._decode([entry.token]),
            "id": entry.token,
            "logprob": entry.logprob,
            "top_logprobs": top,
        }


def _thought(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def to_message(chunks: Iterable[AIMessageChunk]) -> AIMessage:
    """Return the message that chunks add up to."""
    first, *others = chunks
    whole = first.__add__(others) if others else first
    return AIMessage(
        content=whole.content,
        additional_kwargs=whole.additional_kwargs,
        tool_calls=whole.tool_calls,
        invalid_tool_calls=_with_reasons(whole),
        usage_metadata=whole.usage_metadata,
        response_metadata=whole.response_metadata,
    )


def _with_reasons(message: AIMessageChunk) -> list[InvalidToolCall]:
    """Return a message's invalid calls; of those that a schema refuses, the arguments' text and the reason."""
    reasons = message.response_metadata.get("agentspec", {}).get("invalid_calls", {})
    return [_with_reason(call, reasons.get(call["id"])) for call in message.invalid_tool_calls]


def _with_reason(call: InvalidToolCall, reason: str | None) -> InvalidToolCall:
    if reason is None:
        return call
    return {**call, "args": (call["args"] or "").removeprefix(_refused(reason)), "error": reason}


def _refused(reason: str) -> str:
    return f"{INVALID}{reason}: "


def _call_chunk(index: int, call: ToolCall) -> ToolCallChunk:
    """Return a call in one piece. The text of an invalid one follows a mark: LangChain would take it for a call."""
    mark = CUT_SHORT if not call.is_complete else _refused(call.invalid) if call.invalid else ""
    call_id = call.id or f"call_{uuid.uuid4().hex}"
    return tool_call_chunk(name=call.name, args=mark + call.arguments, id=call_id, index=index)


def _finish_reason(reason: FinishReason, calls: list[ToolCall]) -> str:
    called = reason is FinishReason.STOP and any(call.is_valid for call in calls)
    return str(FinishReason.TOOL_CALLS if called else reason)


def _usage(stats: StepStats) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=stats.prompt_tokens,
        output_tokens=stats.new_tokens,
        total_tokens=stats.prompt_tokens + stats.new_tokens,
        input_token_details=InputTokenDetails(cache_read=stats.cached_tokens),
    )


def to_result(chunks: list[tuple[int, AIMessageChunk]], samples: int) -> ChatResult:
    """Return the samples of a call, from their chunks in the order they came."""
    messages = [to_message(chunk for index, chunk in chunks if index == sample) for sample in range(samples)]
    return ChatResult(
        generations=[
            ChatGeneration(
                message=message, generation_info={"finish_reason": message.response_metadata["finish_reason"]}
            )
            for message in messages
        ]
    )
