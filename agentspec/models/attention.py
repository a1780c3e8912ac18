"""Attention over KV rows of different lengths: which mask every layer needs, and the product without repeated K/V."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from agentspec.errors import ModelLoadError
from agentspec.models.backends.native import BLOCK, kernels
from agentspec.models.config_fields import is_length, wrong_value
from agentspec.models.packing import has_linear_kernels, multiply

GROUPED_SDPA = "agentspec_sdpa"
"""Name under which ``grouped_sdpa`` is registered with transformers."""

COMPILED_SDPA = "agentspec_compiled_sdpa"
"""Name under which ``compiled_sdpa`` is registered."""

EAGER = "eager"
"""Every model's own definition of its attention, in plain tensor operations."""

_MANY_QUERIES = 128
"""Queries that a CPU is given at once, which computes masked products too."""

_MANY_SCORES = 100_000
"""Scores of a K/V head from which on oneDNN's products are worth their calls, and kernels made for the shape."""

LONG = 1024
"""Slots from which on attention reads a multiple of 64 on a CPU, so that kernels for these shapes are there already."""

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = "sliding_window"


def grouped_sdpa(
    module: Any,
    query: Tensor,  # [B, H, F, D]
    key: Tensor,  # [B, H_kv, L, D]
    value: Tensor,  # [B, H_kv, L, D_v]
    attention_mask: Tensor | None,  # [B, 1, F, L]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention that reads K and V in place, where transformers' own repeats them per query head.

    Returns ``[B, F, H, D_v]`` and no weights. Raises ``ValueError`` for terms that it does not compute.
    """
    _check_known(options)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None:
        mixed = scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            scale=scaling,
            is_causal=causal and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    elif query.device.type == "cuda":
        # No fused CUDA kernel takes both a mask and grouped heads.
        mixed = _folded_sdpa(query, key, value, attention_mask, dropout, scaling)
    elif causal and query.shape[2] > _MANY_QUERIES:
        mixed = _stepwise_sdpa(query, key, value, attention_mask, dropout, scaling)
    else:
        mixed = _sdpa(query, key, value, attention_mask, dropout, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _check_known(options: Mapping[str, Any]) -> None:
    if unknown := [name for name in ("softcap", "position_bias", "s_aux") if options.get(name) is not None]:
        raise ValueError(f"{GROUPED_SDPA} does not compute {', '.join(unknown)}; use the model's eager attention")


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None) -> Tensor:
    """Compute attention on a CPU, ``[B, H, F, D_v]``."""
    groups, live = query.shape[1] // key.shape[1], key.shape[2]
    scores = groups * query.shape[2] * live  # of one K/V head
    is_large = scores >= _MANY_SCORES or (live >= LONG and scores >= _MANY_SCORES // 4)
    is_additive = query.dtype == mask.dtype == torch.float32 and mask.shape[:2] == (len(query), 1)
    if is_large and is_additive and not dropout and has_linear_kernels():
        return _multiplied_sdpa(query, key, value, mask, scaling)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _multiplied_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """Compute it under an additive mask by oneDNN's products: on some CPUs they are twice as fast as MKL's."""
    batch, heads, width, dim = query.shape
    kv_heads = key.shape[1]
    folded = (query * (dim**-0.5 if scaling is None else scaling)).reshape(batch, kv_heads, -1, dim)
    mixed = []
    for row in range(batch):
        for head in range(kv_heads):
            scores = multiply(folded[row, head], key[row, head]).view(-1, width, key.shape[2])
            scores += mask[row]
            torch.softmax(scores, dim=-1, out=scores)
            mixed.append(multiply(scores.flatten(0, 1), value[row, head].T))
    return torch.stack(mixed).view(batch, heads, width, -1)


def _folded_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Compute it, ``[B, H, F, D_v]``, with the query heads of one K/V head folded into further rows of a query."""
    batch, heads, width, _ = query.shape
    groups = heads // key.shape[1]
    mixed = scaled_dot_product_attention(
        query.reshape(batch, heads // groups, groups * width, -1),
        key,
        value,
        attn_mask=mask.repeat(1, 1, groups, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return mixed.reshape(batch, heads, width, -1)


def _stepwise_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Compute it for the last F of L positions, without most of what the mask hides from all queries of a part."""
    width, live = query.shape[2], key.shape[2]
    parts = []
    for begin in range(0, width, _MANY_QUERIES):
        end = min(begin + _MANY_QUERIES, width)
        seen = live - width + end
        part = _sdpa(
            query[:, :, begin:end], key[:, :, :seen], value[:, :, :seen], mask[:, :, begin:end, :seen], dropout, scaling
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1).transpose(1, 2)


def compiled_sdpa(
    module: Any,
    query: Tensor,  # [B, H, F, D]
    key: Tensor,  # [B, H_kv, L, D]
    value: Tensor,  # [B, H_kv, L, D_v]
    attention_mask: Tensor | None,  # [B, 1, F, L]
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention by a native kernel, where that computes what is requested.

    A position's result depends neither on how many others are computed with it, nor on keys that its mask hides.
    """
    known = [query, key, value, *([] if attention_mask is None else [attention_mask])]
    is_traced = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in known)
    is_plain = all(t.dtype == torch.float32 and t.is_cpu and t.stride(-1) == 1 for t in known) and not is_traced
    batch, heads, _, dim = query.shape
    fits = key.shape == value.shape and key.shape[0] == batch and key.shape[3] == dim and dim % BLOCK == 0
    fits &= heads % key.shape[1] == 0 and not dropout
    if attention_mask is None or attention_mask.shape[1] != 1 or not is_plain or not fits:
        return grouped_sdpa(module, query, key, value, attention_mask, dropout, scaling, **options)
    _check_known(options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kernels().attention(query, key, value, attention_mask, scale), None


SDPA = {GROUPED_SDPA: grouped_sdpa, COMPILED_SDPA: compiled_sdpa}
"""Our own attention functions by name."""

for _name, _function in SDPA.items():
    AttentionInterface.register(_name, _function)
    # Only plain transformers calls on the same module build a mask from this; a CausalLM passes finished ones.
    AttentionMaskInterface.register(_name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def preferred_attention(model: PreTrainedModel) -> str:
    """Return a name of ``SDPA`` where sdpa computes what ``model`` needs and none else was chosen, else "eager"."""
    softcapped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    able = bool(getattr(model, "_supports_sdpa", False)) and not softcapped
    chosen = current_attention(model)
    if not able or chosen == EAGER:
        return EAGER
    return COMPILED_SDPA if chosen == COMPILED_SDPA else GROUPED_SDPA


def compile_attention(model: PreTrainedModel) -> None:
    """Let ``model`` use ``compiled_sdpa``, where it can use ``grouped_sdpa``."""
    if preferred_attention(model) == GROUPED_SDPA:
        set_attention(model, COMPILED_SDPA)


def current_attention(model: PreTrainedModel) -> str | None:
    """Return the name of the attention of ``model``: of its text part, where it has others."""
    name: str | None = model.config.get_text_config()._attn_implementation
    return name


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switch the attention of ``model``; one whose attention cannot be exchanged keeps its own.

    Parts that read no text (images, sound) keep theirs: not all of them can do what the text part can.
    """
    if not model._can_set_attn_implementation():
        return
    text = model.config.get_text_config()
    part = next((name for name in model.config.sub_configs if getattr(model.config, name, None) is text), None)
    model.set_attn_implementation(implementation if part is None else {part: implementation})


@dataclass(frozen=True)
class LayerMasks:
    """The masks that a model's layers need: one window (None: unbounded) per kind of layer."""

    windows: Mapping[str, int | None]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerMasks:
        """Read the kinds of layers from the config of ``model``.

        Raises ``ModelLoadError`` for layers that keep anything but keys and values by position, and for a window that
        is no positive integer, where the family has windows.
        """
        config = model.config.get_text_config()
        window = getattr(config, WINDOW, None)
        # Without layer types a window holds for every layer (Mistral, Phi-3, Starcoder2).
        kinds = set(getattr(config, "layer_types", None) or [FULL if window is None else SLIDING])
        if strange := sorted(kinds - {FULL, SLIDING}):
            raise ModelLoadError(
                f"{type(model).__name__}: layers of kind {', '.join(strange)} keep state that cannot be addressed by "
                f"position; expected only {FULL} and {SLIDING}. Choose a model with plain attention layers"
            )
        if SLIDING in kinds and not is_length(window):
            if _heeds_windows(config):
                raise _wrong_window(model, window)
            return NO_WINDOWS
        return cls({kind: window if kind == SLIDING else None for kind in sorted(kinds)})

    def build(self, slots: Tensor, live: int, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Additive masks for queries at ``slots`` [B, F] over ``live`` keys: 0 where seen, else the dtype's minimum.

        Returns one ``[B, 1, F, live]`` tensor for a model of one kind of layer, else a dict from kind to tensor,
        which is what transformers' models of several kinds take. A query always sees itself, so no row is empty.
        """
        queries = slots[:, None, :, None]  # [B, 1, F, 1]
        keys = torch.arange(live, device=slots.device)
        hidden_value = torch.finfo(dtype).min
        masks: dict[str, Tensor] = {}
        for kind, window in self.windows.items():
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            masks[kind] = torch.zeros(hidden.shape, dtype=dtype, device=slots.device).masked_fill_(hidden, hidden_value)
        return masks if len(masks) > 1 else next(iter(masks.values()))


NO_WINDOWS = LayerMasks({FULL: None})
"""The masks of a model whose layers all see everything before them."""


def readings(model: PreTrainedModel) -> list[LayerMasks | None]:
    """Return what the masks of ``model`` may be, None for the config's: a family may ignore a window it is given."""
    config = model.config.get_text_config()
    names_windows = getattr(config, WINDOW, None) is not None or SLIDING in LayerMasks.of(model).windows
    return [None, NO_WINDOWS] if names_windows and not _heeds_windows(config) else [None]


def _heeds_windows(config: PreTrainedConfig) -> bool:
    """Whether the family of ``config`` knows of windows: a config keeps whatever else it is given, too."""
    kind = type(config)
    fields = [WINDOW, *(["layer_types"] if getattr(config, "layer_types", None) else [])]
    return any(hasattr(kind, name) or name in inspect.signature(kind.__init__).parameters for name in fields)


def _wrong_window(model: PreTrainedModel, window: object) -> ModelLoadError:
    kind = type(model).__name__
    if window is None:
        return ModelLoadError(f"{kind}: {SLIDING} layers without a {WINDOW} in the config")
    return wrong_value(f"config of {kind}", WINDOW, window, "a positive integer, or null for layers without a window")


@contextmanager
def narrow_window(model: PreTrainedModel, window: int) -> Iterator[None]:
    """Let the sliding layers of ``model`` see ``window`` tokens for a while; nothing happens to a model without any."""
    config = model.config.get_text_config()
    original = getattr(config, WINDOW, None)
    if original is None:
        yield
        return
    config.sliding_window = window
    try:
        yield
    finally:
        config.sliding_window = original
