"""How often drafted tokens are accepted, by drafter and support."""

from __future__ import annotations

from collections import defaultdict
from weakref import WeakKeyDictionary

from agentspec.sequence import Sequence as TokenSequence
from agentspec.stats import FORCED


class AcceptanceRates:
    """How often tokens are accepted, by drafter and evidence: what all requests taught, moved by what this one did.

    The more evidence, the higher the chance that is assumed before anything was seen; assumptions weigh little. Old
    observations fade. The samples of a request learn together.
    """

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], _Count] = {}
        self._own: WeakKeyDictionary[TokenSequence, _Own] = WeakKeyDictionary()

    def __call__(self, sequence: TokenSequence, source: str, evidence: int) -> float:
        """The chance that a token of this drafter and evidence is accepted, where it is reached."""
        if source == FORCED:
            return 1.0
        assumed = self.overall(source, evidence)
        own = self._own.get(_request_of(sequence))
        return assumed if own is None else own.rate(source, evidence, assumed)

    def overall(self, source: str, evidence: int) -> float:
        """The same, over all requests."""
        assumed = 0.7 if evidence == 0 else 1 - 1 / (1 + 0.35 * evidence)
        return self._all.get((source, evidence), _Count(_ALL_MEMORY)).rate(assumed)

    def learn(self, sequence: TokenSequence, source: str, evidence: int, accepted: bool) -> None:
        """A token was reached; whether it was accepted."""
        own = self._own.setdefault(_request_of(sequence), _Own())
        own.add(source, evidence, accepted, expected=self.overall(source, evidence))
        self._all.setdefault((source, evidence), _Count(_ALL_MEMORY)).add(accepted)


_ALL_MEMORY, _OWN_MEMORY = 500, 50  # observations that count, about


_PRIOR_WEIGHT = 4.0  # observations that an assumption is worth


def _request_of(sequence: TokenSequence) -> TokenSequence:
    """The sequence that stands for its request: the first of its samples."""
    return sequence.siblings[0] if sequence.siblings else sequence


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
        """Hits over expected ones; 1 before there are any."""
        return (self._hits + _PRIOR_WEIGHT) / (self._expected + _PRIOR_WEIGHT)


class _Own:
    """What one request taught: of each drafter and evidence, and of each drafter over all evidence.

    The latter tells soon that nothing in this text repeats, which no single evidence was seen often enough to tell.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], _Count] = defaultdict(lambda: _Count(_OWN_MEMORY))
        self._sources: dict[str, _Count] = defaultdict(lambda: _Count(_OWN_MEMORY))

    def add(self, source: str, evidence: int, hit: bool, expected: float) -> None:
        self._counts[source, evidence].add(hit)
        self._sources[source].add(hit, expected)

    def rate(self, source: str, evidence: int, overall: float) -> float:
        assumed = min(overall * self._sources[source].over_expectation(), max(overall, _MOST_LIFTED))
        return self._counts[source, evidence].rate(assumed)


_MOST_LIFTED = 0.95  # the chance up to which a request that does better than others is trusted beyond them
