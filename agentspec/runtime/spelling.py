"""Cut texts into tokens that write exactly their bytes, whatever a tokenizer's normalizer and pre-tokenizer do."""

from __future__ import annotations

import copy
import functools
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from agentspec.runtime.tokens import special_ids, token_bytes

SENTINELS = ("\n", ".", "a")
"""Characters that are prepended to a text, so that it is cut as one that does not stand at the beginning."""

REPAIRS = 16
"""Places in a text where a tokenizer's own cut is repaired; after them the longest token is taken every time."""


class Spelling:
    """A cutter of texts into tokens that write exactly these texts.

    The tokenizer's own cut is used where its bytes are those of the text. Some tokenizers put a space before a text,
    or change it (NFKC, lower case): there the text is cut as one that continues another, or by the longest token.

    Args:
        tokenizer: a fast tokenizer of transformers.
        written: the bytes of each id (``token_bytes``); ids without bytes are never used.
    """

    def __init__(self, tokenizer: Any, written: Sequence[bytes | None]) -> None:
        self._written = written
        self._backend = copy.copy(tokenizer.backend_tokenizer)
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = True  # a special token that is spelled out is text

    def __call__(self, text: str) -> list[int]:
        """Return ids that write ``text``, or as long a beginning of it as there are tokens for."""
        expected = text.encode()
        for ids in self._cuts(text):
            if self._bytes(ids) == expected:
                return ids
        return self._repaired(text)

    def longest(self, text: bytes) -> list[int]:
        """Return the longest token at each place, up to where no token writes on."""
        ids, at = [], 0
        while at < len(text) and (token := self._longest(text, at)) is not None:
            ids.append(token)
            at += len(self._written[token] or b"")
        return ids

    @functools.cached_property
    def ids(self) -> dict[bytes, int]:
        """The id of each text; where several write it, the one that the tokenizer uses."""
        same: defaultdict[bytes, list[int]] = defaultdict(list)
        for i, text in enumerate(self._written):
            if text is not None:
                same[text].append(i)
        return {text: ids[0] if len(ids) == 1 else self._used(text, ids) for text, ids in same.items()}

    @functools.cached_property
    def _width(self) -> int:
        return max(map(len, self.ids), default=0)

    def _longest(self, text: bytes, at: int) -> int | None:
        ends = range(min(len(text), at + self._width), at, -1)
        return next((self.ids[text[at:end]] for end in ends if text[at:end] in self.ids), None)

    def _used(self, text: bytes, ids: list[int]) -> int:
        used = self._encode(text.decode(errors="replace"))
        return used[0] if len(used) == 1 and used[0] in ids else ids[-1]  # the tokens of single bytes come first

    def _cuts(self, text: str) -> Iterator[list[int]]:
        """Yield the tokenizer's own cut of a text, and its cuts of the text after another character."""
        yield self._encode(text)
        if text.startswith(" "):
            yield self._encode(text[1:])
        for sentinel in SENTINELS:
            yield self._after(sentinel.encode(), self._encode(sentinel + text))

    def _after(self, sentinel: bytes, ids: list[int]) -> list[int]:
        """Return the ids after a sentinel; none where no token begins there."""
        for count in range(1, len(ids) + 1):
            written = self._bytes(ids[:count])
            if written in (sentinel, b" " + sentinel):
                return ids[count:]
            if written is None or len(written) > len(sentinel):
                break
        return []

    def _repaired(self, text: str) -> list[int]:
        """Join the tokenizer's cuts as far as they are right, and single tokens between them."""
        ids: list[int] = []
        rest = text.encode()
        for _ in range(REPAIRS):
            if not rest:
                break
            right = [self._right(cut, rest) for cut in self._cuts(rest.decode(errors="ignore"))]
            found = max(right, key=lambda cut: len(self._bytes(cut) or b""))
            found = found or [token for token in (self._longest(rest, 0),) if token is not None]
            if not found:
                return ids
            ids += found
            rest = rest[len(self._bytes(found) or b"") :]
        return ids + self.longest(rest)

    def _right(self, ids: list[int], text: bytes) -> list[int]:
        """Return the first ids, as far as they write the beginning of a text."""
        at = 0
        for count, i in enumerate(ids):
            written = self._written[i] if i < len(self._written) else None
            if not written or not text.startswith(written, at):
                return ids[:count]
            at += len(written)
        return ids

    def _bytes(self, ids: Sequence[int]) -> bytes | None:
        """Return the bytes of ids; None where one has none."""
        parts = [self._written[i] if i < len(self._written) else None for i in ids]
        return None if None in parts else b"".join(part or b"" for part in parts)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


class _Kept:
    """The cached spelling of a tokenizer, and the number of tokens that it had."""

    def __init__(self, tokenizer: Any) -> None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.size = len(tokenizer)
        self.spelling = Spelling(tokenizer, token_bytes(tokenizer, max(vocabulary.values(), default=-1) + 1))


_kept: weakref.WeakKeyDictionary[Any, _Kept] = weakref.WeakKeyDictionary()


def spell(tokenizer: Any, text: str) -> list[int]:
    """Return the ids that write a text which may hold the names of special tokens: for these, their ids.

    Raises:
        TokenizerError: for a tokenizer whose tokens have no known bytes.
    """
    kept = _kept.get(tokenizer)
    if kept is None or kept.size != len(tokenizer):
        kept = _kept[tokenizer] = _Kept(tokenizer)
    added = tokenizer.added_tokens_decoder
    named = {added[i].content: i for i in special_ids(tokenizer) if i in added}
    marks = "|".join(re.escape(name) for name in sorted(named, key=len, reverse=True))
    parts = re.split(f"({marks})", text) if marks else [text]
    return [i for part in parts if part for i in ([named[part]] if part in named else kept.spelling(part))]
