"""The drafter seam, and the contract that keeps the output exact.

1. A drafted token is either sampled from the q that is reported, or a function of its context (q one-hot).
2. Whether to draft one more token is decided before that token is drawn. A drawn token is never dropped: not for low
   confidence, not because the target would forbid it. (A token that is a function of its context may be left out:
   leaving it out is a function of the context too.)
3. The drafter of position i is chosen from the context, drafted prefix included, never from what it drew.
4. What is legal is asked of the round's ``GrammarCursor``; the target asks it too.

A drafter that keeps it may propose anything, at any cost to speed alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from agentspec.batch import Batch
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel
from agentspec.runtime.device import upload


class Draft:
    """What was proposed for a batch.

    Args:
        tokens: ``[B, K]`` ids of the target; row b's first ``lengths[b]`` are meant.
        lengths: ``[B]``.
        q: ``[B, K, V]``, the law each token was drawn from; None where every token is a function of its context.
        sources: per row, the name of the drafter of each token; empty where all are the proposing drafter's.
        evidence: per row, how strongly each token is supported, as a small integer: tokens of one drafter and evidence
            are taken to be accepted equally often. Empty where the drafter makes no difference.
    """

    def __init__(
        self,
        tokens: Tensor,
        lengths: Tensor,
        q: Tensor | None = None,
        sources: Sequence[Sequence[str]] = (),
        evidence: Sequence[Sequence[int]] = (),
    ) -> None:
        self.tokens, self.lengths = tokens, lengths
        self.q, self.sources, self.evidence = q, sources, evidence
        self._device: torch.device | str = tokens.device

    @classmethod
    def of_spans(
        cls,
        spans: Sequence[Sequence[int]],
        device: torch.device | str,
        q: Tensor | None = None,
        sources: Sequence[Sequence[str]] = (),
        evidence: Sequence[Sequence[int]] = (),
    ) -> Draft:
        """A draft of these tokens per row, which are uploaded when somebody asks for them."""
        draft = cls.__new__(cls)
        draft.spans = [list(span) for span in spans]
        draft.q, draft.sources, draft.evidence = q, sources, evidence
        draft._device = device
        return draft

    @cached_property
    def tokens(self) -> Tensor:
        """``[B, K]``: the drafted ids, 0 behind them."""
        padded = [[*span, *[0] * (self.width - len(span))] for span in self.spans]
        return upload(torch.tensor(padded, dtype=torch.long).view(len(padded), self.width), self._device)

    @cached_property
    def lengths(self) -> Tensor:
        """``[B]``: how many tokens were drafted."""
        return upload(torch.tensor([len(span) for span in self.spans]), self._device)

    @cached_property
    def spans(self) -> list[list[int]]:
        """The drafted ids of each row."""
        return [row[:n] for row, n in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)]

    @cached_property
    def width(self) -> int:
        """K, the most tokens of a row."""
        return self.tokens.shape[1] if "tokens" in vars(self) else max(map(len, self.spans), default=0)

    @cached_property
    def drafted(self) -> Tensor:
        """``[B, K]`` bool: where a token was drafted."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    def sources_or(self, name: str) -> Sequence[Sequence[str]]:
        """The drafter of each token, ``name`` where the draft does not say."""
        return self.sources or [[name] * len(span) for span in self.spans]

    def named(self, name: str) -> Draft:
        """The same draft, with ``name`` as the drafter of each token where it does not say."""
        if self.sources:
            return self
        named = copy(self)
        named.sources = self.sources_or(name)
        return named

    def cut(self, width: int) -> Draft:
        """The first ``width`` tokens of each row."""
        if width >= self.width:
            return self
        cut = Draft.of_spans(
            [span[:width] for span in self.spans],
            self._device,
            None if self.q is None or not width else self.q[:, :width],
            [row[:width] for row in self.sources],
            [row[:width] for row in self.evidence],
        )
        if "tokens" in vars(self):  # on their device already
            cut.tokens, cut.lengths = self.tokens[:, :width], self.lengths.clamp(max=width)
        return cut

    def drawn_lengths(self, drawing: Collection[str] = ()) -> list[int]:
        """How far each row reaches up to its last drawn token, which may not be cut off.

        Drawn are the tokens whose q leaves a choice, and those of the drafters ``drawing``.
        """
        if self.q is None and not drawing:
            return [0] * len(self.spans)
        choices = [[False] * len(span) for span in self.spans] if self.q is None else (self.q_of_tokens() < 1).tolist()
        return [
            max((k + 1 for k, name in enumerate(names) if name in drawing or chosen[k]), default=0)
            for names, chosen in zip(self.sources_or(""), choices, strict=True)
        ]

    def evidence_or_zero(self) -> Sequence[Sequence[int]]:
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
        if self.width == 0:
            return past
        rows, at = torch.arange(len(n), device=n.device), n.clamp(max=self.width - 1)
        is_drafted = (self.drafted[rows, at] & (n == at)).to(like.dtype)[:, None]
        if self.q is None:
            return past.scatter_(-1, self.tokens[rows, at][:, None], is_drafted)
        return torch.where(is_drafted > 0, self.q[rows, at].to(like.dtype), past)


class Gamma(list[int]):
    """The most tokens to draft per row.

    Args:
        most: of all drafters together.
        drawn: of single drafters, by name, where they may draft fewer.
    """

    def __init__(self, most: Iterable[int], drawn: Mapping[str, Sequence[int]] | None = None) -> None:
        super().__init__(most)
        self._drawn = drawn or {}

    def of(self, drafter: str) -> Sequence[int]:
        """The most tokens of one drafter."""
        return self._drawn.get(drafter, self)


class Drafter(ABC):
    """Proposes tokens for the target to check."""

    name: str

    @abstractmethod
    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """Draft at most ``gamma[b]`` tokens for row b, behind where ``cursor`` stands.

        Reads contexts from the cursor, asks it what is legal, and walks over what it drafts.
        """

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Get ready for contexts that will be drafted for soon. Costs time, changes nothing."""
        return

    def models(self) -> Mapping[str, LanguageModel]:
        """The models that tokens are drawn from, one pass each, by the name of the drafter that counts them."""
        return {}


class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one target call per token."""

    name = "none"

    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """An empty draft."""
        nothing: list[list[int]] = [[] for _ in range(len(batch))]
        return Draft.of_spans(nothing, batch.device)
