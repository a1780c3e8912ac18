"""`Detokenizer`: ids to text, token by token, so that the pieces concatenate to the text of the whole."""

from __future__ import annotations

from collections.abc import Callable, Collection

REPLACEMENT = "\ufffd"  # how decoders show the bytes of an unfinished character


class Detokenizer:
    """Incremental decoding of one sequence.

    Tokens are decoded when their text is read: several at once take less time than one by one.

    Args:
        decode: ids to text.
        skip: ids without text (end tokens).
        spelled: gets the same tokens and skips none; None where nothing is looked for in its text.
        textless: spellings of the tokens that have no text here, where ``spelled`` is given.
        apart: ids of tokens that begin a text of their own, even after an unfinished character.
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
        self._known = 0  # number of tokens that are decoded
        self._ends: list[int | None] = []

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
        """Whether ``text`` is the text of all tokens: none of them waits for the rest of a character."""
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
        """Append one token."""
        self._tokens.append(token)
        if self.spelled is not None:
            self.spelled.push(token)

    def skips(self, index: int) -> bool:
        """Whether the token at an index has no text."""
        return self._tokens[index] in self._skip

    def text_of(self, count: int) -> str:
        """Return the text of the first ``count`` tokens, as if no others followed."""
        end = self.ends[count - 1] if count else 0
        if end is not None:
            return self.text[:end]
        alone = _Decoded(self._decode)
        alone.extend([token for token in self._tokens[:count] if token not in self._skip])
        alone.flush()
        return alone.text

    def flush(self) -> None:
        """Show what still waits for the rest of a character, as the decoder does; to be called after the last token."""
        if not self.is_whole:
            self._decoded.flush()

    def _catch_up(self) -> None:
        if self._known < len(self._tokens):
            self._decoded.extend([token for token in self._tokens[self._known :] if token not in self._skip])
            self._known = len(self._tokens)


class _Decoded:
    """The text of tokens, of which the last ones are kept as a window.

    The text of a token can depend on the token before it (leading spaces). A character may need several tokens; an
    unfinished one waits.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0  # tokens of the window whose text is in `text`
        self.text = ""

    @property
    def is_whole(self) -> bool:
        return self._shown == len(self._window)

    def extend(self, tokens: list[int]) -> None:
        if not tokens or self._show(self._window + tokens, whole_only=True):
            return
        if len(tokens) == 1:
            self._window += tokens
        else:  # as far as the text is whole
            for token in tokens:
                self.extend([token])

    def flush(self) -> None:
        self._show(self._window, whole_only=False)

    def _show(self, window: list[int], *, whole_only: bool) -> bool:
        """Show the text of a window, if it is whole or need not be; return whether it was shown."""
        before, after = self._decode(window[: self._shown]), self._decode(window)
        if whole_only and after.endswith(REPLACEMENT):
            return False
        self.text += after[len(before) :]
        self._window = window[self._shown :]
        self._shown = len(self._window)
        return True


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
