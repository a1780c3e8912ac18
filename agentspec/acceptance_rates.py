"""How often drafted tokens are accepted, by drafter and support."""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakKeyDictionary

from agentspec.sequence import RequestGroup
from agentspec.sequence import Sequence as TokenSequence
from agentspec.stats import FORCED


class AcceptanceRates:
    """The rates at which tokens are accepted, by drafter and support: learnt from all requests, moved by this one.

    The more support, the higher the chance that is assumed before anything was seen; assumptions weigh little. Old
    observations fade. The samples of a request group learn together.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], _Count] = {}
        self._own: WeakKeyDictionary[TokenSequence | RequestGroup, _Own] = WeakKeyDictionary()

    def __call__(self, sequence: TokenSequence, source: str, support: int) -> float:
        """Return the chance that a token of this drafter and support is accepted, where it is reached."""
        if source == FORCED:
            return 1.0
        assumed = self.overall(source, support)
        own = self._own.get(sequence.group or sequence)
        return assumed if own is None else own.rate(source, support, assumed)

    def overall(self, source: str, support: int) -> float:
        """Return the same, over all requests."""
        assumed = 0.7 if support == 0 else 1 - 1 / (1 + 0.35 * support)
        return self._all.get((source, support), _Count(_ALL_MEMORY)).rate(assumed)

    def learn(self, sequence: TokenSequence, source: str, support: int, accepted: bool) -> None:
        """Count a token that was reached, accepted or not."""
        own = self._own.setdefault(sequence.group or sequence, _Own())
        own.add(source, support, accepted, expected=self.overall(source, support))
        self._all.setdefault((source, support), _Count(_ALL_MEMORY)).add(accepted)


_ALL_MEMORY, _OWN_MEMORY = 500, 50  # observations that count, about

_PRIOR_WEIGHT = 4.0  # observations that an assumption is worth


class _Count:
    """Hits among tries, and how many were expected; the older, the less they count."""

    def __init__(self, memory: int) -> None:
        self._keep = 1 - 1 / memory
        self._hits = self._tries = self._expected = 0.0

    def add(self, hit: bool, expected: float = 0.0) -> None:
        self._hits = self._hits * self._keep + hit
        self._tries = self._tries * self._keep + 1
        self._expected = self._expected * self._keep + expected

    def rate(self, assumed: float) -> float:
        return (self._hits + _PRIOR_WEIGHT * assumed) / (self._tries + _PRIOR_WEIGHT)

    def over_expectation(self) -> float:
        """Return hits over expected ones; 1 before there are any."""
        return (self._hits + _PRIOR_WEIGHT) / (self._expected + _PRIOR_WEIGHT)


class _Own:
    """What one request taught: of each drafter and support, and of each drafter over all support.

    The latter shows soon that nothing in this text repeats, before any single support was seen often enough.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Count] = defaultdict(lambda: _Count(_OWN_MEMORY))
        self._sources: dict[str, _Count] = defaultdict(lambda: _Count(_OWN_MEMORY))

    def add(self, source: str, support: int, hit: bool, expected: float) -> None:
        self._counts[source, support].add(hit)
        self._sources[source].add(hit, expected)

    def rate(self, source: str, support: int, overall: float) -> float:
        assumed = min(overall * self._sources[source].over_expectation(), max(overall, _MOST_LIFTED))
        return self._counts[source, support].rate(assumed)


_MOST_LIFTED = 0.95  # the chance up to which a request that does better than others is trusted beyond them
