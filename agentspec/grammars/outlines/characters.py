"""Sets of characters by their names in regular expressions."""

from __future__ import annotations

import functools
import sys
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable

from agentspec.grammars.outlines.text import Ranges, complement, singles, union

NO_LINE_END = complement(singles("\n"))
NO_LINE_END_OF_ALL = complement(singles("\n\r\u2028\u2029"))

_SMALLEST: dict[str, Ranges] = {  # a digit, part of a word, space in all dialects
    "d": ((0x30, 0x39),),
    "w": union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": union([(0x2000, 0x200A)], singles(" \t\n\r\f\v\u00a0\u1680\u2028\u2029\u202f\u205f\u3000")),
}
_MEMBERS: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": str.isspace,
}


def _all(is_member: Callable[[str], bool]) -> Ranges:
    return union((c, c) for c in range(sys.maxunicode + 1) if is_member(chr(c)))


@functools.cache
def python_shorthand(name: str) -> Ranges:
    r"""Return the characters of ``\d`` and its like, as Python's ``re`` takes them."""
    return complement(python_shorthand(name.lower())) if name.isupper() else _all(_MEMBERS[name])


@functools.cache
def common_shorthand(name: str, largest: bool) -> Ranges:
    r"""Return the characters of ``\d`` and its like in all dialects; or those in any dialect."""
    if name.isupper():
        return complement(common_shorthand(name.lower(), not largest))
    if not largest:
        return _SMALLEST[name]
    return union(_SMALLEST[name], python_shorthand(name), singles("\ufeff") if name == "s" else ())


@functools.cache
def category(name: str) -> Ranges | None:
    """Return the characters of a general category of Unicode (``L``, ``Lu``); None for another name."""
    found = _all(lambda c: unicodedata.category(c).startswith(name)) if name and name[0] in "CLMNPSZ" else ()
    return found or None


def without_case(ranges: Ranges) -> Ranges:
    """Return a set with all characters that differ from one of its own in case alone."""
    variants = _variants()
    cased = list(variants)
    members = (c for low, high in ranges for c in cased[bisect_left(cased, low) : bisect_right(cased, high)])
    return union(ranges, *(variants[c] for c in members))


@functools.cache
def _variants() -> dict[int, Ranges]:
    """Return by each cased character the set of those that differ from it in case alone."""
    same: dict[str, list[int]] = {}
    for code in range(sys.maxunicode + 1):
        same.setdefault(_folded(chr(code)), []).append(code)
    classes = [union((c, c) for c in codes) for codes in same.values() if len(codes) > 1]
    variants = {c: ranges for ranges in classes for low, high in ranges for c in range(low, high + 1)}
    return dict(sorted(variants.items()))


def _folded(character: str) -> str:
    lower = character.lower()
    lower = lower if len(lower) == 1 else character
    folded = lower.casefold()
    return folded if len(folded) == 1 else lower
