"""Drafts by a cheaper model with the target's vocabulary, or across vocabularies (``models/cross_vocab``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel, as_language_model
from agentspec.rng import Role
from agentspec.runtime.device import vector
from agentspec.sampling import warp


class ModelDrafter(Drafter):
    """A drafter that draws tokens from a draft model, one after the other, under the target's settings and masks.

    Logits over more or fewer ids than the target's (padded heads) are cut or filled to those. Where the context is too
    long for the draft model, or holds an id that it does not know, nothing is drafted.

    Args:
        model: the draft model; the target itself is allowed (then every token is accepted).
        masked: whether it draws under the target's grammar masks. Without them the distribution of the text is the
            same, and fewer tokens are accepted.
    """

    name = "model"

    def __init__(self, model: LanguageModel, *, masked: bool = True) -> None:
        self.model = as_language_model(model)
        self._masked = masked

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        """Draw up to the budget's tokens from q; fewer where an end token was drawn."""
        most = budget.of(self.name)
        tokens: list[list[int]] = [[] for _ in range(len(batch))]
        q: Tensor | None = None
        for k in range(max(most)):
            rows = [b for b in range(len(batch)) if k < most[b] and cursor.is_open(b)]
            rows = [b for b in rows if len(tokens[b]) == k and self._can_read(cursor.context(b), cursor.vocab_size)]
            if not rows:
                break
            q_k = self._next_q(rows, batch, cursor)
            at = vector([cursor.drafted(b) for b in rows], q_k, torch.long)
            drawn = batch.rng.select(rows).draw(q_k, Role.DRAFT, at)
            if q is None:
                q = q_k.new_zeros(len(batch), max(most), q_k.shape[-1])
            q[vector(rows, q_k, torch.long), k] = q_k
            read = torch.stack([drawn, q_k[:, 0].isnan().long()], dim=1).tolist()  # the host waits for the draft model
            for b, (token, is_undefined) in zip(rows, read, strict=True):
                if not is_undefined:  # where nothing is legal, nothing can be drawn
                    tokens[b].append(token)
                    cursor.consume(b, token)
        width = max(map(len, tokens))
        return Draft.of_tokens(tokens, self.name, batch.device, q=None if q is None else q[:, :width])

    def _next_q(self, rows: list[int], batch: Batch, cursor: GrammarCursor) -> Tensor:
        """Return the distribution ``[R, V]`` of the next token of each of these rows."""
        contexts, size = [cursor.context(b) for b in rows], cursor.vocab_size
        logits = self.model.next_logits(contexts, [1] * len(rows)).limit(size).values
        logits = pad(logits, (0, size - logits.shape[-1]), value=-math.inf)
        params, prefixes = [batch.params[b] for b in rows], [batch.prefix(b, cursor.tokens(b)) for b in rows]
        return warp(logits, params, cursor.token_masks(rows) if self._masked else None, prefixes, batch.kernels)[:, 0]

    def prefill(self, contexts: Sequence[list[int]]) -> None:
        """Let the draft model compute the contexts."""
        known = [context for context in contexts if self._can_read(context)]
        if known and self.model.is_cached:
            self.model.next_logits(known, [0] * len(known))

    def models(self) -> Mapping[str, LanguageModel]:
        """Return the draft model."""
        return {self.name: self.model}

    def _can_read(self, context: list[int], target_ids: int | None = None) -> bool:
        """Return whether the model can read a context of the target's ids, which are below ``target_ids``."""
        has_all_ids = target_ids is not None and target_ids <= self.model.vocab_size  # sooner than to look at each
        return (has_all_ids or max(context) < self.model.vocab_size) and self.model.can_read(context)
