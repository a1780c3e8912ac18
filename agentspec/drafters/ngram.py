"""Drafts copied from what was said before (prompt look-up): in the context, and by samples of the same request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentspec.batch import Batch
from agentspec.drafters import Draft, Drafter
from agentspec.errors import shown
from agentspec.grammars import GrammarCursor


class PromptLookupDrafter(Drafter):
    """Proposes what followed the latest earlier occurrence of the context's longest repeated ending.

    Costs no model call. Agents copy: tool results, names, code, earlier calls; and samples of one request are alike.
    What others said decides what is drafted, never what is said: the law of a sample given its siblings is its own. But
    under the rejection rule its text for a seed then depends on how far they are; under the coupled one it does not.

    Args:
        max_ngram: longest ending looked for.
        min_ngram: shortest ending that is trusted.
        scope: where to look: in the request's own context, also in its siblings' (samples of the same request), or also
            in that of every row of the round.

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

    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """The continuation of the match, up to ``gamma[b]`` tokens and as far as it is legal."""
        found = [self._span(row, gamma[row], cursor, self._others(row, batch)) for row in range(len(batch))]
        evidence = [[min(match + k, self.max_ngram) for k in range(len(span))] for span, match in found]
        return Draft.of_spans([span for span, _ in found], batch.device, evidence=evidence)

    def _others(self, row: int, batch: Batch) -> list[list[int]]:
        """What others said, from where it may differ: a little of the prompt, for endings that begin in it."""
        sequence = batch.sequences[row]
        others = {
            "request": (),
            "siblings": sequence.siblings,
            "engine": (*sequence.siblings, *(s for s in batch.sequences if s not in sequence.siblings)),
        }[self.scope]
        return [s.context[max(0, s.prompt_length - self.max_ngram) :] for s in others if s is not sequence]

    def _span(self, row: int, gamma: int, cursor: GrammarCursor, others: list[list[int]]) -> tuple[list[int], int]:
        """What followed the longest match, and the length of that."""
        if gamma < 1:
            return [], 0
        context = cursor.context(row)
        before = len(context)
        source, start, match = self._longest(context, others)
        if start is None:
            return [], 0
        while len(context) - before < gamma and cursor.is_open(row):
            at = start + len(context) - before  # in the own context it may be a token just drafted: a loop is continued
            if at >= len(source):
                break
            token = source[at]
            if not cursor.try_consume(row, token):
                break
            context.append(token)
        return context[before:], match

    def _longest(self, context: list[int], others: list[list[int]]) -> tuple[list[int], int | None, int]:
        """The text with the longest match, the own one where lengths are equal; where it goes on; and its length."""
        ending = np.asarray(context[-self.max_ngram :])
        best, source = self._match(np.asarray(context[:-1]), ending), context
        for other in others:
            found = self._match(np.asarray(other[:-1]), ending)
            if found[0] > best[0]:
                best, source = found, other
        return source, best[1] if best[0] >= self.min_ngram else None, best[0]

    def find(self, context: list[int]) -> int | None:
        """Where the continuation of the match begins in ``context``; None without a match of ``min_ngram`` tokens."""
        return self._longest(context, [])[1]

    def _match(self, ids: npt.NDArray[np.int64], ending: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Length of the longest end of ``ending`` that occurs in ``ids``, and where its latest occurrence is over."""
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
