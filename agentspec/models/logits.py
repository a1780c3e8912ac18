"""What a pass finds behind some positions: scores, and which tokens have the best."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor


class Scored(NamedTuple):
    """What there is behind some positions of a context.

    Args:
        scores: ``[positions, V]``.
        best: the first best token of each, ``NO_TOKEN`` where none has a score; None where the pass did not tell.
    """

    scores: Tensor
    best: list[int] | None = None

    def last(self, count: int) -> Scored:
        """What there is behind the last ``count`` positions."""
        begin = len(self.scores) - count
        return Scored(self.scores[begin:], None if self.best is None else self.best[begin:])


class Told:
    """The best tokens of some logits, for as long as these are as they were."""

    def __init__(self) -> None:
        # One value, so that a thread which reads it while another writes never sees parts of two.
        self._known: tuple[Callable[[], Tensor | None], int, list[list[int]]] = (lambda: None), 0, []

    def __reduce__(self) -> tuple[type[Told], tuple[()]]:
        """A copy was told nothing."""
        return Told, ()

    def remember(self, logits: Tensor, best: Sequence[list[int] | None]) -> Tensor:
        """``logits`` ``[B, K, V]``, whose best tokens are these; not all are known where one of them is None.

        Nothing is remembered of a tensor of inference mode, which does not tell whether it was written to.
        """
        known = [tokens for tokens in best if tokens is not None]
        if len(known) == len(best) and not logits.is_inference():
            self._known = weakref.ref(logits), logits._version, known
        return logits

    def of(self, logits: Tensor) -> list[list[int]] | None:
        """The best tokens of ``logits``; None for other ones, and for those that were written to since."""
        remembered, version, best = self._known
        return best if remembered() is logits and logits._version == version else None
