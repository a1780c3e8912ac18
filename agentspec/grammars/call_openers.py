"""Openers of tool calls at the start of an answer, in spellings other than the model's own tool-call format.

Models omit the tag of their format, wrap the JSON in another tag, or put it into a fenced block with any indent. Such
an answer is a call once the value of ``"name"`` is the name of a tool; until then it may still become free text. One
description serves both the grammar (``opener_rules``) and the parser (``find_opener``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from agentspec.grammars.schema_tools import to_json

BLANKS = " \t\r\n"
"""JSON's white space."""

_ANY_BLANKS = r"[ \t\r\n]*"
"""White space before a call is certain: free text may hold any amount of it."""

_SPACE = r"[ \t]{0,8}(\r?\n[ \t]{0,80})?"
"""White space inside a call: at most one line break and an indent, so that no model loops in it."""

_LOOSE_FORM = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _SPACE,
}


@dataclass(frozen=True)
class Opener:
    """The text around calls.

    Args:
        leads: spellings of the text before the calls.
        closer: the text after them.
        is_list: whether the calls are elements of a JSON list; otherwise objects on lines of their own.
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
"""The most pairs of opener and tool name in a grammar; llguidance follows 2,000 alternatives at once."""


def openers_for(count: int) -> tuple[Opener, ...]:
    """Return the openers of a grammar of ``count`` tools: all of them, or the most usual ones."""
    return next((OPENERS[:n] for n in (len(OPENERS), len(_WRAPPERS), 1) if n * count <= MOST_HEADS), ())


# The grammar


def heads_pattern(names: Collection[str], openers: Sequence[Opener]) -> str:
    """Return a regular expression of the beginnings after which an answer is a call."""
    leads = "|".join(map(_lead_pattern, openers))
    return f"({leads})({'|'.join(map(_name_pattern, names))})"


def opener_rules(
    names: Sequence[str], arguments: Sequence[str], key: str, openers: Sequence[Opener], parallel: int
) -> tuple[list[str], dict[str, str]]:
    """Return the alternatives of an answer that begins with one of the openers, and their Lark rules.

    Args:
        names: the names of the tools.
        arguments: the schemas of their arguments in ``in_json_form``; the rule ``args_<index>`` is of the same schema.
        key: the key of a call's arguments.
        openers: the openers of the grammar.
        parallel: the most calls in one answer.
    """
    if not openers:
        return [], {}
    quoted = to_json(key)
    rules = {
        "LOOSE": f"/{_SPACE},{_SPACE}{literal_pattern(quoted)}{_SPACE}:{_SPACE}/ & "
        f"~/{literal_pattern(f', {quoted}: ')}/",
        "BRACE": f"/{_SPACE}\\}}/",
        "COMMA": f"/{_SPACE},{_SPACE}/",
        "LINE": r"/[ \t]{0,8}\r?\n([ \t]{0,80}\r?\n)?[ \t]{0,80}/",
        "object": " | ".join(f"object_{index}" for index in range(len(names))),
    }
    values = [_name_pattern(name) for name in names]
    fixed, begin = to_json(f", {quoted}: "), _object_pattern(_SPACE)
    for index, (value, schema) in enumerate(zip(values, arguments, strict=True)):
        rules |= {
            f"loose_{index}": f"%json {_loose(schema)}",
            f"rest_{index}": f'{fixed} args_{index} "}}" | LOOSE loose_{index} BRACE',
            f"object_{index}": f"/{begin}{value}/ rest_{index}",
        }
    answers = []
    for at, opener in enumerate(openers):
        lead = _lead_pattern(opener)
        rules[f"first_{at}"] = " | ".join(f"/{lead}{value}/ rest_{index}" for index, value in enumerate(values))
        more = f" ({'COMMA' if opener.is_list else 'LINE'} object){{0,{parallel - 1}}}" if parallel > 1 else ""
        # A line break may precede another call, or end the answer.
        answers.append(f"first_{at}{more} {_close(opener)} {'LINE?' if parallel > 1 else ''}".strip())
    return answers, rules


def _loose(schema: str) -> str:
    """Return a schema in ``in_json_form`` whose instances may hold white space."""
    known = json.loads(schema)
    return to_json({**known, "x-guidance": {**known.get("x-guidance", {}), **_LOOSE_FORM}})


@functools.lru_cache(maxsize=4096)
def literal_pattern(text: str) -> str:
    """Return a text as a literal part of a regular expression of Lark."""
    return "".join(c if c.isalnum() or c == "_" or not c.isascii() else f"\\x{ord(c):02X}" for c in text)


def _name_pattern(name: str) -> str:
    return literal_pattern(to_json(name))


def _lead_pattern(opener: Opener) -> str:
    """Return a pattern of the text up to the value of the first name."""
    bracket = r"\[" + _ANY_BLANKS if opener.is_list else ""
    leads = "|".join(map(literal_pattern, opener.leads))
    return f"{_ANY_BLANKS}({leads}){_ANY_BLANKS}{bracket}{_object_pattern(_ANY_BLANKS)}"


def _object_pattern(blanks: str) -> str:
    return blanks.join((r"\{", '"name"', ":", ""))


def _close(opener: Opener) -> str:
    marks = [*([r"\]"] if opener.is_list else []), *([literal_pattern(opener.closer)] if opener.closer else [])]
    return f"/{''.join(_SPACE + mark for mark in marks)}/" if marks else ""


# The parser

_NEVER, _UNDECIDED = -2, -1


@dataclass(frozen=True)
class Opened:
    """An opener found in a text.

    Args:
        opener: the opener.
        begin: the offset of the first call's object.
    """

    opener: Opener
    begin: int


def find_opener(text: str, at: int, names: Collection[str], openers: Sequence[Opener]) -> tuple[Opened | None, bool]:
    """Return the opener found at offset ``at``, or None and whether more text may still complete one."""
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
    """Return the end of the white space at offset ``at``."""
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at


def _end_of_head(text: str, at: int, names: Collection[str]) -> int:
    at = _follow(text, at, ["{", '"name"', ":"])
    return at if at < 0 else max(_follow(text, at, [to_json(name)]) for name in names)


def _follow(text: str, at: int, marks: Sequence[str]) -> int:
    """Return the end of a run of marks, white space before each.

    ``_UNDECIDED`` where the text ends inside the run, ``_NEVER`` where another text is found.
    """
    for mark in marks:
        at = skip_blanks(text, at)
        if not text.startswith(mark, at):
            return _UNDECIDED if mark.startswith(text[at : at + len(mark)]) else _NEVER
        at += len(mark)
    return at
