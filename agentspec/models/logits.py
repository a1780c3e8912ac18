"""`Logits`: what a pass finds after some positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, eq=False)
class Logits:
    """The next-token logits of some contexts. Whoever changes the numbers makes a new value without the argmax.

    Args:
        values: ``[B, K, V]``, at least float32; a row may mean fewer than K positions, the rest is padding.
        argmax: of each position that is meant, ``NO_TOKEN`` where no logit is above -inf or one is NaN; None where the
            pass did not find it.
    """

    values: Tensor
    argmax: list[list[int]] | None = None

    def limit(self, vocab_size: int) -> Logits:
        """Return the logits of the first ``vocab_size`` ids alone."""
        if vocab_size >= self.values.shape[-1]:
            return self
        is_within = self.argmax is not None and all(token < vocab_size for row in self.argmax for token in row)
        return Logits(self.values[..., :vocab_size], self.argmax if is_within else None)


@dataclass(frozen=True, eq=False)
class RowLogits:
    """The logits after some positions of one context.

    Args:
        values: ``[K, V]``.
        argmax: of each; None where the pass did not find it.
    """

    values: Tensor
    argmax: list[int] | None = None

    def last(self, count: int) -> RowLogits:
        """Return those after the last ``count`` positions."""
        begin = len(self.values) - count
        return RowLogits(self.values[begin:], None if self.argmax is None else self.argmax[begin:])


def stack(rows: Sequence[RowLogits]) -> Logits:
    """Return the logits of rows, padded on the right. Callers get ordinary tensors, no inference tensors."""
    values = [row.values for row in rows]
    if len(values) == 1 and not values[0].is_inference():
        stacked = values[0][None]
    else:
        is_even = len(set(map(len, values))) == 1
        stacked = torch.stack(values) if is_even else pad_sequence(values, batch_first=True)
    argmax = [row.argmax for row in rows if row.argmax is not None]
    return Logits(stacked, argmax if len(argmax) == len(rows) else None)
