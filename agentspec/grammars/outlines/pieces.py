"""Rewrite parts of a regular expression with anchors inside as expressions without any.

An automaton reads a text from its beginning to its end, and knows no ``^`` and ``$`` between. So a part is kept as up
to four expressions: of texts that may stand anywhere, only at the beginning, only at the end, and only as the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from agentspec.grammars.outlines.text import Pattern

Place = tuple[bool, bool]
"""Whether nothing may precede a text, and whether nothing may follow it."""

ANYWHERE: Place = (False, False)


@dataclass(frozen=True)
class Piece:
    """A part of a regular expression: the patterns of its texts by where these may stand."""

    patterns: Mapping[Place, Pattern]

    @property
    def is_anchored(self) -> bool:
        """Whether some of its texts may not stand anywhere."""
        return any(place != ANYWHERE for place in self.patterns)

    def whole(self, anything: Pattern | None = None) -> Pattern | None:
        """Return the pattern of whole texts; None where there is none.

        Args:
            anything: precedes and follows a text that is not anchored there; None for nothing.
        """
        beside = {False: anything or EMPTY, True: EMPTY}
        return _either(
            _joined(_joined(beside[begins], pattern), beside[ends]) for (begins, ends), pattern in self.patterns.items()
        )


EMPTY = Pattern("", 0, 0)
NOTHING = Piece({})
"""No text at all: what is left of ``a^``."""


def piece(pattern: Pattern, place: Place = ANYWHERE) -> Piece:
    """Return a part whose texts may all stand at one kind of place."""
    return Piece({place: pattern})


def either(pieces: Iterable[Piece]) -> Piece:
    """Return the texts of any of the parts."""
    return _collected((place, pattern) for part in pieces for place, pattern in part.patterns.items())


def sequence(first: Piece, second: Piece, refuse: Callable[[str], object]) -> Piece:
    """Return the texts of two parts one after the other.

    Args:
        first: ends where the other begins.
        second: begins where the other ends.
        refuse: raises; given the name of a part that dialects read in different ways.
    """
    found = []
    for (left_place, left), (right_place, right) in product(first.patterns.items(), second.patterns.items()):
        if left_place[1] and right.is_line_end:
            refuse("'$' before a line end, which Python takes for the end,")
        # The text before a beginning is empty, and so is the text after an end.
        if (right_place[0] and left.shortest) or (left_place[1] and right.shortest):
            continue
        place = (left_place[0] or right_place[0], left_place[1] or right_place[1])
        found.append((place, _joined(EMPTY if right_place[0] else left, EMPTY if left_place[1] else right)))
    return _collected(found)


def repeated(part: Piece, low: int, high: int | None, refuse: Callable[[str], object]) -> Piece:
    """Return the texts of so many texts of a part; None for any number."""
    if (low, high) == (0, 1):
        return either([piece(EMPTY), part])
    if part.is_anchored:
        refuse("an anchor in a repetition")
    pattern = part.patterns.get(ANYWHERE)
    if pattern is None:
        return NOTHING if low else piece(EMPTY)
    times = f"{{{low},{'' if high is None else high}}}"
    longest = None if high is None or pattern.longest is None else high * pattern.longest
    is_line_end = pattern.is_line_end and low <= 1 and high != 0
    return piece(
        Pattern(
            f"(?:{pattern.regex}){times}",
            low * pattern.shortest,
            0 if pattern.longest == 0 else longest,
            is_line_end or (pattern.is_line_end and pattern.shortest == 0 and high != 0),
        )
    )


def _collected(found: Iterable[tuple[Place, Pattern]]) -> Piece:
    by_place: dict[Place, list[Pattern]] = {}
    for place, pattern in found:
        by_place.setdefault(place, []).append(pattern)
    merged = {place: _either(patterns) for place, patterns in by_place.items()}
    return Piece({place: pattern for place, pattern in merged.items() if pattern is not None})


def _either(patterns: Iterable[Pattern]) -> Pattern | None:
    known = list(dict.fromkeys(patterns))
    if len(known) < 2:
        return known[0] if known else None
    longest = [pattern.longest for pattern in known]
    return Pattern(
        f"(?:{'|'.join(dict.fromkeys(pattern.regex for pattern in known))})",
        min(pattern.shortest for pattern in known),
        None if None in longest else max(n for n in longest if n is not None),
        any(pattern.is_line_end for pattern in known),
    )


def _joined(left: Pattern, right: Pattern) -> Pattern:
    longest = None if left.longest is None or right.longest is None else left.longest + right.longest
    is_line_end = (left.is_line_end and not right.shortest) or (right.is_line_end and not left.shortest)
    return Pattern(left.regex + right.regex, left.shortest + right.shortest, longest, is_line_end)
