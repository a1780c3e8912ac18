r"""Translate regular expressions for automata: JSON Schema's ``pattern`` over JSON strings, and those of plain text.

Of a ``pattern`` only the parts with one meaning in ECMA 262, in Python's ``re`` and here are read. Where the meaning
differs a little, the texts that all of them match are taken: ``\d`` and ``\w`` are ASCII, ``.`` is no line separator.
Expressions of plain text are read as by Python's ``re``, and also ``\p{L}`` and its like. Others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from agentspec.errors import shown
from agentspec.grammars.outlines.characters import (
    NO_LINE_END,
    NO_LINE_END_OF_ALL,
    category,
    common_shorthand,
    python_shorthand,
    without_case,
)
from agentspec.grammars.outlines.pieces import ANYWHERE, EMPTY, Piece, either, piece, repeated, sequence
from agentspec.grammars.outlines.text import (
    ANY,
    CHARACTER,
    Pattern,
    Ranges,
    character_of,
    complement,
    intersection,
    plain_character_of,
    singles,
    union,
)

_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d+)(,?)(\d*)\}")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[ux]\{([0-9A-Fa-f]{1,6})\}")
_CATEGORY = re.compile(r"([pP])(?:\{(\w+)\}|([A-Z]))")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>|\?([is]*(?:-[is]+)?):|(?!\?))")
_FLAGS = re.compile(r"\(\?([is]+)\)")
_BEGIN, _END = (True, False), (False, True)


@dataclass(frozen=True)
class Reading:
    r"""The reading of one dialect of regular expressions.

    Args:
        write: writes one character of a set.
        shorthand: returns the characters of ``\d`` and its like, in a negated class or not.
        dot: the characters of ``.``.
        anchors: the signs for the beginning and the end of a text.
        is_plain: whether flags are read, and ``\\U`` with eight digits.
    """

    write: Callable[[Ranges], str]
    shorthand: Callable[[str, bool], Ranges]
    dot: Ranges
    anchors: dict[str, tuple[bool, bool]]
    is_plain: bool


_IN_JSON = Reading(character_of, common_shorthand, NO_LINE_END_OF_ALL, {"^": _BEGIN, "$": _END}, is_plain=False)
_PLAIN = Reading(
    plain_character_of,
    lambda name, is_negated: python_shorthand(name),
    NO_LINE_END,
    {"^": _BEGIN, "$": _END, r"\A": _BEGIN, r"\Z": _END, r"\z": _END},
    is_plain=True,
)


def pattern(source: str) -> Pattern:
    """Translate ``source`` to the inside of the JSON strings in which it is found.

    Raises:
        ValueError: for a part that is not read; names it.
    """
    return _read(source, _IN_JSON, Pattern(f"{CHARACTER}*", 0, None, is_line_end=True))


def plain_pattern(source: str) -> Pattern:
    """Translate ``source`` to the texts that it matches from end to end.

    Raises:
        ValueError: for a part that is not read; names it.
    """
    return _read(source, _PLAIN, None)


def _read(source: str, reading: Reading, beside: Pattern | None) -> Pattern:
    reader = _Reader(source, reading)
    try:
        found = reader.whole().whole(beside)
    except RecursionError as error:
        raise ValueError(f"too many groups in each other in the pattern {source[:80]!r}") from error
    if reader.at < len(source):
        raise ValueError(f"unbalanced {shown(source[reader.at])} in the pattern {shown(source)}")
    return found or Pattern(reading.write(()), 1, 1)


@dataclass
class _Reader:
    """A recursive descent over a pattern."""

    source: str
    reading: Reading
    at: int = 0
    flags: frozenset[str] = frozenset()

    def whole(self) -> Piece:
        if self.reading.is_plain and (flags := _FLAGS.match(self.source)):
            self.at, self.flags = flags.end(), frozenset(flags[1])
        return self.branches()

    def branches(self) -> Piece:
        read = [self._branch()]
        while self._take("|"):
            read.append(self._branch())
        return either(read)

    def _branch(self) -> Piece:
        found = piece(EMPTY)
        while self.at < len(self.source) and self.source[self.at] not in "|)":
            found = sequence(found, self._repeated(), self._refuse)
        return found

    def _repeated(self) -> Piece:
        for sign, place in self.reading.anchors.items():
            if self._take(sign):
                if self._peek() and self._peek() in "*+?{":
                    self._refuse("a repetition of an anchor")
                return piece(EMPTY, place)
        atom = self._atom()
        low, high = self._counts()
        if (low, high) == (1, 1):
            return atom
        self._take("?")  # lazy or not, the texts are the same
        if self._peek() and self._peek() in "*+?{":
            self._refuse("a repetition of a repetition")
        return repeated(atom, low, high, self._refuse)

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

    def _atom(self) -> Piece:
        group = _GROUP.match(self.source, self.at)
        if group and (self.reading.is_plain or group[1] is None):
            self.at = group.end()
            return self._group(group[1])
        character = self._peek()
        if character in "(*+?{":
            self._refuse(repr(self.source[self.at : self.at + 3] if character == "(" else character))
        self.at += 1
        if character == ".":
            return self._one(ANY if "s" in self.flags else self.reading.dot)
        if character == "[":
            return self._one(self._class())
        return self._one(self._folded(self._escape() if character == "\\" else singles(character)))

    def _one(self, characters: Ranges) -> Piece:
        is_line_end = bool(intersection(characters, singles("\n")))
        return Piece({ANYWHERE: Pattern(self.reading.write(characters), 1, 1, is_line_end)})

    def _folded(self, characters: Ranges) -> Ranges:
        return without_case(characters) if "i" in self.flags else characters

    def _group(self, flags: str | None) -> Piece:
        outside = self.flags
        if flags:
            added, _, removed = flags.partition("-")
            self.flags = (self.flags | set(added)) - set(removed)
        inside = self.branches()
        if not self._take(")"):
            self._refuse("an open group")
        self.flags = outside
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
        known = self._folded(union(*members))
        return complement(known) if is_negated else known

    def _member(self, is_negated: bool) -> Ranges:
        character = self._peek()
        self.at += 1
        if character in ("", "["):  # Python warns of a "[" in a class, others nest classes
            self._refuse("'[' in a class" if character else "an open class")
        if character in "&-~|" and self._peek() == character:
            self._refuse(f"{2 * character!r} in a class")
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
            return self.reading.shorthand(character, is_negated)
        if character in _CONTROLS:
            return singles(_CONTROLS[character])
        if number := _HEX.match(self.source, self.at - 1):
            return self._numbered(number)
        if (named := _CATEGORY.match(self.source, self.at - 1)) and (known := category(named[2] or named[3])):
            self.at = named.end()
            return complement(known) if named[1] == "P" else known
        if not character or character.isalnum() or not character.isascii():
            self._refuse(f"\\{character}")
        return singles(character)

    def _numbered(self, number: re.Match[str]) -> Ranges:
        self.at = number.end()
        code = int(next(digits for digits in number.groups() if digits), 16)
        if code > ANY[-1][1]:
            self._refuse(f"the character \\{number[0]}")
        return ((code, code),)

    def _peek(self, ahead: int = 0) -> str:
        return self.source[self.at + ahead : self.at + ahead + 1]

    def _take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{what} in the pattern {shown(self.source)}")
