"""How many tokens to draft: gamma, fixed or chosen from what was measured.

The target reads one block as wide as the longest draft in it, so the rows of a round share one width. ``Auto`` takes
the width with the most expected tokens per second, alike for all rows: the expectation from how often tokens of the
same drafter and support were accepted before, the seconds from measured passes. Where nothing pays, that is no draft
at all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Literal

from agentspec.acceptance import Accepted
from agentspec.acceptance_rates import AcceptanceRates
from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter, DraftRow
from agentspec.errors import InvalidRequestError, shown
from agentspec.models import LanguageModel, as_language_model
from agentspec.models.pass_cost import PassCost, measured
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.sequence import Sequence as TokenSequence
from agentspec.stats import FORCED


class DraftLength(ABC):
    """A rule that chooses gamma from what is known before anything is drawn."""

    is_timed = False
    """Whether gamma depends on a clock: under the rejection rule a seed alone does not fix the text then."""

    target: PassCost | None = None
    """What a pass of the target costs, where the rule measures it."""

    @abstractmethod
    def __call__(self, batch: Batch) -> DraftBudget:
        """Return the most tokens to draft for each row; 0 decodes it plainly."""

    def trim(self, batch: Batch, proposed: Draft) -> Draft:
        """Return the part of a draft that is worth its pass. Drawn tokens must stay."""
        return proposed

    def learn(self, batch: Batch, proposed: Draft, accepted: Accepted, timer: PhaseTimer) -> None:
        """Learn from a round, before its commit.

        Args:
            batch: as it was before the round.
            proposed: the draft before it was trimmed.
            accepted: what the round emits.
            timer: of the round so far.
        """
        return

    def remarks(self) -> tuple[str, ...]:
        """Return what a user should know about the drafts: that a draft model does not pay, say."""
        return ()


class Fixed(DraftLength):
    """The same gamma for every row, but for rows whose request names its own. Never past the row's last token.

    Raises:
        InvalidRequestError: for a negative gamma.
    """

    def __init__(self, gamma: int) -> None:
        if gamma < 0:
            raise InvalidRequestError(f"gamma is the number of tokens to draft, 0 or more; got {gamma}.")
        self.gamma = gamma

    def __call__(self, batch: Batch) -> DraftBudget:
        """Return gamma for each row. The last token a row may emit is the target's own, so it is not drafted."""
        wanted = [self.gamma if s.gamma is None else s.gamma for s in batch.sequences]
        return DraftBudget([min(n, s.remaining - 1) for n, s in zip(wanted, batch.sequences, strict=True)])


