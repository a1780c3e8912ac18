"""Several drafters, one draft: forced tokens, then the first drafter that proposes something, per position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter, DraftRow
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel
from agentspec.stats import FORCED


class Cascade(Drafter):
    """A drafter that chooses among others, for every position from the context, drafted prefix included.

    Where a grammar leaves one legal token, it is drafted without a drafter and does not count against the budget: the
    target must accept it. Elsewhere the drafters have their turns in order, cheapest first. Each proposes all it can,
    and has another turn where others went on.

    Args:
        drafters: in the order of their turns; may be empty.
        max_forced: most forced tokens in one draft.
    """

    name = "cascade"

    def __init__(self, drafters: Sequence[Drafter] = (), max_forced: int = 32) -> None:
        self.drafters = tuple(drafters)
        self.max_forced = max_forced

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Draft mixed blocks: forced tokens, copied ones, model tokens, forced ones again."""
        cursor.reserve_forced()
        most = budget.of(self.name)
        rows = [_GrowingRow(s.remaining - 1 if n else 0, n) for s, n in zip(batch.sequences, most, strict=True)]
        while True:
            for b, row in enumerate(rows):
                self._force(b, row, cursor)
            if not any(self._ask(drafter, batch, rows, budget, cursor) for drafter in self.drafters):
                break
        drafted = tuple(DraftRow(row.tokens, row.source, row.support) for row in rows)
        return Draft(drafted, batch.device, _mixed_q(rows))

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Let every drafter get ready."""
        for drafter in self.drafters:
            drafter.prefill(contexts)

    def models(self) -> Mapping[str, LanguageModel]:
        """Return those of all drafters."""
        return {name: model for drafter in self.drafters for name, model in drafter.models().items()}

    def _force(self, b: int, row: _GrowingRow, cursor: GrammarCursor) -> None:
        while row.room and row.forced < self.max_forced and (token := cursor.forced(b)) is not None:
            row.add(token, FORCED, 0, None)
            cursor.consume(b, token)

    def _ask(
        self, drafter: Drafter, batch: Batch, rows: list[_GrowingRow], budget: DraftBudget, cursor: GrammarCursor
    ) -> bool:
        """Let a drafter propose where a choice is left; return whether it did."""
        limits = budget.of(drafter.name)
        most = [row.left(drafter, limits[b]) if cursor.is_open(b) else 0 for b, row in enumerate(rows)]
        if not any(n > 0 for n in most):
            return False
        draft = drafter.propose(batch, DraftBudget(most), cursor)
        for b, (row, proposed) in enumerate(zip(rows, draft.rows, strict=True)):
            for k, token in enumerate(proposed.tokens):
                row.add(token, proposed.source[k], proposed.support[k], None if draft.q is None else draft.q[b, k])
            row.budget -= len(proposed.tokens)
            row.heard[id(drafter)] = len(row.tokens)
        return draft.width > 0


class _GrowingRow:
    """The draft of one row while it grows."""

    def __init__(self, room: int, budget: int) -> None:
        self.room = room
        self.budget = budget
        self.forced = 0
        self.tokens: list[int] = []
        self.source: list[str] = []
        self.support: list[int] = []
        self.q: list[Tensor | None] = []
        self.heard: dict[int, int] = {}  # by the drafter's id, the length of the draft after its last proposal

    def left(self, drafter: Drafter, limit: int) -> int:
        """Return how many tokens a drafter may add; 0 where nothing was added since it proposed all it could."""
        if self.heard.get(id(drafter)) == len(self.tokens):
            return 0
        return min(self.budget, self.room, limit - self.source.count(drafter.name))

    def add(self, token: int, source: str, support: int, q: Tensor | None) -> None:
        self.tokens.append(token)
        self.source.append(source)
        self.support.append(support)
        self.q.append(q)
        self.room -= 1
        self.forced += source == FORCED


def _mixed_q(rows: list[_GrowingRow]) -> Tensor | None:
    """Return ``[B, K, V]``, one-hot where a token was not drawn; None where none was."""
    known = next((q for row in rows for q in row.q if q is not None), None)
    if known is None:
        return None
    mixed = known.new_zeros(len(rows), max(len(row.q) for row in rows), len(known))
    for b, row in enumerate(rows):
        for k, q in enumerate(row.q):
            mixed[b, k] = _one_hot(row.tokens[k], like=known) if q is None else q
    return mixed


def _one_hot(token: int, like: Tensor) -> Tensor:
    """Return the distribution ``[V]`` of a token that is a function of its context."""
    q = torch.zeros_like(like)
    q[token] = 1
    return q
