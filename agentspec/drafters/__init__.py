"""The drafter seam, and the contract that keeps the output exact.

1. A drafted token is either sampled from the q that is reported, or a function of its context (q one-hot).
2. Whether to draft one more token is decided before that token is drawn. A drawn token is never dropped: not for low
   confidence, not because the target would forbid it. (A token that is a function of its context may be left out:
   leaving it out is a function of the context too.)
3. The drafter of position i is chosen from the context, drafted prefix included, never from what it drew.
4. The round's ``GrammarCursor`` decides what is legal, for the drafter and for the target.

A drafter that keeps the contract may propose anything, at any cost to speed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.batch import Batch
from agentspec.drafters.draft import Draft as Draft
from agentspec.drafters.draft import DraftBudget as DraftBudget
from agentspec.drafters.draft import DraftRow as DraftRow
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel


class Drafter(ABC):
    """A source of tokens for the target to check.

    ::

        class Repeat(Drafter):
            name = "repeat"

            def propose(self, batch, budget, cursor):
                last = [sequence.context[-1] for sequence in batch.sequences]
                tokens = [[token] * n for token, n in zip(last, budget.of(self.name))]
                return Draft.of_tokens(tokens, self.name, batch.device)

    Where tokens are drawn, ``Draft.of_tokens`` also takes ``q=``, ``[B, K, V]``.
    """

    name = ""
    """Under which the drafter's tokens are counted; that of its class unless it gives one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = cls.name or cls.__name__

    @abstractmethod
    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Draft at most ``budget.of(self.name)[b]`` tokens for row b, after the place where ``cursor`` stands.

        Args:
            batch: the sequences of the round.
            budget: the most tokens to draft.
            cursor: holds the contexts and knows the legal tokens. It is to consume what is drafted where a drafter
                asks about the positions after that.
        """

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Get ready for contexts that will be drafted for soon. Costs time, changes nothing."""
        return

    def models(self) -> Mapping[str, LanguageModel]:
        """Return the models that tokens are drawn from, one pass each, by the name of the drafter that counts them."""
        return {}


class NoDrafter(Drafter):
    """A drafter that proposes nothing: plain decoding, one target call per token."""

    name = "none"

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Return an empty draft."""
        return Draft.of_tokens([()] * len(batch), self.name, batch.device)


class _BareDrafter(Drafter):
    """A drafter around an object that has ``propose`` and nothing else of the seam."""

    def __init__(self, bare: Any) -> None:
        self.name = type(bare).__name__
        self._bare = bare

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        draft: Draft = self._bare.propose(batch, budget, cursor)
        return draft


def as_drafter(drafter: Drafter | None) -> Drafter:
    """Return the drafter, with the defaults of ``Drafter`` where it is no subclass of it; None proposes nothing."""
    if drafter is None:
        return NoDrafter()
    return drafter if isinstance(drafter, Drafter) else _BareDrafter(drafter)
