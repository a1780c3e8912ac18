"""Render and parse chats in harmony (``agentspec.grammars.harmony``), the format of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from agentspec.chat.parser import Message, Piece, ToolCall, end_of_value
from agentspec.grammars.harmony import CHANNEL, END, MESSAGE, START, THOUGHT
from agentspec.grammars.tool_calls import ReasoningFormat, ToolCallFormat
from agentspec.runtime.detokenizer import overlap

_BOUNDARY = END + START
_HEADERS = (CHANNEL, " to=", MESSAGE)
"""What an answer in harmony begins with."""


def harmony_thought(chat_template: str, prompt_end: str) -> ReasoningFormat:
    """Return how an answer thinks: in a channel, which the prompt may have opened."""
    return replace(THOUGHT, opener="") if prompt_end.endswith(THOUGHT.opener) else THOUGHT


def harmony_messages(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], form: ToolCallFormat
) -> list[Message]:
    """Return the messages for a template that takes thoughts as ``thinking``, and one call of a message.

    Such a template has one text beside a call, which it renders as a thought: a preamble goes there too. Of several
    calls each becomes a message of its own, with its result after it.
    """
    arranged: list[Message] = []
    rest = list(messages)
    while rest:
        message = _thinking(rest.pop(0))
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            arranged.append(message)
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for index, call in enumerate(calls):
            turn = message if index == 0 else {"role": "assistant", "content": ""}
            arranged.append({**turn, "tool_calls": [call]})
            arranged += [result for result in results if _answered(result, results, calls) == index]
    return arranged


def _answered(result: Message, results: list[Message], calls: list[Any]) -> int:
    """Return the index of the call that a result answers: by its id, else by its order."""
    ids = [call.get("id") for call in calls]
    known = result.get("tool_call_id")
    place = next(index for index, other in enumerate(results) if other is result)
    return ids.index(known) if known is not None and known in ids else min(place, len(calls) - 1)


def _thinking(message: Message) -> Message:
    if "reasoning_content" not in message:
        return message
    changed = {key: value for key, value in message.items() if key != "reasoning_content"}
    texts = [message["reasoning_content"], *([changed["content"]] if changed.get("tool_calls") else [])]
    changed["thinking"] = "\n\n".join(filter(None, texts))
    return {**changed, "content": ""} if changed.get("tool_calls") else changed


class HarmonyParser:
    """Reads answers in harmony: thoughts, preambles and the final message as they come, a call once it is whole.

    Args:
        form: of calls; None where no tools are offered.
        thought: that goes before the answer; one without an opener was opened by the prompt.
        begins_with_call: not needed here: the channel says what a message is.
        names: not needed either.
    """

    def __init__(
        self,
        form: ToolCallFormat | None = None,
        *,
        thought: ReasoningFormat | None = None,
        begins_with_call: bool = False,
        names: Any = None,
    ) -> None:
        self._form = form
        self._text = ""
        self._at = 0  # what is before has been read
        self._begin = 0  # of the message
        self._recipient: str | None = None
        self._message = 0
        self._shown: dict[str, int] = {}  # the last message that had a text for a field
        is_open = thought is not None and not thought.opener
        self._read: Callable[[bool], Piece] = self._read_thought if is_open else self._read_header

    def push(self, text: str) -> Piece:
        """Take more text."""
        self._text += text
        return self._advance(is_over=False)

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """Return the rest of the answer, and its calls."""
        piece = self._advance(is_over=True)
        if self._recipient is None:
            return piece, []
        if self._form is None:  # no tools are offered: what would be a call is text
            return Piece(piece.text + self._joined("text", self._text[self._at :]), piece.reasoning), []
        return piece, [self._call(self._recipient)]

    def _advance(self, *, is_over: bool) -> Piece:
        """Read on until more text is needed."""
        text = reasoning = ""
        while True:
            read = self._read
            piece = read(is_over)
            text, reasoning = text + piece.text, reasoning + piece.reasoning
            if self._read == read:
                return Piece(text, reasoning)

    # Each reader shows what it can, moves on, and names the next one where its part of the answer is over.

    def _read_header(self, is_over: bool) -> Piece:
        rest = self._text[self._at :]
        header, found, _ = rest.partition(MESSAGE)
        recipient = re.search(r" to=([\w.\-]*)", header)
        if found:
            self._message += 1
            self._at += len(header) + len(MESSAGE)
            self._read = self._read_nothing if recipient else self._reader(header)
        is_harmony = self._at > 0 or any(rest.startswith(mark) or mark.startswith(rest) for mark in _HEADERS)
        if not is_harmony or (is_over and not (found or recipient or CHANNEL in self._text)):
            self._read = self._read_rest
        if recipient and (found or is_over):
            is_cut = not found and "functions.".startswith(recipient[1])
            self._recipient = "" if is_cut else recipient[1].removeprefix("functions.")
        return Piece()

    def _read_thought(self, is_over: bool) -> Piece:
        return Piece(reasoning=self._joined("reasoning", self._body(is_over)))

    def _read_preamble(self, is_over: bool) -> Piece:
        return Piece(self._joined("text", self._body(is_over)))

    def _read_rest(self, is_over: bool) -> Piece:
        text, self._at = self._text[self._at :], len(self._text)
        return Piece(self._joined("text", text))

    def _read_nothing(self, is_over: bool) -> Piece:
        """Read nothing: a call is read once it is whole."""
        return Piece()

    def _body(self, is_over: bool) -> str:
        begin, end = self._at, self._text.find(_BOUNDARY, self._at)
        if end >= 0:
            self._at = self._begin = end + len(_BOUNDARY)
            self._read = self._read_header
        else:
            rest = self._text[begin:]
            held = len(END) if is_over and rest.endswith(END) else 0 if is_over else overlap(rest, _BOUNDARY)
            self._at = end = len(self._text) - held
        return self._text[begin:end]

    def _joined(self, field: str, text: str) -> str:
        """Return a text, after a line break where another message had one for the same field."""
        if text and self._shown.get(field, self._message) != self._message:
            text = "\n" + text
        if text:
            self._shown[field] = self._message
        return text

    def _call(self, name: str) -> ToolCall:
        """Return the call whose message is the last."""
        arguments = self._text[self._at :]
        end = end_of_value(arguments, 0)
        if end is None or arguments[end:].strip() not in ("", "<|call|>", END):
            return ToolCall(name, self._text[self._begin :], is_complete=False)
        return ToolCall(name, arguments[:end])

    def _reader(self, header: str) -> Callable[[bool], Piece]:
        channel = re.search(re.escape(CHANNEL) + r"(\w+)", header)
        known = {"analysis": self._read_thought, "commentary": self._read_preamble}
        return known.get(channel[1] if channel else "", self._read_rest)
