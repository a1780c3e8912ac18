"""Openers: how models begin tool calls at the start of an answer, in other spellings than their own format's.

Models drop the tag of their tool-call format, wrap the JSON in another one, or put it into a fenced block, and indent
it as they like. Such an answer is a call from the value of ``"name"`` on, where that is the name of a tool. Until then
everything may still become plain text. One description serves both sides: the grammar (``opener_rules``) and the
parser (``find_opener``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentspec.schema_tools import in_json_form, to_json

BLANKS = " \t\r\n"
"""White space of JSON."""

_ANY_BLANKS = r"[ \t\r\n]*"
"""Before a call is certain: plain text is free to hold as much of it."""

_SPACE = r"[ \t]{0,8}(\r?\n[ \t]{0,80})?"
"""Inside a call: one line break and an indent at most, so that no model loops in white space."""

_LOOSE_FORM = {"whitespace_flexible": True, "whitespace_pattern": _SPACE}


@dataclass(frozen=True)
class Opener:
    """What calls may be wrapped in.

    Args:
        leads: spellings of what stands before the calls.
        closer: stands after them.
        is_list: whether they are elements of a JSON list; otherwise objects on lines of their own.
    """

    leads: tuple[str, ...] = ("",)
    closer: str = ""
    is_list: bool = False


_WRAPPERS = (
    Opener(),
    Opener(("```json", "```JSON", "```tool_call", "```"), "```"),
    Opener(("<tools>",), "</tools>"),
)
OPENERS = (*_WRAPPERS, *(replace(opener, is_list=True) for opener in _WRAPPERS))

MOST_HEADS = 1500
"""Of beginnings that a grammar tells apart; llguidance follows 2,000 alternatives at once."""


def openers_for(count: int) -> tuple[Opener, ...]:
    """Return the openers of a grammar of so many tools: all of them, or the most usual ones."""
    return next((OPENERS[:n] for n in (len(OPENERS), len(_WRAPPERS), 1) if n * count <= MOST_HEADS), ())


# The grammar


def heads_pattern(names: Collection[str], openers: Sequence[Opener]) -> str:
    """Return a regular expression of every text from which on an answer is a call."""
    known = "|".join(literal_pattern(to_json(name)) for name in names)
    return "|".join(_head_pattern(opener, f"({known})") for opener in openers)


def opener_rules(
    names: Sequence[str], arguments: Sequence[Any], key: str, openers: Sequence[Opener], parallel: int
) -> tuple[list[str], dict[str, str]]:
    """Return the alternatives of an answer that is made of calls in these openers, and their Lark rules.

    Args:
        names: of the tools.
        arguments: their schemas; the rule ``args_<index>`` writes one in the form of ``in_json_form``.
        key: of a call's arguments.
        openers: to take in.
        parallel: the most calls in one answer.
    """
    rules = {
        "LOOSE": f"/{_SPACE},{_SPACE}{literal_pattern(to_json(key))}{_SPACE}:{_SPACE}/ & "
        f"~/{literal_pattern(f', {to_json(key)}: ')}/",
        "BRACE": f"/{_SPACE}\\}}/",
        "COMMA": f"/{_SPACE},{_SPACE}/",
        "LINE": r"/[ \t]{0,8}\r?\n([ \t]{0,80}\r?\n)?[ \t]{0,80}/",
        "object": " | ".join(f"object_{index}" for index in range(len(names))),
    }
    for index, (name, schema) in enumerate(zip(names, arguments, strict=True)):
        rules |= {
            f"loose_{index}": f"%json {to_json({**json.loads(in_json_form(schema)), 'x-guidance': _LOOSE_FORM})}",
            f"rest_{index}": f'{to_json(f", {to_json(key)}: ")} args_{index} "}}" | LOOSE loose_{index} BRACE',
            f"object_{index}": f"/{_object_pattern(_SPACE, literal_pattern(to_json(name)))}/ rest_{index}",
        }
    answers = []
    for at, opener in enumerate(openers):
        heads = (_head_pattern(opener, literal_pattern(to_json(name))) for name in names)
        rules[f"first_{at}"] = " | ".join(f"/{head}/ rest_{index}" for index, head in enumerate(heads))
        more = f" ({'COMMA' if opener.is_list else 'LINE'} object){{0,{parallel - 1}}}" if parallel > 1 else ""
        # Another call may follow a line break; so may nothing.
        answers.append(f"first_{at}{more} {_close(opener)} {'LINE?' if parallel > 1 else ''}".strip())
    return answers, rules


def literal_pattern(text: str) -> str:
    """Return a literal text as part of a regular expression of Lark."""
    return "".join(c if c.isalnum() or c == "_" or not c.isascii() else f"\\x{ord(c):02X}" for c in text)


def _head_pattern(opener: Opener, name: str) -> str:
    lead = "|".join(map(literal_pattern, opener.leads))
    bracket = r"\[" + _ANY_BLANKS if opener.is_list else ""
    return f"{_ANY_BLANKS}({lead}){_ANY_BLANKS}{bracket}{_object_pattern(_ANY_BLANKS, name)}"


def _object_pattern(blanks: str, name: str) -> str:
    return blanks.join((r"\{", '"name"', ":", name))


def _close(opener: Opener) -> str:
    marks = [*([r"\]"] if opener.is_list else []), *([literal_pattern(opener.closer)] if opener.closer else [])]
    return f"/{''.join(_SPACE + mark for mark in marks)}/" if marks else ""


# The parser

_NEVER, _UNDECIDED = -2, -1


@dataclass(frozen=True)
class Opened:
    """The beginning of calls in a text.

    Args:
        opener: that the text begins with.
        begin: where the first call's object begins.
    """

    opener: Opener
    begin: int


def find_opener(text: str, at: int, names: Collection[str], openers: Sequence[Opener]) -> tuple[Opened | None, bool]:
    """Return the beginning of calls at ``at``; without one, whether more text may still make it one."""
    is_undecided = False
    for opener in openers:
        for lead in opener.leads:
            begin = _follow(text, at, [lead, "["] if opener.is_list else [lead])
            begin = skip_blanks(text, begin) if begin >= 0 else begin
            end = _end_of_head(text, begin, names) if begin >= 0 else begin
            if end >= 0:
                return Opened(opener, begin), False
            is_undecided = is_undecided or end == _UNDECIDED
    return None, is_undecided


def skip_blanks(text: str, at: int) -> int:
    """Return where white space that begins at ``at`` ends."""
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at


def _end_of_head(text: str, at: int, names: Collection[str]) -> int:
    at = _follow(text, at, ["{", '"name"', ":"])
    return at if at < 0 else max(_follow(text, at, [to_json(name)]) for name in names)


def _follow(text: str, at: int, marks: Sequence[str]) -> int:
    """Where a run of marks ends, white space before each; ``_UNDECIDED`` where the text ends inside of it."""
    for mark in marks:
        at = skip_blanks(text, at)
        if not text.startswith(mark, at):
            return _UNDECIDED if mark.startswith(text[at : at + len(mark)]) else _NEVER
        at += len(mark)
    return at