class Auto(DraftLength):
    """The gamma with the most expected tokens per second; rows whose request names its own keep that.

    Args:
        target: what a pass of the target costs.
        drafts: what a pass of a draft model costs, by the name of its drafter. Tokens of these drafters are drawn,
            one pass each, so how many is chosen before; tokens of others are trimmed afterwards.
        longest: most tokens in a draft.
    """

    is_timed = True

    def __init__(self, target: PassCost, drafts: Mapping[str, PassCost] | None = None, longest: int = 16) -> None:
        self.target: PassCost = target
        self.drafts = dict(drafts or {})
        self.longest = longest
        self.acceptance = AcceptanceRates()
        self._rounds = 0
        self._copiers: set[str] = set()  # drafters whose tokens are functions of their context
        self._in_vain = 0  # rounds since a draft was worth its width

    def __call__(self, batch: Batch) -> DraftBudget:
        """Return up to ``longest`` tokens; for draft models as many as pay."""
        room = [s.remaining - 1 for s in batch.sequences]
        most = [self.longest if s.gamma is None else s.gamma for s in batch.sequences]
        pays = {name: self._to_draw(name, batch) for name in self.drafts}
        if len(batch) > 1 and self._rests():
            pays |= dict.fromkeys(self._copiers, 0)  # of many rows, looking for copies takes a few per cent of a round
        limits = {
            name: [min(width if s.gamma is None else s.gamma, n) for s, n in zip(batch.sequences, room, strict=True)]
            for name, width in pays.items()
        }
        return DraftBudget(list(map(min, most, room)), limits)

    def _rests(self) -> bool:
        """Whether this round looks for no copies: the longer it was in vain, the rarer."""
        step = _PATIENCE if self._in_vain < _PATIENCE**2 else _PATIENCE**2
        return self._in_vain >= _PATIENCE and self._in_vain % step > 0

    def trim(self, batch: Batch, proposed: Draft) -> Draft:
        """Return the draft, trimmed to the width that pays best: the rows share it."""
        if not proposed.width:
            self._in_vain += 1
            return proposed
        drawn, lengths = proposed.drawn_lengths(self.drafts), proposed.lengths
        fixed = [drawn[b] if s.gamma is None else lengths[b] for b, s in enumerate(batch.sequences)]
        gains = [self._chances(s, row) for s, row in zip(batch.sequences, proposed.rows, strict=True)]
        width = best_width(gains, self.target, least=max(fixed))
        self._in_vain = 0 if width else self._in_vain + 1
        return proposed.trim(width)

    def learn(self, batch: Batch, proposed: Draft, accepted: Accepted, timer: PhaseTimer) -> None:
        """Learn costs and acceptance; a token that was trimmed, and came all the same, counts as accepted."""
        self._rounds += 1
        seconds = timer.seconds
        self.target.learn(len(batch), accepted.draft.width + 1, seconds["verify_s"] + seconds["sample_s"])
        for sequence, row, tokens in zip(batch.sequences, proposed.rows, accepted.tokens, strict=True):
            for token, source, support, new in zip(row.tokens, row.source, row.support, tokens, strict=False):
                if source != FORCED:
                    self._copiers |= {source} - self.drafts.keys()
                    self.acceptance.learn(sequence, source, support, token == new)
                if token != new:
                    break

    def remarks(self) -> tuple[str, ...]:
        """Return of each draft model that one sequence by itself is better off without why that is so."""
        found = []
        for name, cost in self.drafts.items():
            rate, share = self.acceptance.overall(name, 0), cost(1, 1) / self.target(1, 1)
            if share >= 1:
                found.append(
                    f"The draft model of {name!r} is no cheaper than the target: it takes {share:.2f} times as long. "
                    "It is left out; choose a smaller one."
                )
            elif not self._paying_width(name, [rate]):
                found.append(
                    f"The draft model of {name!r} does not pay and is left out: {rate:.0%} of its tokens are accepted, "
                    f"and a pass takes {share:.2f} of the target's."
                )
        return tuple(found)

    def _chances(self, sequence: TokenSequence, row: DraftRow) -> list[float]:
        """Return the chance of each drafted token to be reached and accepted."""
        kinds = list(zip(row.source, row.support, strict=True))
        rates = {kind: self.acceptance(sequence, *kind) for kind in set(kinds)}
        return list(accumulate((rates[kind] for kind in kinds), mul))

    def _to_draw(self, name: str, batch: Batch) -> int:
        """Return how many tokens of a draft model pay; where none do, one is tried now and then."""
        width = self._paying_width(name, [self.acceptance(s, name, 0) for s in batch.sequences])
        return width or int(self._rounds % _RETRY == _RETRY - 1)

    def _paying_width(self, name: str, rates: Sequence[float]) -> int:
        """Return how many tokens of a draft model pay where each row accepts them at its own rate."""
        chances = [list(accumulate([rate] * self.longest, mul)) for rate in rates]
        step = self.drafts[name](len(rates), 1)
        return best_width(chances, lambda rows, width: self.target(rows, width) + (width - 1) * step)


_PATIENCE = 4  # rounds in vain after which several rows look for copies only every so many rounds; later, its square
_RETRY = 64  # rounds from one try to the next of a draft model that does not pay
_MARGIN = 1.02  # by which a draft must be expected to win: estimates err, and a wrong one costs


def best_width(chances: Sequence[Sequence[float]], cost: Callable[[int, int], float], least: int = 0) -> int:
    """Return the number of drafted tokens per row with which a token takes the fewest seconds, in the mean of the rows.

    For one row that is the most expected tokens per second. Of several, one that gains much does not outweigh others
    that only wait longer: a request for all of them has to wait for the last.

    Args:
        chances: per row, the chance of each drafted token to be reached and accepted; they fall.
        cost: seconds by rows and tokens per row (the drafted ones and one more).
        least: tokens that are drafted in any case.
    """
    rows, longest = len(chances), max([least, *map(len, chances)])
    tokens = [1 + sum(row[:least]) for row in chances]  # that are expected of each row
    plain = fastest = cost(rows, least + 1) * sum(1 / n for n in tokens)
    best = least
    for width in range(least + 1, longest + 1):
        tokens = [n + sum(row[width - 1 : width]) for n, row in zip(tokens, chances, strict=True)]
        seconds = cost(rows, width + 1) * sum(1 / n for n in tokens)
        if seconds < fastest:
            fastest, best = seconds, width
    return best if fastest * _MARGIN < plain else least


def draft_length_for(
    gamma: int | Literal["auto"] | DraftLength, target: LanguageModel, drafter: Drafter
) -> DraftLength:
    """Return the rule for a decoder's ``gamma``; for ``"auto"`` the models are measured, or their costs read from disk.

    Raises:
        InvalidRequestError: for anything else than an integer >= 0, ``"auto"`` or a rule.
    """
    if isinstance(gamma, DraftLength):
        return gamma
    if isinstance(gamma, int):
        return Fixed(gamma)
    if gamma != "auto":
        raise InvalidRequestError(f"gamma must be an integer, 'auto' or a DraftLength, got {shown(gamma)}.")
    from agentspec.runtime.cache import DiskCache  # here, so that a fixed gamma does without diskcache

    cache = DiskCache()
    drafts = {name: measured(as_language_model(model), cache) for name, model in drafter.models().items()}
    return Auto(measured(target, cache), drafts)
