"""Drafts copied from earlier tokens (prompt look-up): of the context, and of samples of the same request."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter
from agentspec.errors import shown
from agentspec.grammars import GrammarCursor


class PromptLookupDrafter(Drafter):
    """A drafter that proposes what followed the latest earlier occurrence of the context's longest repeated ending.

    Costs no model call. Agents copy: tool results, names, code, earlier calls; and samples of one request are alike.
    Texts of other samples decide what is drafted, never what is emitted: a sample's distribution given its siblings is
    its own. But under the rejection rule its text for a seed then depends on how far they are; under the coupled rule
    it does not.

    Args:
        max_ngram: longest ending to look for.
        min_ngram: shortest ending that is trusted.
        scope: where to look. ``"request"``: in the sample's own context; ``"siblings"``: also in those of its request
            group; ``"engine"``: also in that of every row of the round.

    Raises:
        ValueError: unless 1 <= min_ngram <= max_ngram, or for another scope.
    """

    name = "lookup"

    def __init__(
        self, max_ngram: int = 16, min_ngram: int = 2, scope: Literal["request", "siblings", "engine"] = "siblings"
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"Expected 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}.")
        if scope not in ("request", "siblings", "engine"):
            raise ValueError(f"scope must be 'request', 'siblings' or 'engine', got {shown(scope)}.")
        self.scope = scope
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Draft the continuation of the match, as far as it is legal."""
        most = budget.of(self.name)
        found = [self._continuation(row, most[row], cursor, self._others(row, batch)) for row in range(len(batch))]
        support = [[min(match + k, self.max_ngram) for k in range(len(tokens))] for tokens, match in found]
        return Draft.of_tokens([tokens for tokens, _ in found], self.name, batch.device, support=support)

    def _others(self, row: int, batch: Batch) -> list[list[int]]:
        """Return the outputs of others, each after the end of its prompt, in which an ending may begin."""
        sequence = batch.sequences[row]
        others = {
            "request": (),
            "siblings": sequence.siblings,
            "engine": (*sequence.siblings, *(s for s in batch.sequences if s not in sequence.siblings)),
        }[self.scope]
        return [s.context[max(0, s.prompt_length - self.max_ngram) :] for s in others if s is not sequence]

    def _continuation(
        self, row: int, most: int, cursor: GrammarCursor, others: list[list[int]]
    ) -> tuple[list[int], int]:
        """Return what followed the longest match, and the length of the match."""
        if most < 1:
            return [], 0
        context = cursor.context(row)
        before = len(context)
        source, start, match = self._longest(context, others)
        if start is None:
            return [], 0
        while len(context) - before < most and cursor.is_open(row):
            at = start + len(context) - before  # in the own context it may be a token just drafted: loops go on
            if at >= len(source):
                break
            token = source[at]
            if not cursor.try_consume(row, token):
                break
            context.append(token)
        return context[before:], match

    def _longest(self, context: list[int], others: list[list[int]]) -> tuple[list[int], int | None, int]:
        """Return the text with the longest match (the own one among equals), where it goes on, and its length."""
        ending = np.asarray(context[-self.max_ngram :])
        best, source = self._match(np.asarray(context[:-1]), ending), context
        for other in others:
            found = self._match(np.asarray(other[:-1]), ending)
            if found[0] > best[0]:
                best, source = found, other
        return source, best[1] if best[0] >= self.min_ngram else None, best[0]

    def find(self, context: list[int]) -> int | None:
        """Return where the continuation of the match begins in ``context``; None if it is under ``min_ngram`` long."""
        return self._longest(context, [])[1]

    def _match(self, ids: npt.NDArray[np.int64], ending: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Return the length of the longest end of ``ending`` in ``ids``, and where its latest occurrence is over."""
        if not len(ids) or not len(ending):
            return 0, 0
        ends = np.flatnonzero(ids == ending[-1])  # narrowed as the ending grows
        if not len(ends):
            return 0, 0
        length = 1
        while length < len(ending):
            longer = ends[ends >= length]
            longer = longer[ids[longer - length] == ending[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return length, int(ends[-1]) + 1
