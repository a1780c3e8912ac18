"""A pass of a model whose layers are one stack, without transformers' modules around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.models.fusion import NO_MEMORY, SAMPLE, Call, FusedNorm, is_untouched
from agentspec.models.loading import longest_context
from agentspec.models.packing import PackedLinear, product
from agentspec.models.stack import Stack

_PARTS = {"model", "lm_head"}, {"embed_tokens", "rotary_emb", "layers", "norm"}


class Direct:
    """Embedding, layers, norm and head of ``model``, which has just these and computes nothing else."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed, self._rotate, self._stack = inner.embed_tokens, inner.rotary_emb, inner.layers[0]
        self._norm, self._head = inner.norm, product(model.lm_head)

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, keep: int) -> Tensor:
        """Logits ``[B, keep, V]`` of the last positions of ``ids`` ``[B, F]``; the mask is ``[B, 1, F, live]``."""
        hidden = self._embed(ids)
        hidden = self._stack(hidden, self._rotate(hidden, positions), mask, cache=cache)
        return self._head(self._norm(hidden[:, -keep:]))


@torch.no_grad()
def direct(model: PreTrainedModel) -> Direct | None:
    """The pass of ``model`` without the modules around its layers; None where it is built or computes otherwise."""
    if not _is_plain(model):
        return None
    computed = Direct(model)
    embeddings: Any = model.get_input_embeddings()
    dice, length = torch.Generator().manual_seed(0), min(SAMPLE, longest_context(model))
    ids = torch.randint(embeddings.weight.shape[0], (1, length), generator=dice).to(model.device)
    try:
        for start in (0, longest_context(model) - length):
            positions = torch.arange(start, start + length, device=model.device)[None]
            expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            if not Call((ids, positions, None, None, length), {}, expected).is_answered_by(computed):
                return None
    except NO_MEMORY:
        raise
    except Exception:  # whoever loads the model finds that out, and says so
        return None
    return computed


def _is_plain(model: Any) -> bool:
    inner: Any = getattr(model, "model", None)
    if not isinstance(inner, nn.Module):
        return False
    names = tuple({name for name, child in module.named_children() if child is not None} for module in (model, inner))
    if names != _PARTS or not all(map(is_untouched, (model, *inner.modules(), model.lm_head))):
        return False
    layers: Any = inner.layers
    is_stack = len(layers) == 1 and type(layers[0]) is Stack
    return is_stack and type(inner.norm) is FusedNorm and isinstance(model.lm_head, nn.Linear | PackedLinear)
