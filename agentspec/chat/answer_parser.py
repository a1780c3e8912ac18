"""Answers taken apart while they are written: reasoning, text, tool calls."""

from __future__ import annotations

import json
from collections.abc import Collection

from agentspec.chat.call_spellings import read_spelled
from agentspec.chat.parser import Parser, Piece, ToolCall, Trimmed, end_of_value
from agentspec.grammars.call_openers import Opened, find_opener
from agentspec.grammars.tool_calls import ReasoningFormat, ToolCallFormat
from agentspec.runtime.detokenizer import overlap

__all__ = ["AnswerParser", "Parser", "Piece", "ToolCall"]


class AnswerParser:
    """Reads answers in the forms that ``agentspec.grammars.tool_calls`` writes.

    Args:
        form: of calls; None where no tools are offered.
        thought: how the answer may begin; None for models that do not think.
        begins_with_call: whether a call can only be the whole answer; an opener further on is text (a string in JSON).
        names: of the tools, where JSON that is no call may look like one; with them calls in other spellings are read.
    """

    def __init__(
        self,
        form: ToolCallFormat | None,
        *,
        thought: ReasoningFormat | None = None,
        begins_with_call: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self._form = form
        self._names = names
        self._openers = form.openers(len(set(names))) if form and names and not begins_with_call else ()
        self._opened: Opened | None = None
        self._thought = thought
        self._has_final = begins_with_call
        self._calls_begin = begins_with_call or (form is not None and not form.opens_anywhere)
        self._text = ""
        self._at = 0  # what is before has been shown
        self._reasoning = Trimmed("\n")
        self._read = self._read_text if thought is None else self._read_opener if thought.opener else self._read_thought

    @property
    def is_spelled(self) -> bool | None:
        """Whether the answer is calls in another spelling than the form's; None while that is not known."""
        before = (self._read_opener, self._read_thought, self._read_gap, self._read_text)
        return None if self._read in before else self._opened is not None

    def push(self, text: str) -> Piece:
        """Take more text."""
        self._text += text
        return self._advance(is_over=False)

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """Return the rest of the answer, and its calls."""
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
        elif self._openers:
            self._read_spelling(is_over)
        elif self._calls_begin:
            self._read_beginning(self._form, is_over)
        else:
            self._read = self._read_up_to_call
        return Piece()

    def _read_spelling(self, is_over: bool) -> None:
        """Text that may begin with a call in another spelling than the form's; until that is known it is held back."""
        self._opened, is_undecided = find_opener(self._text, self._at, self._names or (), self._openers)
        if self._opened:
            self._read = self._read_nothing
        elif is_over or not is_undecided:
            self._read = self._read_rest if self._calls_begin else self._read_up_to_call

    def _read_up_to_call(self, is_over: bool) -> Piece:
        assert self._form is not None
        opener, after = self._form.opener, self._form.after_text
        at = self._text.find(opener, self._at)
        if at >= 0:
            text = self._take(at)
            self._read = self._read_nothing
            return Piece(text.removesuffix(after) if after else text)
        rest = self._text[self._at :]
        held = 0 if is_over else max(overlap(rest, after + opener), overlap(rest, opener))
        return Piece(self._take(len(self._text) - held))

    def _read_beginning(self, form: ToolCallFormat, is_over: bool) -> None:
        """Text that is a call from its beginning or not at all."""
        rest = self._text[self._at :]
        if rest.startswith(form.opener):
            # Final JSON may begin as a call of some forms does.
            head = form.head_pattern.match(rest, len(form.opener))
            known = head and (self._names is None or json.loads(head["name"]) in self._names)
            if form.opens_anywhere or not self._has_final or known:
                self._read = self._read_nothing
                return
        if is_over or not (form.opener.startswith(rest) or rest.startswith(form.opener)):
            self._read = self._read_rest

    def _read_rest(self, is_over: bool) -> Piece:
        return Piece(self._take(len(self._text)))

    def _read_nothing(self, is_over: bool) -> Piece:
        """Read nothing: a call is read once it is whole."""
        return Piece()

    def _take(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], max(end, self._at)
        return piece

    def _calls(self) -> list[ToolCall]:
        form, text, at = self._form, self._text, self._at
        assert form is not None
        if self._opened:
            return read_spelled(text, self._opened, form.loose_key or "")
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


def _read_call(form: ToolCallFormat, text: str, begin: int, at: int) -> tuple[ToolCall, int]:
    """Return the call that begins at ``begin``, its ``before_arguments`` at ``at``; and where the next may begin."""
    head = form.head_pattern.match(text, at)
    groups = head.groupdict() if head else {}
    name = json.loads(groups["name"]) if groups.get("name") else groups.get("raw_name") or ""
    end = end_of_value(text, head.end()) if head else None
    closer = None if end is None else form.closer_pattern.match(text, end)
    if head is None or closer is None:
        return ToolCall(name or _name_so_far(text, at), text[begin:], is_complete=False), len(text)
    call_id = {**groups, **closer.groupdict()}.get("id")
    return ToolCall(name, text[head.end() : end], id=call_id), closer.end()


def _name_so_far(text: str, at: int) -> str:
    """Return the name in a call that was cut short after it."""
    try:
        name, _ = json.JSONDecoder().raw_decode(text, text.index('"name": ', at) + len('"name": '))
    except ValueError:
        return ""
    return str(name)
