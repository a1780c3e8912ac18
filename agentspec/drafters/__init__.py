"""The drafter seam, and the contract that keeps the output exact.

1. A drafted token is either sampled from the q that is reported, or a function of its context (q one-hot).
2. Whether to draft one more token is decided before that token is drawn. A drawn token is never dropped: not for low
   confidence, not because the target would forbid it. (A token that is a function of its context may be left out:
   leaving it out is a function of the context too.)
3. The drafter of position i is chosen from the context, drafted prefix included, never from what it drew.
4. Masks come from the round's ``Walk``; the target sees the same objects.

A drafter that keeps it may propose anything, at any cost to speed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from agentspec.constraints import Walk
from agentspec.sequence import Batch


@dataclass(frozen=True)
class Draft:
    """What was proposed for a batch.

    Args:
        tokens: ``[B, K]`` ids; row b's first ``lengths[b]`` are meant.
        lengths: ``[B]``.
        q: ``[B, K, V]``, the law each token was drawn from; None where every token is a function of its context.
        sources: per row, the name of the drafter of each token; empty where all are the proposing drafter's.
        evidence: per row, how strongly each token is supported, as a small integer: tokens of one drafter and evidence
            are taken to be accepted equally often. Empty where the drafter makes no difference.
    """

    tokens: Tensor
    lengths: Tensor
    q: Tensor | None = None
    sources: Sequence[Sequence[str]] = ()
    evidence: Sequence[Sequence[int]] = ()

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[Sequence[int]],
        device: torch.device | str,
        q: Tensor | None = None,
        sources: Sequence[Sequence[str]] = (),
        evidence: Sequence[Sequence[int]] = (),
    ) -> Draft:
        """A draft of these tokens per row."""
        width = max(map(len, spans), default=0)
        padded = [[*span, *[0] * (width - len(span))] for span in spans]
        return cls(
            torch.tensor(padded, dtype=torch.long, device=device).view(len(spans), width),
            torch.tensor([len(span) for span in spans], device=device),
            q,
            sources,
            evidence,
        )

    @cached_property
    def spans(self) -> list[list[int]]:
        """The drafted ids of each row."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    @cached_property
    def drafted(self) -> Tensor:
        """``[B, K]`` bool: where a token was drafted."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def sources_or(self, name: str) -> Sequence[Sequence[str]]:
        """The drafter of each token, ``name`` where the draft does not say."""
        return self.sources or [[name] * len(span) for span in self.spans]

    def evidence_or_none(self) -> Sequence[Sequence[int]]:
        """The evidence for each token, 0 where the draft makes no difference."""
        return self.evidence or [[0] * len(span) for span in self.spans]

    def q_of_tokens(self) -> Tensor:
        """``[B, K]``: q of each drafted token."""
        if self.q is None:
            return torch.ones(self.tokens.shape, device=self.tokens.device)
        return self.q.gather(-1, self.tokens[..., None])[..., 0]

    def q_at(self, n: Tensor, like: Tensor) -> Tensor:
        """``[B, V]``, shaped and typed like ``like``: row b's q at position ``n[b]``; zero past the draft."""
        past = torch.zeros_like(like)
        if self.tokens.shape[1] == 0:
            return past
        rows, at = torch.arange(len(n), device=n.device), n.clamp(max=self.tokens.shape[1] - 1)
        if self.q is None:
            law = past.scatter(-1, self.tokens[rows, at][:, None], 1.0)
        else:
            law = self.q[rows, at].to(like.dtype)
        return torch.where(self.drafted[rows, at][:, None] & (n == at)[:, None], law, past)


class Drafter(ABC):
    """Proposes tokens for the target to check."""

    name: str

    @abstractmethod
    def propose(self, batch: Batch, gamma: Sequence[int], walk: Walk) -> Draft:
        """Draft at most ``gamma[b]`` tokens for row b, behind where ``walk`` stands.

        Reads contexts and masks from the walk, and walks over what it drafts.
        """

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Get ready for contexts that will be drafted for soon. Costs time, changes nothing."""
        return


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one target call per token."""

    name = "none"

    def propose(self, batch: Batch, gamma: Sequence[int], walk: Walk) -> Draft:
        """An empty draft."""
        nothing: list[list[int]] = [[] for _ in range(len(batch))]
        return Draft.of_spans(nothing, batch.device)
