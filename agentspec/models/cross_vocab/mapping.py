"""Contexts in the target's tokens, written in those of a draft with another tokenizer.

Tokens are the same where they write the same bytes, or where tokenizers were given them under the same name (special
tokens). Text is spelled anew by the draft's tokenizer, word by word: split as the target splits it, it is unlike what
the draft was trained on, and fewer of its tokens would be accepted. A word reaches from a token that opens with a space
to the next such: tokenizers split there as well, so that the mapping does not depend on what stands around the word,
and a context that grows changes no more than its last one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.runtime.spelling import Spelling
from agentspec.runtime.tokens import token_bytes

BLOCK = 256
"""Tokens that are mapped and remembered together; words end with their block."""

_BLOCKS, _WORDS = 1024, 65536  # results that are kept
_BROKEN = re.compile("([\udc80-\udcff]+)")  # bytes that are no text, as Python's "surrogateescape" decodes them

Tokens = tuple[int, ...]


class VocabMapping:
    """From the tokens of a target to those of a draft.

    Args:
        target: the tokenizer of the target: a fast one of transformers.
        draft: that of the draft.

    Raises:
        TokenizerError: for a tokenizer whose tokens have no bytes that are known.
    """

    def __init__(self, target: Any, draft: Any) -> None:
        ours, theirs = _Vocabulary(target), _Vocabulary(draft)
        self.target_ids = len(ours.written)
        """Ids of the target, unused ones among them counted."""
        self.target_tokens, self.draft_tokens = ours.tokens, theirs.tokens
        """How many tokens each has."""
        self.shared = _shared(ours, theirs)
        """``{target id: draft id}`` of the tokens that both have, one to one."""
        self.lead = theirs.lead
        """What the draft's tokenizer puts before every text."""
        self._draft = theirs
        self._written = ours.written
        self._names = self._mapped_names(ours)
        self.longest = max((len(text) for text in (*ours.written, *self._names.values()) if text), default=1)
        """Most tokens of the draft that one of the target may become: one for each byte."""
        self._alone = [text is None or token in self._names for token, text in enumerate(ours.written)]
        self._opens = [_opens_word(text or b"") or alone for text, alone in zip(ours.written, self._alone, strict=True)]
        self._block = functools.lru_cache(maxsize=_BLOCKS)(self._map_block)
        self._word = functools.lru_cache(maxsize=_WORDS)(self._spell)

    def __call__(self, context: Sequence[int]) -> list[int]:
        """Return the context in draft ids; never empty."""
        ids = self._opening(context)
        for tokens in _blocks(context):
            ids += self._block(tokens).ids
        return ids or [self._draft.filler]

    def whole_tokens(self, context: Sequence[int], length: int) -> int:
        """Leading tokens of the context, up to a word's end, that the first ``length`` draft ids stand for."""
        whole, left = 0, length - len(self._opening(context))
        for tokens in _blocks(context):
            block = self._block(tokens)
            if len(block.ids) > left:
                return whole + max((count for count, end in block.ends if end <= left), default=0)
            whole, left = whole + len(tokens), left - len(block.ids)
        return whole

    def _opening(self, context: Sequence[int]) -> list[int]:
        """Return the lead, unless the context begins with it."""
        begins = next((self._block(tokens).ids[: len(self.lead)] for tokens in _blocks(context)), ())
        return [] if begins == self.lead else list(self.lead)

    def _mapped_names(self, ours: _Vocabulary) -> dict[int, Tokens]:
        """Map given tokens: to the draft's of that name, to its mark of the same use, or to the name as text."""
        marks = dict.fromkeys(ours.lead, self.lead)
        if ours.end is not None and self._draft.end is not None:
            marks[ours.end] = (self._draft.end,)
        spelled = {
            i: tuple(self._draft.spell(name.encode())) for name, i in ours.added.items() if ours.written[i] is None
        }
        twins = {i: (self.shared[i],) for i in ours.added.values() if i in self.shared}
        return spelled | marks | twins

    def _map_block(self, tokens: Tokens) -> _Block:
        ids: list[int] = []
        ends = []
        for start, stop in self._words(tokens):
            ids += self._word(tokens[start:stop])
            ends.append((stop, len(ids)))
        return _Block(tuple(ids), tuple(ends))

    def _words(self, tokens: Tokens) -> Iterator[tuple[int, int]]:
        """Where words start and stop; given tokens stand alone."""
        starts = [k for k, token in enumerate(tokens) if k == 0 or self._opens[token] or self._alone[tokens[k - 1]]]
        return zip(starts, [*starts[1:], len(tokens)], strict=True)

    def _spell(self, tokens: Tokens) -> Tokens:
        if self._alone[tokens[0]]:
            return self._names.get(tokens[0], ())
        return tuple(self._draft.spell(b"".join(self._written[token] or b"" for token in tokens)))


@dataclass(frozen=True)
class _Block:
    """A mapped block: its ids, and the number of target and of draft tokens up to the end of each word."""

    ids: Tokens
    ends: tuple[tuple[int, int], ...]


def _blocks(context: Sequence[int]) -> Iterator[Tokens]:
    return (tuple(context[start : start + BLOCK]) for start in range(0, len(context), BLOCK))


def _opens_word(text: bytes) -> bool:
    return text.startswith(b" ") and text[1:2] not in (b"", b" ")


class _Vocabulary:
    """What the ids of a tokenizer write, and how it spells a text."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.tokens = len(vocabulary)
        self.written = token_bytes(tokenizer, max(vocabulary.values(), default=-1) + 1)
        self.added: dict[str, int] = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
        self.end: int | None = tokenizer.eos_token_id
        self._spelling = Spelling(tokenizer, self.written)
        self.ids = self._spelling.ids
        begin: int | None = tokenizer.bos_token_id
        self.lead: Tokens = (begin,) if begin is not None and tokenizer.encode("")[:1] == [begin] else ()
        self.filler = next((i for i in (begin, self.end) if i is not None), 0)

    def spell(self, text: bytes) -> list[int]:
        """Ids that write ``text``; bytes that no token writes are left out."""
        ids: list[int] = []
        for number, run in enumerate(_BROKEN.split(text.decode(errors="surrogateescape"))):
            if number % 2:
                ids += self._longest(run.encode(errors="surrogateescape"))
            elif run:
                ids += self._exactly(run)
        return ids

    def _exactly(self, text: str) -> list[int]:
        ids = self._spelling(text)
        written = b"".join(self.written[i] or b"" for i in ids)
        return ids + self._longest(text.encode()[len(written) :])

    def _longest(self, text: bytes) -> list[int]:
        """Cover bytes by the longest tokens first; pass over a byte that no token writes."""
        ids: list[int] = []
        while text:
            found = self._spelling.longest(text)
            ids += found
            text = text[len(b"".join(self.written[i] or b"" for i in found)) + 1 :]
        return ids


def _shared(ours: _Vocabulary, theirs: _Vocabulary) -> dict[int, int]:
    """Tokens given under the same name, then those that write the same, then the ends where they have no twin."""
    shared = {i: theirs.added[name] for name, i in ours.added.items() if name in theirs.added}
    taken = set(shared.values())
    for text, i in ours.ids.items():
        twin = theirs.ids.get(text)
        if i not in shared and twin is not None and twin not in taken:
            shared[i] = twin
    if ours.end is not None and theirs.end is not None and not (ours.end in shared or theirs.end in shared.values()):
        shared[ours.end] = theirs.end
    return shared
