"""A pass of a model whose layers are one stack, without transformers' modules around them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.models.fusion import Call, FusedNorm, is_untouched, named, record_calls
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.packing import PackedLinear
from agentspec.models.stack import Stack

_PARTS = {"model", "lm_head"}, {"embed_tokens", "rotary_emb", "layers", "norm"}
_CACHES = {"cache", "past_key_values", "use_cache", "DynamicCache", "get_seq_length"}
_NAMES = (  # what their code may name beside them
    {"CausalLMOutputWithPast", "config", "last_hidden_state", "hidden_states", "attentions", "loss_function"}
    | {"vocab_size", "slice_logits_to_keep", "isinstance", "int", "slice"},
    {"BaseModelOutputWithPast", "ValueError", "arange", "config", "create_causal_mask", "device", "shape", "torch"}
    | {"create_sliding_window_causal_mask", "has_sliding_layers", "layer_types", "sliding_window", "isinstance"}
    | {"dict", "enumerate", "num_hidden_layers", "unsqueeze"},
)


class Direct:
    """Embedding, layers, norm and head of ``model``, which has just these and computes nothing else."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Any, keep: int) -> Tensor:
        """Logits ``[B, keep, V]`` of the last positions of ``ids`` ``[B, F]``; the mask is ``[B, 1, F, live]``."""
        inner = self._model.model
        hidden = inner.embed_tokens(ids)
        hidden = inner.layers[0](hidden, inner.rotary_emb(hidden, positions), mask, cache=cache)
        return self._scores(
            inner.norm(hidden[:, -keep:]), cache.written()[0].meant() if isinstance(cache, RaggedKV) else None
        )

    def _scores(self, hidden: Tensor, meant: Tensor | None) -> Tensor:
        """Of columns that only pad zeros."""
        if meant is None:
            logits: Tensor = self._model.lm_head(hidden)
            return logits
        meant = meant[:, -hidden.shape[1] :]
        scores = self._model.lm_head(hidden[meant])
        logits = scores.new_zeros(*meant.shape, scores.shape[-1])
        logits[meant] = scores
        return logits

    @property
    def is_whole(self) -> bool:
        """Whether what is left out has no hooks."""
        return is_untouched(self._model) and is_untouched(self._model.model)


@torch.no_grad()
def direct(model: PreTrainedModel) -> Direct | None:
    """Return the pass of ``model`` without the modules around its layers; None where it is built otherwise."""
    if not _is_plain(model):
        return None
    computed, calls = Direct(model), record_calls(model, [""])[""]
    for call in calls:
        ids, positions = call.options["input_ids"], call.options["position_ids"]
        asked = ids, positions, None, None, ids.shape[1]
        if not Call(asked, {}, call.result.logits).is_answered_by(computed):
            return None
    return computed if calls else None


def _is_plain(model: Any) -> bool:
    inner: Any = getattr(model, "model", None)
    if not isinstance(inner, nn.Module):
        return False
    for module, parts, names in zip((model, inner), _PARTS, _NAMES, strict=True):
        if {name for name, child in module.named_children() if child is not None} != parts:
            return False
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or not (parts | names | _CACHES).issuperset(named(code)):
            return False
    if not all(map(is_untouched, (model, *inner.modules(), model.lm_head))):
        return False
    layers: Any = inner.layers
    is_stack = len(layers) == 1 and type(layers[0]) is Stack
    return is_stack and type(inner.norm) is FusedNorm and isinstance(model.lm_head, nn.Linear | PackedLinear)
