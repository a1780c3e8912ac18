"""`Draft` and `DraftBudget`: what was proposed for a batch, and how much may be."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from agentspec.runtime.device import upload


@dataclass(frozen=True)
class DraftRow:
    """The drafted tokens of one row, with one entry per token in every field.

    Args:
        tokens: ids of the target.
        source: name of the drafter of each token.
        support: how strongly each token is supported, as a small integer. Tokens of one drafter and support are taken
            to be accepted equally often.
    """

    tokens: list[int]
    source: list[str]
    support: list[int]

    def first(self, count: int) -> DraftRow:
        """Return the first ``count`` tokens."""
        return DraftRow(self.tokens[:count], self.source[:count], self.support[:count])


@dataclass(frozen=True, eq=False)
class Draft:
    """The proposed tokens of a batch: B rows of at most K.

    Args:
        rows: one per row of the batch.
        device: where the tensors of the round live.
        q: ``[B, K, V]``, the distribution that each token was drawn from; one-hot for a token that is a function of its
            context. None where every token is.
    """

    rows: tuple[DraftRow, ...]
    device: torch.device | str = "cpu"
    q: Tensor | None = None

    @classmethod
    def of_tokens(
        cls,
        tokens: Sequence[Sequence[int]],
        source: str,
        device: torch.device | str,
        *,
        support: Sequence[Sequence[int]] | None = None,
        q: Tensor | None = None,
    ) -> Draft:
        """Return a draft whose tokens all come from one drafter; their support is 0 unless it is given."""
        supports = [[0] * len(row) for row in tokens] if support is None else support
        rows = (DraftRow(list(r), [source] * len(r), list(s)) for r, s in zip(tokens, supports, strict=True))
        return cls(tuple(rows), device, q)

    @property
    def row_tokens(self) -> list[list[int]]:
        """The drafted ids of each row."""
        return [row.tokens for row in self.rows]

    @property
    def lengths(self) -> list[int]:
        """The number of drafted tokens of each row."""
        return [len(row.tokens) for row in self.rows]

    @cached_property
    def width(self) -> int:
        """K, the most tokens of a row."""
        return max(self.lengths, default=0)

    # The tensors are made when first asked for: the greedy path does without them.

    @cached_property
    def tokens(self) -> Tensor:
        """The drafted ids ``[B, K]``, 0 past the draft of a row."""
        padded = [[*row, *[0] * (self.width - len(row))] for row in self.row_tokens]
        return upload(torch.tensor(padded, dtype=torch.long).view(len(padded), self.width), self.device)

    @cached_property
    def drafted(self) -> Tensor:
        """Whether a token was drafted, ``[B, K]``."""
        lengths = upload(torch.tensor(self.lengths), self.device)
        return torch.arange(self.width, device=lengths.device) < lengths[:, None]

    def trim(self, width: int) -> Draft:
        """Return the first ``width`` tokens of each row."""
        if width >= self.width:
            return self
        q = None if self.q is None or not width else self.q[:, :width]
        return Draft(tuple(row.first(width) for row in self.rows), self.device, q)

    def drawn_lengths(self, drawing: Collection[str] = ()) -> list[int]:
        """Return how far each row reaches up to its last drawn token, which may not be dropped.

        Drawn are the tokens whose q leaves a choice, and those of the drafters ``drawing``.
        """
        if self.q is None and not drawing:
            return [0] * len(self.rows)
        choices = [[False] * n for n in self.lengths] if self.q is None else (self.q_of_tokens() < 1).tolist()
        return [
            max((k + 1 for k, name in enumerate(row.source) if name in drawing or chosen[k]), default=0)
            for row, chosen in zip(self.rows, choices, strict=True)
        ]

    def q_of_tokens(self) -> Tensor:
        """Return q of each drafted token, ``[B, K]``."""
        if self.q is None:
            return torch.ones(self.tokens.shape, device=self.tokens.device)
        return self.q.gather(-1, self.tokens[..., None])[..., 0]

    def q_at(self, n: Tensor, like: Tensor) -> Tensor:
        """Return row b's q at position ``n[b]``, zero past its draft: ``[B, V]``, of the dtype of ``like``."""
        past = torch.zeros_like(like)
        if self.width == 0:
            return past
        rows, at = torch.arange(len(n), device=n.device), n.clamp(max=self.width - 1)
        is_drafted = (self.drafted[rows, at] & (n == at)).to(like.dtype)[:, None]
        if self.q is None:
            return past.scatter_(-1, self.tokens[rows, at][:, None], is_drafted)
        return torch.where(is_drafted > 0, self.q[rows, at].to(like.dtype), past)


@dataclass(frozen=True)
class DraftBudget:
    """The most tokens to draft.

    Args:
        most: per row, of all drafters together.
        limits: per row, of single drafters by name, where they may draft fewer.
    """

    most: Sequence[int]
    limits: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def of(self, drafter: str) -> Sequence[int]:
        """Return the most tokens per row of the drafter of this name."""
        return self.limits.get(drafter, self.most)
