"""Drafts copied from what was said before, by frequency (SuffixDecoding, arXiv 2411.04975).

The paper keeps suffix trees, one of the request and one of earlier outputs. Here the same questions (where does the
longest ending of this context occur, and what followed there, how often) are asked of ``endings``.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from agentspec.batch import Batch
from agentspec.drafters import Draft, Drafter
from agentspec.drafters.suffix.endings import SEPARATOR, Memory, Prompts, Text
from agentspec.errors import shown
from agentspec.grammars import GrammarCursor
from agentspec.runtime.threads import exclusive
from agentspec.sequence import Sequence as TokenSequence

Place: TypeAlias = "tuple[array[int], int]"
"""A text, and where in it the continuation of an occurrence begins."""


class SuffixDrafter(Drafter):
    """Proposes what most often followed the context's longest repeated ending, as far as that is likely.

    Costs no model call, and per proposal only what is new in the context. A token's probability is its share of the
    observed legal continuations; the span ends where the product of these would fall below ``min_probability``.
    As with look-up, what others said decides what is drafted, never what is said: the law of a text is its own. But
    under the rejection rule the text for a seed then depends on what others said; under the coupled one it does not.

    The evidence for a token is ``1 + 4 * match + share``. ``match`` is 0 to 3 for 1, 2 to 3, 4 to 7, or more tokens of
    matching context (the drafted ones before it count); ``share`` is 0 to 3 for under half of the continuations, under
    all, all where only one occurrence is left, all of several.

    Args:
        max_match: longest ending looked for; longer matches count as this long.
        min_match: shortest ending that is trusted.
        min_probability: the span ends where its running probability falls below.
        scope: where to look: in the request's own context; also in what its siblings (samples of the request) said;
            or also in what every row of the round says and what finished sequences of this drafter said.
        memory: most tokens of finished outputs that are kept, oldest forgotten first (scope ``"engine"``); and most
            tokens of prompts whose index is kept for later turns (in every scope: it saves time and changes nothing).
            The newest prompt is always kept.
        max_occurrences: of an ending, how many are looked at in every text, from the latest back.

    Raises:
        ValueError: unless 1 <= min_match <= max_match, 0 <= min_probability <= 1, memory >= 0 and
            max_occurrences >= 1; or for another scope.
    """

    name = "suffix"

    def __init__(
        self,
        max_match: int = 16,
        min_match: int = 1,
        min_probability: float = 0.1,
        scope: Literal["request", "siblings", "engine"] = "siblings",
        memory: int = 100_000,
        max_occurrences: int = 64,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(f"Expected 1 <= min_match <= max_match, got {min_match} and {max_match}.")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability is a probability from 0 to 1, got {min_probability}.")
        if scope not in ("request", "siblings", "engine"):
            raise ValueError(f"scope must be 'request', 'siblings' or 'engine', got {shown(scope)}.")
        if memory < 0 or max_occurrences < 1:
            raise ValueError(f"Expected memory >= 0 and max_occurrences >= 1, got {memory} and {max_occurrences}.")
        self.max_match = max_match
        self.min_match = min_match
        self.min_probability = min_probability
        self.scope = scope
        self.max_occurrences = max_occurrences
        self._lengths = [length for i in range(max_match) if (length := min_match << i) <= max_match]
        self._texts: weakref.WeakKeyDictionary[TokenSequence, Text] = weakref.WeakKeyDictionary()
        self._latest: list[Text] = []  # of the last round, to see which of them are over
        self._prompts = Prompts(self._lengths, memory)
        self._memory = Memory(self._lengths, memory if scope == "engine" else 0)

    @exclusive()  # of two engines, say
    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """The likeliest continuation of the longest match, up to ``gamma[b]`` tokens."""
        if self.scope == "engine":
            self._remember()
        texts = [self._text(sequence) for sequence in batch.sequences]
        self._latest = texts if self.scope == "engine" else []
        others = [self._others(sequence, batch) for sequence in batch.sequences]
        spans = [self._span(b, gamma[b], cursor, texts[b], others[b]) for b in range(len(batch))]
        return Draft.of_spans(
            [tokens for tokens, _ in spans], batch.device, evidence=[evidence for _, evidence in spans]
        )

    @exclusive()
    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Index the contexts, so that the first proposal need not."""
        for context in contexts:
            self._prompts.prepare(context)

    def _remember(self) -> None:
        """Keep the outputs of the last round's sequences that are over."""
        for text in self._latest:
            owner = text.owner()
            if owner is None or owner.finish_reason is not None:
                before = min(text.prompt_length, self.max_match)
                text.is_kept = self._memory.keep(text.context[text.prompt_length - before :], before)

    def _text(self, sequence: TokenSequence) -> Text:
        """What is known of a sequence, as long as its context."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text(sequence, self._prompts.endings(sequence), self._lengths)
        text.follow()
        return text

    def _others(self, sequence: TokenSequence, batch: Batch) -> list[Text]:
        """Whose outputs are looked at besides its own."""
        others: list[TokenSequence] = [] if self.scope == "request" else list(sequence.siblings)
        if self.scope == "engine":
            others = list(dict.fromkeys([*others, *batch.sequences]))
        texts = [self._text(other) for other in others if other is not sequence and other.length]
        return [text for text in texts if not text.is_kept]

    def _span(
        self, row: int, gamma: int, cursor: GrammarCursor, text: Text, others: list[Text]
    ) -> tuple[list[int], list[int]]:
        """Tokens, and the evidence for each."""
        if gamma < 1:
            return [], []
        start, drafted = len(text.ids), cursor.drafted(row)
        probability = text.probability_behind(drafted)
        try:
            if drafted:
                text.ids.extend(cursor.tokens(row))
            places, match = self._longest(text, others)
            span: list[int] = []
            evidence: list[int] = []
            while places and len(span) < gamma and cursor.is_open(row):
                following = [ids[at] for ids, at in places if at < len(ids) and ids[at] != SEPARATOR]
                token, share, count = _likeliest(following, lambda token: cursor.allows(row, token))
                if token is None or probability * share < self.min_probability or not cursor.try_consume(row, token):
                    break
                probability *= share
                evidence.append(_evidence(match + len(span), share, count))
                span.append(token)
                text.ids.append(token)  # an occurrence in the own context may go on into it: a loop is continued
                places = [(ids, at + 1) for ids, at in places if at < len(ids) and ids[at] == token]
        finally:
            text.cut(start)
        text.asked = (start, cursor.drafted(row), probability)
        return span, evidence

    def _longest(self, text: Text, others: list[Text]) -> tuple[list[Place], int]:
        """The occurrences of the context's longest ending that occurs elsewhere, own and latest first; its length."""
        ending = text.ids[-self.max_match :]
        sources = [(text.ids, text.output), (text.ids, text.prompt)]
        sources += [(other.ids, other.output) for other in others] + list(reversed(self._memory.generations))
        for k, length in reversed(list(enumerate(self._lengths))):
            if length > len(ending):
                continue
            key = ending[-length:].tobytes()
            places = [(ids, at) for ids, endings in sources for at in endings.places(k, key, self.max_occurrences)]
            if places:
                matches = [_match(ids, at, ending, length) for ids, at in places]
                longest = max(matches)
                return [place for place, n in zip(places, matches, strict=True) if n == longest], longest
        return [], 0


def _match(ids: array[int], at: int, ending: array[int], known: int) -> int:
    """How much of ``ending`` stands before a position, where the last ``known`` tokens do."""
    most = min(at, len(ending))
    while known < most and ids[at - 1 - known] == ending[-1 - known]:
        known += 1
    return known


def _likeliest(following: Sequence[int], is_legal: Callable[[int], bool]) -> tuple[int | None, float, int]:
    """The most frequent legal token, the first of equals, its share of the legal ones, and how often it occurs.

    None where none is legal. Of a token without rivals that is not asked.
    """
    counts = Counter(following)
    for token in [token for token in counts if len(counts) > 1 and not is_legal(token)]:
        del counts[token]
    if not counts:
        return None, 0.0, 0
    [(token, count)] = counts.most_common(1)
    return token, count / counts.total(), count


def _evidence(match: int, share: float, count: int) -> int:
    """1 to 16, as the drafter's docstring has it."""
    by_match = (match >= 2) + (match >= 4) + (match >= 8)
    return 1 + 4 * by_match + (int(share >= 0.5) if share < 1 else 2 + (count > 1))
