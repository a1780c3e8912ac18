"""Find stop strings in a growing text, and the end that they set, in text and in tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentspec.runtime.detokenizer import Detokenizer, overlap


@dataclass(frozen=True)
class Ending:
    """Where a stop string ends a sequence.

    Args:
        text: of the sequence up to its end.
        tokens: the number of them up to the end.
    """

    text: str
    tokens: int


class StopStrings:
    """The stop strings of one sequence.

    A stop string that holds a token without text (a special token) is searched where every token is spelled.

    Args:
        stops: to search for; the earliest counts.
        detokenizer: of the sequence.
        keep: whether text and tokens keep a stop string that is found.
    """

    def __init__(self, stops: Sequence[str], detokenizer: Detokenizer, keep: bool = False) -> None:
        hidden = [stop for stop in stops if any(mark in stop for mark in detokenizer.textless)]
        self._shown = detokenizer
        self._spelled = detokenizer.spelled if hidden else None
        self._plain = _Search(detokenizer, [stop for stop in stops if stop not in hidden])
        self._hidden = _Search(self._spelled, hidden) if self._spelled is not None else None
        self._keep = keep

    def find(self) -> Ending | None:
        """Return where the text ends, if a stop string is complete. Must be called after every token."""
        found = [self._ending(*place) for place in self._plain.new(self._keep)]
        if self._hidden is not None:
            found += [self._hidden_ending(*place) for place in self._hidden.new(self._keep)]
        return min(found, key=lambda ending: (len(ending.text), ending.tokens), default=None)

    def settled(self) -> tuple[int, int]:
        """Return how many characters and tokens no stop string can still remove."""
        text = self._plain.settled
        tokens = self._whole_tokens(text)
        if self._hidden is None or self._spelled is None or not self._hidden.open:
            return text, tokens
        count, extra = _tokens_before(self._spelled, self._hidden.settled)
        known = self._shown.ends[:count]
        end = next((end for end in reversed(known) if end is not None), 0)
        if extra and (not known or known[-1] is not None) and not self._shown.skips(count):
            end += extra
        return min(text, end), min(tokens, count)

    def _whole_tokens(self, settled: int) -> int:
        """Return how many tokens have text that is whole and lies within the settled text."""
        shown = self._shown
        if shown.is_whole and settled == len(shown.text):
            return shown.length
        ends = shown.ends
        return next((n for n in range(len(ends), 0, -1) if (end := ends[n - 1]) is not None and end <= settled), 0)

    def _ending(self, begin: int, stop: str) -> Ending:
        if self._keep:
            return Ending(self._shown.text[: begin + len(stop)], self._shown.length)
        count, extra = _tokens_before(self._shown, begin)
        return Ending(self._shown.text[:begin], _with_part(self._shown, count) if extra else count)

    def _hidden_ending(self, begin: int, stop: str) -> Ending:
        assert self._spelled is not None
        count, extra = _tokens_before(self._spelled, begin)
        text = self._shown.text_of(count)
        if extra and not self._shown.skips(count):
            text += self._spelled.text[begin - extra : begin]
        if self._keep:
            return Ending(text + stop, self._spelled.length)
        return Ending(text, _with_part(self._spelled, count) if extra else count)


class _Search:
    """A search for some stop strings in a growing text."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._searched = 0  # length of the text known to hold no stop string

    def new(self, by_end: bool) -> Iterable[tuple[int, str]]:
        """Return the place of the earliest new stop string, if any: the one that begins, or ends, first."""
        if not self._stops:
            return []
        text = self._detokenizer.text
        found = [(text.find(stop, max(0, self._searched - len(stop) + 1)), stop) for stop in self._stops]
        self._searched = len(text)
        found = [(at, stop) for at, stop in found if at >= 0]
        return sorted(found, key=lambda place: place[0] + by_end * len(place[1]))[:1]

    @property
    def open(self) -> int:
        """Characters at the end of the text that may become a stop string."""
        return max((overlap(self._detokenizer.text, stop) for stop in self._stops), default=0)

    @property
    def settled(self) -> int:
        """Length of the text that precedes those."""
        return len(self._detokenizer.text) - self.open


def _tokens_before(detokenizer: Detokenizer, at: int) -> tuple[int, int]:
    """Return the tokens wholly before a place of the text, and the characters before it of the next one."""
    ends = detokenizer.ends
    for count in range(len(ends), 0, -1):
        end = ends[count - 1]
        if end is not None and end <= at:
            return count, at - end
    return 0, at


def _with_part(detokenizer: Detokenizer, count: int) -> int:
    """Return the count of tokens with the next that has text: several more, where they make one character."""
    ends = detokenizer.ends
    return next((n + 1 for n in range(count, len(ends)) if ends[n] is not None), len(ends))
