"""Drafts by a cheaper model that speaks the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.constraints import Walk
from agentspec.dice import Role
from agentspec.drafters import Draft, Drafter
from agentspec.models import LanguageModel
from agentspec.sampling import warp
from agentspec.sequence import Batch


class ModelDrafter(Drafter):
    """Draws gamma tokens from a draft model, one after the other, under the target's settings and masks.

    Args:
        model: the draft; the target itself is allowed (then every token is accepted).
    """

    name = "model"

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def propose(self, batch: Batch, gamma: Sequence[int], walk: Walk) -> Draft:
        """``gamma[b]`` tokens from q; fewer where an end token was drawn."""
        spans: list[list[int]] = [[] for _ in range(len(batch))]
        q: Tensor | None = None
        for k in range(max(gamma)):
            rows = [b for b in range(len(batch)) if k < gamma[b] and walk.is_open(b)]
            if not rows:
                break
            logits = self.model.next_logits([walk.context(b) for b in rows], [1] * len(rows))
            params = [batch.params[b] for b in rows]
            law = warp(logits, params, walk.stack(rows), [walk.prefix(b) for b in rows])[:, 0]  # [R, V]
            at = torch.tensor([walk.drafted(b) for b in rows], device=law.device)
            tokens = batch.dice.select(rows).draw(law, Role.DRAFT, at)
            if q is None:
                q = law.new_zeros(len(batch), max(gamma), law.shape[-1])
            q[rows, k] = law
            for b, token in zip(rows, tokens.tolist(), strict=True):
                spans[b].append(token)
                walk.advance(b, token)
        width = max(map(len, spans))
        return Draft.of_spans(
            spans, [[self.name] * len(s) for s in spans], batch.device, None if q is None else q[:, :width]
        )

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Let the draft model compute the contexts."""
        self.model.next_logits(contexts, [0] * len(contexts))
