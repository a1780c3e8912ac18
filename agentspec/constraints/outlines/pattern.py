"""JSON Schema's ``pattern`` as a regular expression over JSON strings.

Only what means the same in ECMA 262, in Python's ``re`` and here is read, and what differs a little is read as what
all of them take: ``\\d`` and ``\\w`` are ASCII, ``.`` is no line separator. Anything else is refused by name.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

from agentspec.constraints.outlines.text import CHARACTER, Pattern, Ranges, character_of, complement, singles, union
from agentspec.errors import shown

_NO_LINE_END = complement(singles("\n\r\u2028\u2029"))
_SMALLEST: dict[str, Ranges] = {  # what all dialects take for a digit, part of a word, space
    "d": ((0x30, 0x39),),
    "w": union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]),
    "s": union([(0x2000, 0x200A)], singles(" \t\n\r\f\v\u00a0\u1680\u2028\u2029\u202f\u205f\u3000")),
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_GROUP = re.compile(r"\((?:\?:|(?!\?))")


@functools.cache
def _shorthand(name: str, largest: bool) -> Ranges:
    """The characters of ``\\d`` and its like: those all dialects know, or those that any does (Python: Unicode)."""
    if name.isupper():
        return complement(_shorthand(name.lower(), not largest))
    if not largest:
        return _SMALLEST[name]
    is_member: dict[str, Callable[[str], bool]] = {"d": str.isdecimal, "w": str.isalnum, "s": str.isspace}
    known = ((c, c) for c in range(sys.maxunicode + 1) if is_member[name](chr(c)))
    return union(_SMALLEST[name], known, singles("\ufeff") if name == "s" else ())


def pattern(source: str) -> Pattern:
    """The insides of the JSON strings in which ``source`` is found.

    Raises:
        ValueError: for what is not read; says what.
    """
    reader = _Reader(source)
    found = reader.branches(at_top=True)
    if reader.at < len(source):
        raise ValueError(f"unbalanced {shown(source[reader.at])} in the pattern {shown(source)}")
    return found


@dataclass
class _Reader:
    """Recursive descent over a pattern."""

    source: str
    at: int = 0

    def branches(self, *, at_top: bool) -> Pattern:
        read = [self._branch(at_top)]
        while self._take("|"):
            read.append(self._branch(at_top))
        longest = [branch.longest for branch in read]
        return Pattern(
            f"(?:{'|'.join(branch.regex for branch in read)})",
            min(branch.shortest for branch in read),
            None if None in longest else max(n for n in longest if n is not None),
        )

    def _branch(self, at_top: bool) -> Pattern:
        """A sequence. At the top, where it is not anchored anything may stand beside it."""
        anything = Pattern(f"{CHARACTER}*", 0, None)
        parts = [] if at_top and self._take("^") else [anything] if at_top else []
        is_open = at_top
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            if at_top and self._is_end() and self._take("$"):
                is_open = False
                break
            parts.append(self._repeated())
        parts += [anything] if is_open else []
        return Pattern(
            "".join(part.regex for part in parts),
            sum(part.shortest for part in parts),
            _total(part.longest for part in parts),
        )

    def _repeated(self) -> Pattern:
        atom = self._atom()
        low, high = self._counts()
        if (low, high) == (1, 1):
            return atom
        self._take("?")  # lazy or not, the texts are the same
        if self._peek() and self._peek() in "*+?{":
            self._refuse("a repetition of a repetition")
        times = f"{{{low},{'' if high is None else high}}}"
        longest = None if high is None or atom.longest is None else high * atom.longest
        return Pattern(f"(?:{atom.regex}){times}", low * atom.shortest, 0 if atom.longest == 0 else longest)

    def _counts(self) -> tuple[int, int | None]:
        for sign, counts in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._take(sign):
                return counts
        if count := _COUNT.match(self.source, self.at):
            self.at = count.end()
            low = int(count[1])
            high = low if not count[2] else int(count[3]) if count[3] else None
            if high is not None and high < low:
                self._refuse(f"the count {count[0]}")
            return low, high
        return 1, 1

    def _atom(self) -> Pattern:
        if group := _GROUP.match(self.source, self.at):
            self.at = group.end()
            return self._group()
        character = self._peek()
        if character in "(^$*+?{":
            self._refuse(repr(self.source[self.at : self.at + 3] if character == "(" else character))
        self.at += 1
        if character == ".":
            return _one(_NO_LINE_END)
        if character == "[":
            return _one(self._class())
        return _one(self._escape() if character == "\\" else singles(character))

    def _group(self) -> Pattern:
        inside = self.branches(at_top=False)
        if not self._take(")"):
            self._refuse("an open group")
        return inside

    def _class(self) -> Ranges:
        is_negated = self._take("^")
        members: list[Ranges] = []
        while not self._take("]"):
            low = self._member(is_negated)
            if self._peek() == "-" and self._peek(1) not in ("]", ""):
                self.at += 1
                low = self._range(low, self._member(is_negated))
            members.append(low)
        if not members:
            self._refuse("an empty class")
        return complement(union(*members)) if is_negated else union(*members)

    def _member(self, is_negated: bool) -> Ranges:
        character = self._peek()
        self.at += 1
        if character in ("", "["):  # Python warns of a "[" in a class, others nest classes
            self._refuse("'[' in a class" if character else "an open class")
        return self._escape(is_negated) if character == "\\" else singles(character)

    def _range(self, low: Ranges, high: Ranges) -> Ranges:
        first, last = low[0][0], high[0][1]
        if low != ((first, first),) or high != ((last, last),) or first > last:
            self._refuse("a range between other than two characters in their order")
        return ((first, last),)

    def _escape(self, is_negated: bool = False) -> Ranges:
        character = self._peek()
        self.at += 1
        if character and character in "dwsDWS":
            return _shorthand(character, is_negated)
        if character in _CONTROLS:
            return singles(_CONTROLS[character])
        if number := _HEX.match(self.source, self.at - 1):
            self.at = number.end()
            return singles(chr(int(number[1] or number[2], 16)))
        if not character or character.isalnum() or not character.isascii():
            self._refuse(f"\\{character}")
        return singles(character)

    def _is_end(self) -> bool:
        return self._peek() == "$" and self._peek(1) in ("", "|")

    def _peek(self, ahead: int = 0) -> str:
        return self.source[self.at + ahead : self.at + ahead + 1]

    def _take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{what} in the pattern {shown(self.source)}")


def _one(characters: Ranges) -> Pattern:
    return Pattern(character_of(characters), 1, 1)


def _total(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(n for n in known if n is not None)
