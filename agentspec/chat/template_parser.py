"""Answers read by the response template that a tokenizer ships."""

from __future__ import annotations

import contextlib
from typing import Any

from agentspec.chat.answer_parser import AnswerParser
from agentspec.chat.parser import Piece, ToolCall, Trimmed
from agentspec.grammars.schema_tools import to_json

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which response templates keep thoughts."""


class TemplateParser:
    """Reads answers by the response template that a tokenizer ships, with transformers' own parser.

    Calls in other spellings than the template's are read by our own parser.

    Args:
        parser: transformers' ``ResponseParser`` after the prompt.
        ours: knows these spellings; None where they are text.
    """

    def __init__(self, parser: Any, ours: AnswerParser | None = None) -> None:
        self._parser = parser
        self._ours = ours
        self._text = ""  # while it is not known who reads it
        self._thought = ""  # shown so far
        self._texts = {name: Trimmed("\n") for name in ("content", *REASONING)}
        self._calls: list[ToolCall] = []
        self._open_call: str | None = None

    def push(self, text: str) -> Piece:
        """Take more text."""
        if self._ours is None:
            return self._fed(text)
        self._text += text
        piece = self._ours.push(text)
        if self._ours.is_spelled is False:
            return self._given_up()
        self._thought += piece.reasoning
        return piece

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """Return the rest of the answer, and its calls."""
        if self._ours is not None and self._ours.is_spelled:
            return self._ours.finish()
        begun, piece = self._given_up(), Piece()
        with contextlib.suppress(ValueError):  # a call that was cut short is no JSON
            piece = self._taken(self._parser.finalize()[1])
        if self._open_call is not None:
            self._calls.append(ToolCall("", self._open_call, is_complete=False))
        return Piece(begun.text + piece.text, begun.reasoning + piece.reasoning), self._calls

    def _given_up(self) -> Piece:
        """Return what their parser finds in the text so far, where ours has found no call in it."""
        if self._ours is None:
            return Piece()
        self._ours = None
        piece = self._fed(self._text)
        return Piece(piece.text, piece.reasoning.removeprefix(self._thought))

    def _fed(self, text: str) -> Piece:
        try:
            return self._taken(self._parser.feed(text))
        except ValueError:  # a region that its parser does not understand: kept as it is
            return Piece()

    def _taken(self, events: list[dict[str, Any]]) -> Piece:
        shown = {"content": "", "reasoning": ""}
        for event in events:
            kind, field = event["type"], event["field"]
            if field in self._texts:
                place = "reasoning" if field in REASONING else "content"
                shown[place] += self._texts[field].push(event.get("text", "") if kind == "region_chunk" else "")
            elif field == "tool_calls":
                self._take_call(kind, event)
        return Piece(shown["content"], shown["reasoning"])

    def _take_call(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "region_chunk":
            self._open_call = (self._open_call or "") + event["text"]
        elif kind == "region_close":
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                function = call["function"]
                self._calls.append(ToolCall(function["name"], to_json(function["arguments"]), id=call.get("id")))
            self._open_call = None
