"""Several drafters, one draft: forced tokens, then the first drafter that has something to say, per position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from agentspec.batch import Batch
from agentspec.drafters import Draft, Drafter, Gamma
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel
from agentspec.stats import FORCED


class Cascade(Drafter):
    """Chooses the drafter of every position from the context, drafted prefix included.

    Where a grammar leaves one legal token, it is drafted without asking anyone and does not count against gamma: the
    target must accept it. Elsewhere the drafters are asked in order, cheapest first. Each says all it has to say; it is
    asked again where others went on.

    Args:
        drafters: in the order they are asked; may be empty.
        max_forced: most forced tokens in one draft.
    """

    name = "cascade"

    def __init__(self, drafters: Sequence[Drafter] = (), max_forced: int = 32) -> None:
        self.drafters = tuple(drafters)
        self.max_forced = max_forced

    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """Mixed blocks: forced tokens, a look-up span, model tokens, forced ones again."""
        cursor.reserve_forced()
        rows = [_Row(s.remaining - 1 if most else 0, most) for s, most in zip(batch.sequences, gamma, strict=True)]
        while True:
            for b, row in enumerate(rows):
                self._force(b, row, cursor)
            if not any(self._ask(drafter, batch, rows, gamma, cursor) for drafter in self.drafters):
                break
        return _assemble(rows, batch)

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Let every drafter get ready."""
        for drafter in self.drafters:
            drafter.prefill(contexts)

    def models(self) -> Mapping[str, LanguageModel]:
        """Those of all drafters."""
        return {name: model for drafter in self.drafters for name, model in drafter.models().items()}

    def _force(self, b: int, row: _Row, cursor: GrammarCursor) -> None:
        while row.room and row.forced < self.max_forced and (token := cursor.forced(b)) is not None:
            row.add(token, FORCED, 0, None)
            cursor.consume(b, token)

    def _ask(
        self, drafter: Drafter, batch: Batch, rows: list[_Row], most: Sequence[int], cursor: GrammarCursor
    ) -> bool:
        """Let a drafter propose where a choice is left; whether it said anything."""
        if isinstance(most, Gamma):
            most = most.of(drafter.name)
        gamma = [
            row.left(drafter, n) if cursor.is_open(b) else 0 for b, (row, n) in enumerate(zip(rows, most, strict=True))
        ]
        if not any(n > 0 for n in gamma):
            return False
        draft = drafter.propose(batch, gamma, cursor)
        names, evidence = draft.sources_or(drafter.name), draft.evidence_or_zero()
        for b, span in enumerate(draft.spans):
            for k, token in enumerate(span):
                rows[b].add(token, names[b][k], evidence[b][k], None if draft.q is None else draft.q[b, k])
                rows[b].gamma -= 1
            rows[b].heard[id(drafter)] = len(rows[b].tokens)
        return any(draft.spans)


class _Row:
    """The draft of one row while it grows."""

    def __init__(self, room: int, gamma: int) -> None:
        self.room = room
        self.gamma = gamma
        self.forced = 0
        self.tokens: list[int] = []
        self.sources: list[str] = []
        self.evidence: list[int] = []
        self.laws: list[Tensor | None] = []
        self.heard: dict[int, int] = {}  # by the drafter's id, the length of the draft behind what a drafter said last

    def left(self, drafter: Drafter, most: int) -> int:
        """How many tokens a drafter may add; none where nothing was said since it said all it had to say."""
        if self.heard.get(id(drafter)) == len(self.tokens):
            return 0
        return min(self.gamma, self.room, most - self.sources.count(drafter.name))

    def add(self, token: int, source: str, evidence: int, law: Tensor | None) -> None:
        self.tokens.append(token)
        self.sources.append(source)
        self.evidence.append(evidence)
        self.laws.append(law)
        self.room -= 1
        self.forced += source == FORCED


def _assemble(rows: list[_Row], batch: Batch) -> Draft:
    tokens, sources, evidence = ([getattr(row, name) for row in rows] for name in ("tokens", "sources", "evidence"))
    known = next((law for row in rows for law in row.laws if law is not None), None)
    if known is None:
        return Draft.of_spans(tokens, batch.device, None, sources, evidence)
    q = known.new_zeros(len(rows), max(map(len, tokens)), len(known))
    for b, row in enumerate(rows):
        for k, law in enumerate(row.laws):
            q[b, k] = _one_hot(row.tokens[k], like=known) if law is None else law
    return Draft.of_spans(tokens, batch.device, q, sources, evidence)


def _one_hot(token: int, like: Tensor) -> Tensor:
    """``[V]``: the law of a token that is a function of its context."""
    law = torch.zeros_like(like)
    law[token] = 1
    return law
