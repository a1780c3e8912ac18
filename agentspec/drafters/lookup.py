"""Drafts copied from earlier in the context (prompt look-up)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentspec.constraints import Walk
from agentspec.drafters import Draft, Drafter
from agentspec.sequence import Batch


class PromptLookupDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the context's longest repeated ending.

    Costs no model call. Agents copy: tool results, names, code, earlier calls.

    Args:
        max_ngram: longest ending looked for.
        min_ngram: shortest ending that is trusted.

    Raises:
        ValueError: unless 1 <= min_ngram <= max_ngram.
    """

    name = "lookup"

    def __init__(self, max_ngram: int = 16, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"Expected 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}.")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(self, batch: Batch, gamma: Sequence[int], walk: Walk) -> Draft:
        """The continuation of the match, up to ``gamma[b]`` tokens and as far as it is legal."""
        spans = [self._span(row, gamma[row], walk) for row in range(len(batch))]
        return Draft.of_spans(spans, batch.device)

    def _span(self, row: int, gamma: int, walk: Walk) -> list[int]:
        if gamma < 1:
            return []
        context = walk.context(row)
        start, before = self.find(context), len(context)
        if start is None:
            return []
        while len(context) - before < gamma and walk.is_open(row):
            token = context[start + len(context) - before]  # may be one just drafted: a loop is continued
            mask = walk.mask(row)
            if mask is not None and not bool(mask[token]):
                break
            context.append(token)
            walk.advance(row, token)
        return context[before:]

    def find(self, context: list[int]) -> int | None:
        """Where the continuation of the match begins in ``context``; None without a match of ``min_ngram`` tokens."""
        ids = np.asarray(context)
        last = len(ids) - 1
        ends = np.flatnonzero(ids[:last] == ids[last])  # ends of earlier occurrences, narrowed as the ending grows
        length = 1
        while len(ends) and length < self.max_ngram:
            longer = ends[ends >= length]
            longer = longer[ids[longer - length] == ids[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return int(ends[-1]) + 1 if len(ends) and length >= self.min_ngram else None
