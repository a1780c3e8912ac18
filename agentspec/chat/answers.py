"""Answers taken apart while they are written: reasoning, text, tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from agentspec.calls import CallForm, Thought
from agentspec.detokenizer import overlap
from agentspec.schema_tools import to_json


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made.

    Args:
        name: of the tool.
        arguments: JSON text; of a call cut short, all the text it got to.
        is_complete: whether it was written to its end.
        id: where the model writes one.
    """

    name: str
    arguments: str
    is_complete: bool = True
    id: str | None = None


@dataclass(frozen=True)
class Piece:
    """What is new in an answer and surely what it seems to be."""

    text: str = ""
    reasoning: str = ""


class Parser(Protocol):
    """Takes an answer apart."""

    def push(self, text: str) -> Piece:
        """Take more text."""
        ...

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """The rest of the answer, and its calls."""
        ...


class AnswerParser:
    """Reads answers in the forms that ``agentspec.calls`` writes.

    Args:
        form: of calls; None where no tools are offered.
        thought: how the answer may begin; None for models that do not think.
        begins_with_call: whether a call can only be the whole answer; an opener further on is text (a string in JSON).
        names: of the tools, where JSON that is no call may look like one.
    """

    def __init__(
        self,
        form: CallForm | None,
        *,
        thought: Thought | None = None,
        begins_with_call: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self._form = form
        self._names = names
        self._thought = thought
        self._has_final = begins_with_call
        self._calls_begin = begins_with_call or (form is not None and not form.opens_anywhere)
        self._text = ""
        self._at = 0  # what is before has been shown
        self._reasoning = _Trimmed("\n")
        self._read = self._read_text if thought is None else self._read_opener if thought.opener else self._read_thought

    def push(self, text: str) -> Piece:
        """Take more text."""
        self._text += text
        return self._advance(is_over=False)

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """The rest of the answer, and its calls."""
        piece = self._advance(is_over=True)
        return piece, self._calls() if self._read == self._read_nothing else []

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

    def _read_opener(self, is_over: bool) -> Piece:
        opener = self._thought.opener if self._thought else ""
        text = self._text.lstrip("\n")
        if text.startswith(opener):
            self._at = len(self._text) - len(text) + len(opener)
            self._read = self._read_thought
        elif is_over or not opener.startswith(text):
            self._read = self._read_text
        return Piece()

    def _read_thought(self, is_over: bool) -> Piece:
        assert self._thought is not None
        calls = [self._form.opener] if self._form and self._form.opens_anywhere else []
        marks = [self._thought.end, *calls]
        found = [(at, mark) for mark in marks if (at := self._text.find(mark, self._at)) >= 0]
        if not found:
            held = 0 if is_over else max(overlap(self._text[self._at :], mark) for mark in marks)
            return Piece(reasoning=self._reasoning.push(self._take(len(self._text) - held)))
        at, mark = min(found)
        thought = self._reasoning.push(self._take(at))
        if mark == self._thought.end:
            self._at += len(mark)
            self._read = self._read_gap
        else:
            self._read = self._read_nothing
        return Piece(reasoning=thought)

    def _read_gap(self, is_over: bool) -> Piece:
        rest = self._text[self._at :]
        self._at += len(rest) - len(rest.lstrip("\n"))
        if self._at < len(self._text):
            self._read = self._read_text
        return Piece()

    def _read_text(self, is_over: bool) -> Piece:
        if self._form is None:
            self._read = self._read_rest
            return Piece()
        if self._calls_begin:
            return self._read_beginning(self._form, is_over)
        opener, after = self._form.opener, self._form.after_text
        at = self._text.find(opener, self._at)
        if at >= 0:
            text = self._take(at)
            self._read = self._read_nothing
            return Piece(text.removesuffix(after) if after else text)
        rest = self._text[self._at :]
        held = 0 if is_over else max(overlap(rest, after + opener), overlap(rest, opener))
        return Piece(self._take(len(self._text) - held))

    def _read_beginning(self, form: CallForm, is_over: bool) -> Piece:
        """Text that is a call from its beginning or not at all."""
        rest = self._text[self._at :]
        if rest.startswith(form.opener):
            # Final JSON may begin as a call of some forms does.
            head = form.head_pattern.match(rest, len(form.opener))
            known = head and (self._names is None or json.loads(head["name"]) in self._names)
            if form.opens_anywhere or not self._has_final or known:
                self._read = self._read_nothing
                return Piece()
        if is_over or not (form.opener.startswith(rest) or rest.startswith(form.opener)):
            self._read = self._read_rest
        return Piece()

    def _read_rest(self, is_over: bool) -> Piece:
        return Piece(self._take(len(self._text)))

    def _read_nothing(self, is_over: bool) -> Piece:
        """Calls are read once they are whole."""
        return Piece()

    def _take(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], max(end, self._at)
        return piece

    def _calls(self) -> list[ToolCall]:
        form, text, at = self._form, self._text, self._at
        assert form is not None
        calls: list[ToolCall] = []
        lead = form.opener
        while lead and text.startswith(lead, at):
            call, at = _read_call(form, text, at, at + len(lead))
            calls.append(call)
            lead = form.between or ""
        rest = text[at:]
        if rest and not (form.end.startswith(rest) or (form.between or "").startswith(rest)):
            calls.append(ToolCall("", rest, is_complete=False))
        return calls


def _read_call(form: CallForm, text: str, begin: int, at: int) -> tuple[ToolCall, int]:
    """The call that begins at ``begin``, its ``before_arguments`` at ``at``; and where the next may begin."""
    head = form.head_pattern.match(text, at)
    groups = head.groupdict() if head else {}
    name = json.loads(groups["name"]) if groups.get("name") else groups.get("raw_name") or ""
    end = _end_of_value(text, head.end()) if head else None
    closer = None if end is None else form.closer_pattern.match(text, end)
    if head is None or closer is None:
        return ToolCall(name or _name_so_far(text, at), text[begin:], is_complete=False), len(text)
    call_id = {**groups, **closer.groupdict()}.get("id")
    return ToolCall(name, text[head.end() : end], id=call_id), closer.end()


def _end_of_value(text: str, at: int) -> int | None:
    """Where the JSON value that begins at ``at`` ends; None where it is cut short."""
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except json.JSONDecodeError:
        return None


def _name_so_far(text: str, at: int) -> str:
    """The name in a call that was cut short behind it."""
    try:
        name, _ = json.JSONDecoder().raw_decode(text, text.index('"name": ', at) + len('"name": '))
    except ValueError:
        return ""
    return str(name)


class _Trimmed:
    """Text in pieces, without certain characters at its two ends."""

    def __init__(self, characters: str | None = None) -> None:
        self._characters = characters
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        text = self._held + text
        if not self._begun:
            text = text.lstrip(self._characters)
        shown = text.rstrip(self._characters)
        self._begun, self._held = self._begun or bool(shown), text[len(shown) :]
        return shown


REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which response templates keep thoughts."""


class TemplateParser:
    """Reads answers by the response template that a tokenizer ships, with transformers' own parser.

    Args:
        parser: transformers' ``ResponseParser`` behind the prompt.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._texts = {name: _Trimmed("\n") for name in ("content", *REASONING)}
        self._calls: list[ToolCall] = []
        self._open_call: str | None = None

    def push(self, text: str) -> Piece:
        """Take more text."""
        try:
            return self._taken(self._parser.feed(text))
        except ValueError:  # a region that its parser does not understand: kept as it is
            return Piece()

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """The rest of the answer, and its calls."""
        piece = Piece()
        with contextlib.suppress(ValueError):  # a call that was cut short is no JSON
            piece = self._taken(self._parser.finalize()[1])
        if self._open_call is not None:
            self._calls.append(ToolCall("", self._open_call, is_complete=False))
        return piece, self._calls

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
