"""Drafts by a cheaper model that speaks the same tokens, by itself or translated (``models/translated.py``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentspec.batch import Batch
from agentspec.drafters import Draft, Drafter
from agentspec.grammars import GrammarCursor
from agentspec.models import CachingModel, LanguageModel, SelectiveModel, max_context
from agentspec.rng import Role
from agentspec.runtime.device import vector
from agentspec.sampling import warp


class ModelDrafter(Drafter):
    """Draws gamma tokens from a draft model, one after the other, under the target's settings and masks.

    A draft that scores more or fewer ids than the target (padded heads) is cut or filled to the target's; where its
    context ends, or holds an id that it does not know, it drafts nothing.

    Args:
        model: the draft; the target itself is allowed (then every token is accepted).
        masked: whether it draws under the target's grammar masks. Without them the law of the text is the same, and
            fewer drafts are accepted.
    """

    name = "model"

    def __init__(self, model: LanguageModel, *, masked: bool = True) -> None:
        self.model = model
        self._masked = masked
        self._limit = max_context(model) or math.inf

    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        """``gamma[b]`` tokens from q; fewer where an end token was drawn."""
        spans: list[list[int]] = [[] for _ in range(len(batch))]
        q: Tensor | None = None
        for k in range(max(gamma)):
            rows = [b for b in range(len(batch)) if k < gamma[b] and cursor.is_open(b)]
            rows = [b for b in rows if len(spans[b]) == k and self._can_read(cursor.context(b), cursor.vocab_size)]
            if not rows:
                break
            logits = self.model.next_logits([cursor.context(b) for b in rows], [1] * len(rows))[
                ..., : cursor.vocab_size
            ]
            logits = pad(logits, (0, cursor.vocab_size - logits.shape[-1]), value=-math.inf)
            params = [batch.params[b] for b in rows]
            masks = cursor.token_masks(rows) if self._masked else None
            law = warp(logits, params, masks, [batch.prefix(b, cursor.tokens(b)) for b in rows])[:, 0]  # [R, V]
            at = vector([cursor.drafted(b) for b in rows], law, torch.long)
            tokens = batch.rng.select(rows).draw(law, Role.DRAFT, at)
            if q is None:
                q = law.new_zeros(len(batch), max(gamma), law.shape[-1])
            q[vector(rows, law, torch.long), k] = law
            told = torch.stack([tokens, law[:, 0].isnan().long()], dim=1).tolist()  # here the host waits for the draft
            for b, (token, is_over) in zip(rows, told, strict=True):
                if not is_over:  # where nothing is legal, nothing can be drawn
                    spans[b].append(token)
                    cursor.consume(b, token)
        width = max(map(len, spans))
        return Draft.of_spans(spans, batch.device, None if q is None else q[:, :width])

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Let the draft model compute the contexts."""
        known = [context for context in contexts if self._can_read(context, None)]
        if known and isinstance(self.model, CachingModel):
            self.model.next_logits(known, [0] * len(known))

    def models(self) -> Mapping[str, LanguageModel]:
        """The draft model."""
        return {self.name: self.model}

    def _can_read(self, context: list[int], target_ids: int | None) -> bool:
        """Whether the context fits the draft's own, and holds no id that only the target has."""
        if isinstance(self.model, SelectiveModel):
            return self.model.can_read(context)
        has_all_ids = target_ids is not None and target_ids <= self.model.vocab_size
        return len(context) <= self._limit and (has_all_ids or max(context) < self.model.vocab_size)
