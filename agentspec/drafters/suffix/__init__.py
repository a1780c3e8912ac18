"""Drafts copied from earlier tokens, by frequency (SuffixDecoding, arXiv 2411.04975).

The paper keeps suffix trees, one of the request and one of earlier outputs. Here ``endings`` answers the same
questions: where the longest ending of this context occurs, and what followed there, how often.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter
from agentspec.drafters.suffix.endings import SEPARATOR, Memory, Prompts, Text
from agentspec.errors import shown
from agentspec.grammars import GrammarCursor
from agentspec.runtime.threads import exclusive
from agentspec.sequence import Sequence as TokenSequence

Place: TypeAlias = "tuple[array[int], int]"
"""A text, and where in it the continuation of an occurrence begins."""


class SuffixDrafter(Drafter):
    """A drafter that proposes what most often followed the context's longest repeated ending, as far as that is likely.

    Costs no model call, and per proposal only what is new in the context. A token's probability is its share of the
    observed legal continuations; the draft ends where the product of these would fall below ``min_probability``.
    As with look-up, texts of others decide what is drafted, never what is emitted: the distribution of a text is its
    own. But under the rejection rule the text for a seed then depends on the others; under the coupled rule it does
    not.

    The support of a token is ``1 + 4 * match + share``. ``match`` is 0 to 3 for 1, 2 to 3, 4 to 7, or more tokens of
    matching context (the drafted ones before it count); ``share`` is 0 to 3 for under half of the continuations, under
    all, all where only one occurrence is left, all of several.

    Args:
        max_match: longest ending to look for; longer matches count as this long.
        min_match: shortest ending that is trusted.
        min_probability: the draft ends where its running probability falls below.
        scope: where to look. ``"request"``: in the sample's own context; ``"siblings"``: also in the outputs of its
            request group; ``"engine"``: also in the outputs of every row of the round and of finished sequences.
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
        self._latest: list[Text] = []  # of the last round, to see which of them have ended
        self._prompts = Prompts(self._lengths, memory)
        self._memory = Memory(self._lengths, memory if scope == "engine" else 0)

    @exclusive()  # two engines may share a drafter
    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Draft the likeliest continuation of the longest match."""
        if self.scope == "engine":
            self._remember()
        most = budget.of(self.name)
        texts = [self._text(sequence) for sequence in batch.sequences]
        self._latest = texts if self.scope == "engine" else []
        others = [self._others(sequence, batch) for sequence in batch.sequences]
        found = [self._continuation(b, most[b], cursor, texts[b], others[b]) for b in range(len(batch))]
        tokens, support = [tokens for tokens, _ in found], [support for _, support in found]
        return Draft.of_tokens(tokens, self.name, batch.device, support=support)

    @exclusive()
    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Index the contexts, so that the first proposal does not have to."""
        for context in contexts:
            self._prompts.prepare(context)

    def _remember(self) -> None:
        """Keep the outputs of the last round's sequences that have ended."""
        for text in self._latest:
            owner = text.owner()
            if owner is None or owner.finish_reason is not None:
                before = min(text.prompt_length, self.max_match)
                text.is_kept = self._memory.keep(text.context[text.prompt_length - before :], before)

    def _text(self, sequence: TokenSequence) -> Text:
        """Return the index of a sequence, extended to its context."""
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text(sequence, self._prompts.endings(sequence), self._lengths)
        text.follow()
        return text

    def _others(self, sequence: TokenSequence, batch: Batch) -> list[Text]:
        """Return the other texts whose outputs are looked at."""
        others: list[TokenSequence] = [] if self.scope == "request" else list(sequence.siblings)
        if self.scope == "engine":
            others = list(dict.fromkeys([*others, *batch.sequences]))
        texts = [self._text(other) for other in others if other is not sequence and other.length]
        return [text for text in texts if not text.is_kept]

    def _continuation(
        self, row: int, most: int, cursor: GrammarCursor, text: Text, others: list[Text]
    ) -> tuple[list[int], list[int]]:
        """Return tokens, and the support of each."""
        if most < 1:
            return [], []
        start, drafted = len(text.ids), cursor.drafted(row)
        probability = text.probability_after(drafted)
        try:
            if drafted:
                text.ids.extend(cursor.tokens(row))
            places, match = self._longest(text, others)
            tokens: list[int] = []
            support: list[int] = []
            while places and len(tokens) < most and cursor.is_open(row):
                following = [ids[at] for ids, at in places if at < len(ids) and ids[at] != SEPARATOR]
                token, share, count = _likeliest(following, lambda token: cursor.allows(row, token))
                if token is None or probability * share < self.min_probability or not cursor.try_consume(row, token):
                    break
                probability *= share
                support.append(_support(match + len(tokens), share, count))
                tokens.append(token)
                text.ids.append(token)  # an occurrence in the own context may go on into it: loops go on
                places = [(ids, at + 1) for ids, at in places if at < len(ids) and ids[at] == token]
        finally:
            text.cut(start)
        text.asked = (start, cursor.drafted(row), probability)
        return tokens, support

    def _longest(self, text: Text, others: list[Text]) -> tuple[list[Place], int]:
        """Return the places that the longest repeated ending leads to, own and latest first, and its length."""
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
    """Return how much of ``ending`` stands before a position, where the last ``known`` tokens do."""
    most = min(at, len(ending))
    while known < most and ids[at - 1 - known] == ending[-1 - known]:
        known += 1
    return known


def _likeliest(following: Sequence[int], is_legal: Callable[[int], bool]) -> tuple[int | None, float, int]:
    """Return the most frequent legal token (the first of equals), its share of the legal ones, and its count.

    None where none is legal. A token without rivals is taken to be legal.
    """
    counts = Counter(following)
    for token in [token for token in counts if len(counts) > 1 and not is_legal(token)]:
        del counts[token]
    if not counts:
        return None, 0.0, 0
    [(token, count)] = counts.most_common(1)
    return token, count / counts.total(), count


def _support(match: int, share: float, count: int) -> int:
    """Return 1 to 16, as the drafter's docstring has it."""
    by_match = (match >= 2) + (match >= 4) + (match >= 8)
    return 1 + 4 * by_match + (int(share >= 0.5) if share < 1 else 2 + (count > 1))
