"""Tool calls read in other spellings than the form's (``agentspec.grammars.call_openers``)."""

from __future__ import annotations

import json
from dataclasses import replace

from agentspec.chat.parser import ToolCall, end_of_value
from agentspec.grammars.call_openers import BLANKS, Opened, skip_blanks


def read_spelled(text: str, opened: Opened, key: str) -> list[ToolCall]:
    """Return the calls of a text that begins with some; one that is cut short, or not closed, is the last.

    Args:
        text: of the whole answer.
        opened: where calls begin in it, and in what.
        key: of a call's arguments.
    """
    is_list, closer = opened.opener.is_list, opened.opener.closer
    calls: list[ToolCall] = []
    begin, following = opened.begin, len(text)
    while not calls or (calls[-1].is_complete and following < len(text)):
        begin = following if calls else begin
        call, end = _read_call(text, begin, key)
        calls.append(call)
        following = _next_call(text, end, is_list=is_list)
    rest = text[end:].strip(BLANKS)
    closing = "]" * is_list + closer
    if not calls[-1].is_complete or "".join(rest.split()) == closing:
        return calls
    if closing:
        return [*calls[:-1], replace(calls[-1], arguments=text[begin:], is_complete=False)]
    return [*calls, ToolCall("", rest, is_complete=False)]


def _next_call(text: str, at: int, *, is_list: bool) -> int:
    """Return where another call begins after one; the end of the text where there is none."""
    at = skip_blanks(text, at)
    if is_list:
        return skip_blanks(text, at + 1) if text.startswith(",", at) else len(text)
    return at if text.startswith("{", at) else len(text)


def _read_call(text: str, begin: int, key: str) -> tuple[ToolCall, int]:
    """Return the call whose object begins at ``begin``, and where it ends."""
    name, at = "", begin
    for mark in ("{", '"name"', ":", None, ",", json.dumps(key), ":"):
        at = skip_blanks(text, at)
        end = end_of_value(text, at) if mark is None else at + len(mark) if text.startswith(mark, at) else None
        if end is None:
            return ToolCall(name, text[begin:], is_complete=False), len(text)
        name, at = (json.loads(text[at:end]) if mark is None else name), end
    at = skip_blanks(text, at)
    end = end_of_value(text, at)
    closed = None if end is None else skip_blanks(text, end)
    if closed is None or not text.startswith("}", closed):
        return ToolCall(name, text[begin:], is_complete=False), len(text)
    return ToolCall(name, text[at:end]), closed + 1
