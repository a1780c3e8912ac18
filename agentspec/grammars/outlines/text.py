r"""Write text inside JSON strings as regular expressions of characters and escapes.

The form is that of both engines: only characters that must be escaped are, by the short escape or as ``\u00XX``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from agentspec.grammars.schema_tools import to_json

Ranges = tuple[tuple[int, int], ...]
"""A set of characters as ranges of code points, ends included, sorted and apart."""

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\\\"}
_META = set("\\.+*?()|[]{}^$#&-~")


def literal(text: str) -> str:
    """Write a regular expression of one text."""
    return "".join("\\" + c if c in _META else c for c in text)


def in_quotes(text: str) -> str:
    """Write a regular expression of one JSON string."""
    return literal(to_json(text).replace("\x7f", "\\u007f"))


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Return the characters of any of the sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    starts = [0, *(high + 1 for _, high in ranges)]
    ends = [*(low - 1 for low, _ in ranges), sys.maxunicode]
    return tuple((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters of both sets."""
    return complement(union(complement(one), complement(other)))


def singles(text: str) -> Ranges:
    """Return the characters of a text."""
    return union((ord(c), ord(c)) for c in text)


_RAW = complement(union([(0, 0x1F), (0x7F, 0x7F), (0xD800, 0xDFFF)], singles('"\\')))
_CHARACTERS = complement(((0xD800, 0xDFFF),))
_NUMBERED = ((0, 0x1F), (0x7F, 0x7F))
ANY = union([(0, sys.maxunicode)])


def character_of(ranges: Ranges) -> str:
    """Write one character of a set as it stands in a JSON string; an expression without matches for the empty set."""
    raw = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in intersection(ranges, _RAW))
    escaped = [rf"\\{_SHORT[c]}" for c in _SHORT if intersection(ranges, ((c, c),))]
    numbered = intersection(ranges, _NUMBERED)
    if numbered == _NUMBERED:
        escaped.append(r"\\u00(?:[01][0-9a-fA-F]|7[fF])")
    else:
        escaped += [rf"\\u00{c >> 4:x}[{c & 15:x}{c & 15:X}]" for low, high in numbered for c in range(low, high + 1)]
    parts = ([f"[{raw}]"] if raw else []) + escaped
    return f"(?:{'|'.join(parts)})" if parts else r"[^\s\S]"


def plain_character_of(ranges: Ranges) -> str:
    """Write one character of a set as it is; an expression without matches for the empty set."""
    kept = intersection(ranges, _CHARACTERS)
    if len(kept) == 1 and kept[0][0] == kept[0][1]:
        return literal(chr(kept[0][0]))
    listed = "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in kept)
    return f"[{listed}]" if kept else r"[^\s\S]"


CHARACTER = character_of(ANY)
"""One character of a JSON string."""


@dataclass(frozen=True)
class Pattern:
    """A regular expression, and the number of characters of the string that its texts stand for.

    Args:
        regex: the expression.
        shortest: the least number of characters.
        longest: the greatest; None for any number.
        is_line_end: whether one of its texts is a line end alone.
    """

    regex: str
    shortest: int
    longest: int | None
    is_line_end: bool = False
