"""Token ids to text, a token at a time, so that the pieces concatenate to the text of the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of a character not yet complete


class Detokenizer:
    """Incremental decoding of one sequence.

    A token's text can depend on the token before it (leading spaces) and a character may need several tokens, so a
    window of recent tokens is decoded with and without the new ones, and an incomplete character waits.

    Args:
        decode: ids to text.
        skip: ids without text (end tokens).
    """

    def __init__(self, decode: Callable[[list[int]], str], skip: Collection[int] = ()) -> None:
        self._decode = decode
        self._skip = skip
        self._window: list[int] = []
        self._shown = 0  # how many tokens of the window have their text in `text`
        self.text = ""
        self.seconds = 0.0  # spent on decoding so far

    @property
    def is_pending(self) -> bool:
        """Whether the last token's text waits for the rest of a character."""
        return self._shown < len(self._window)

    def push(self, token: int) -> str:
        """Take one more token; the text that is complete with it ("" while a character is unfinished)."""
        if token in self._skip:
            return ""
        self._window.append(token)
        return self._show(whole_only=True)

    def flush(self) -> str:
        """The text still waiting for the rest of a character, as the decoder shows it."""
        return self._show(whole_only=False)

    def _show(self, *, whole_only: bool) -> str:
        started = time.perf_counter()
        before, after = self._decode(self._window[: self._shown]), self._decode(self._window)
        self.seconds += time.perf_counter() - started
        if whole_only and after.endswith(REPLACEMENT):
            return ""
        piece = after[len(before) :]
        self.text += piece
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return piece


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``mark``: what may yet become it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
