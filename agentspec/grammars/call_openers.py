"""Openers: how models begin tool calls at the start of an answer, in other spellings than their own format's.

Models drop the tag of their tool-call format, wrap the JSON in another one, or put it into a fenced block, and indent
it as they like. Such an answer is a call from the value of ``"name"`` on, where that is the name of a tool. Until then
everything may still become plain text. One description serves both sides: the grammar (``opener_rules``) and the
parser (``find_opener``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from agentspec.grammars.schema_tools import to_json

BLANKS = " \t\r\n"
"""White space of JSON."""

_ANY_BLANKS = r"[ \t\r\n]*"
"""Before a call is certain: plain text is free to hold as much of it."""

_SPACE = r"[ \t]{0,8}(\r?\n[ \t]{0,80})?"
"""Inside a call: one line break and an indent at most, so that no model loops in white space."""

_LOOSE_FORM = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": _SPACE,
}


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
    leads = "|".join(map(_lead_pattern, openers))
    return f"({leads})({'|'.join(map(_name_pattern, names))})"


def opener_rules(
    names: Sequence[str], arguments: Sequence[str], key: str, openers: Sequence[Opener], parallel: int
) -> tuple[list[str], dict[str, str]]:
    """Return the alternatives of an answer that is made of calls in these openers, and their Lark rules.

    Args:
        names: of the tools.
        arguments: their schemas as ``in_json_form`` gives them; the rule ``args_<index>`` writes one.
        key: of a call's arguments.
        openers: to take in.
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
        # Another call may follow a line break; so may nothing.
        answers.append(f"first_{at}{more} {_close(opener)} {'LINE?' if parallel > 1 else ''}".strip())
    return answers, rules


def _loose(schema: str) -> str:
    """A schema as ``in_json_form`` gives it, its instances with white space of their own."""
    known = json.loads(schema)
    return to_json({**known, "x-guidance": {**known.get("x-guidance", {}), **_LOOSE_FORM}})


@functools.lru_cache(maxsize=4096)
def literal_pattern(text: str) -> str:
    """Return a literal text as part of a regular expression of Lark."""
    return "".join(c if c.isalnum() or c == "_" or not c.isascii() else f"\\x{ord(c):02X}" for c in text)


def _name_pattern(name: str) -> str:
    return literal_pattern(to_json(name))


def _lead_pattern(opener: Opener) -> str:
    """Everything up to the value of the first name."""
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
