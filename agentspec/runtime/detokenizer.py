"""Token ids to text, a token at a time, so that the pieces concatenate to the text of the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of a character not yet complete


class Detokenizer:
    """Incremental decoding of one sequence.

    Tokens are decoded when somebody asks for their text: several at once take less than one by one, and much less than
    one by one between other things.

    Args:
        decode: ids to text.
        skip: ids without text (end tokens).
        spelled: takes the same tokens and leaves none out; None where nothing is to be looked for in its text.
        textless: how the tokens are spelled that have no text here, if ``spelled`` is given.
        apart: ids of tokens that begin a text of their own, though a character before them be unfinished.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skip: Collection[int] = (),
        *,
        spelled: Detokenizer | None = None,
        textless: Collection[str] = (),
        apart: Collection[int] = (),
    ) -> None:
        self._decode = decode
        self._decoded, self._singly = _Decoded(decode), _Decoded(decode)
        self._skip = skip
        self._apart = apart
        self.spelled = spelled
        self.textless = textless
        self._tokens: list[int] = []
        self._known = 0  # how many of them are decoded
        self._ends: list[int | None] = []

    @property
    def seconds(self) -> float:
        """Spent on decoding so far."""
        of_spelled = self.spelled.seconds if self.spelled else 0.0
        return self._decoded.seconds + self._singly.seconds + of_spelled

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @property
    def text(self) -> str:
        """The text so far, without an unfinished character at its end."""
        self._catch_up()
        return self._decoded.text

    @property
    def is_whole(self) -> bool:
        """Whether ``text`` is that of all tokens: none of them waits for the rest of a character."""
        self._catch_up()
        return self._decoded.is_whole

    @property
    def ends(self) -> list[int | None]:
        """Length of the text after each token; None where it waits for the rest of a character."""
        for token in self._tokens[len(self._ends) :]:
            if token in self._apart and not self._singly.is_whole:
                self._singly.flush()
                self._ends[-1] = len(self._singly.text)
            self._singly.extend([token] if token not in self._skip else [])
            self._ends.append(len(self._singly.text) if self._singly.is_whole else None)
        return self._ends

    def push(self, token: int) -> None:
        """Take one more token."""
        self._tokens.append(token)
        if self.spelled is not None:
            self.spelled.push(token)

    def skips(self, index: int) -> bool:
        """Whether the token at an index has no text."""
        return self._tokens[index] in self._skip

    def text_of(self, count: int) -> str:
        """The text of the first tokens, as if none came behind them."""
        end = self.ends[count - 1] if count else 0
        if end is not None:
            return self.text[:end]
        alone = _Decoded(self._decode)
        alone.extend([token for token in self._tokens[:count] if token not in self._skip])
        alone.flush()
        return alone.text

    def flush(self) -> None:
        """Show what still waits for the rest of a character, as the decoder does. No token comes behind it."""
        if not self.is_whole:
            self._decoded.flush()

    def _catch_up(self) -> None:
        if self._known < len(self._tokens):
            self._decoded.extend([token for token in self._tokens[self._known :] if token not in self._skip])
            self._known = len(self._tokens)


class _Decoded:
    """The text of tokens. Of the last ones a window is kept: a token's text can depend on the token before it (leading
    spaces), and a character may need several tokens; an incomplete one waits."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # how many tokens of the window have their text in `text`
        self.text = ""
        self.seconds = 0.0

    @property
    def is_whole(self) -> bool:
        return self._shown == len(self._window)

    def extend(self, tokens: list[int]) -> None:
        if not tokens or self._show(self._window + tokens, whole_only=True):
            return
        if len(tokens) == 1:
            self._window += tokens
        else:  # as far as it is whole
            for token in tokens:
                self.extend([token])

    def flush(self) -> None:
        self._show(self._window, whole_only=False)

    def _show(self, window: list[int], *, whole_only: bool) -> bool:
        """Whether the text of a window was whole, where it has to be; then it is shown."""
        started = time.perf_counter()
        before, after = self._decode(window[: self._shown]), self._decode(window)
        self.seconds += time.perf_counter() - started
        if whole_only and after.endswith(REPLACEMENT):
            return False
        self.text += after[len(before) :]
        self._window = window[self._shown :]
        self._shown = len(self._window)
        return True


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``mark``: what may yet become it."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
