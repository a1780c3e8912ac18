"""Layers of a decoder that our own kernels compute from first to last, without Python in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from agentspec.models.attention import compiled_sdpa
from agentspec.models.kernels import BLOCK, kernels
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.packing import PanelLinear
from agentspec.models.panels import FORMATS

_PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class _Layer(ctypes.Structure):
    """As in layers.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p * 4),
        ("biases", ctypes.c_void_p * 4),
        ("formats", ctypes.c_int64 * 4),
        *((name, ctypes.c_void_p) for name in ("first_norm", "second_norm", "head_norm")),
        *((name, ctypes.c_double) for name in ("first_eps", "second_eps", "head_eps")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    )


class CompiledLayers:
    """Layers as ``Stack`` has them, over the rows of a cache.

    Args:
        layers: that ``fit``; they hold the weights, which must stay where they are.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._heads = [layer.self_attn.heads for layer in layers]
        self._inner: int = layers[0].mlp.down_proj.in_features
        self._layers = (_Layer * len(layers))(*map(_described, layers))
        self._layout: tuple[int, int] | None = None  # of the cache whose addresses they have
        self._compute = kernels().function(
            "layers",
            *(ctypes.POINTER(_Layer), ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int),
        )

    @staticmethod
    def fit(layers: Sequence[Any]) -> bool:
        """Whether all is of kinds and sizes that the kernels compute."""
        products = [[layer.get_submodule(name) for name in _PRODUCTS] for layer in layers]
        if not all(isinstance(product, PanelLinear) for of_layer in products for product in of_layer):
            return False
        sizes = {tuple((product.in_features, product.out_features) for product in of_layer) for of_layer in products}
        heads = [layer.self_attn.heads for layer in layers]
        kinds = {(each.query_heads, each.kv_heads, each.dim, each.scaling) for each in heads}
        return (
            len(sizes) == len(kinds) == 1
            and all(each.attention is compiled_sdpa and each.dim % BLOCK == 0 for each in heads)
            and all(isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) for layer in layers)
        )

    def can_take(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> bool:
        """Whether this pass writes a cache that knows all layers, and all is as the kernels read it."""
        if mask is None or not isinstance(cache, RaggedKV) or not cache.is_writing:
            return False
        if self._layout != (id(cache), cache.layout):
            stores = [cache.stores(heads.layer) for heads in self._heads]
            if None in stores:
                return False
            for layer, store in zip(self._layers, stores, strict=True):
                assert store is not None
                layer.keys, layer.values = (part.data_ptr() for part in store)
            self._layout = id(cache), cache.layout
        return mask.stride(-1) == 1 and all(
            tensor.dtype == torch.float32 and tensor.is_cpu for tensor in (hidden, mask, *angles)
        )

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: RaggedKV) -> Tensor:
        """``[B, F, dim]`` to ``[B, F, dim]``, where that ``can_take`` them.

        Angles are ``[B, F, heads.dim]``, or one for all rows, cosines first; the mask is ``[B, 1, F, live]``.
        """
        heads, (batch, width, dim) = self._heads[0], hidden.shape
        live, rows, slots = cache.written()
        stores = cache.stores(heads.layer)
        assert stores is not None
        each = (heads.query_heads + 2 * heads.kv_heads) * heads.dim
        mask = mask.expand(batch, 1, width, live)
        sizes = (ctypes.c_int64 * 17)(
            *(batch, heads.query_heads, heads.kv_heads, width, live, heads.dim),
            *(width * each, heads.dim, each),
            *(step for store in stores for step in store.stride()[:3]),
            *(mask.stride(0), mask.stride(2)),
        )
        out = hidden.clone(memory_format=torch.contiguous_format)
        cosines, sines = (angle.contiguous() for angle in angles)
        rows, slots = rows.contiguous(), slots.contiguous()
        self._compute(
            *(self._layers, len(self._layers), sizes, dim, self._inner, out.data_ptr()),
            *(cosines.data_ptr(), sines.data_ptr(), 0 if len(cosines) == 1 else width * heads.dim, mask.data_ptr()),
            *(rows.data_ptr(), slots.data_ptr(), heads.scaling, torch.get_num_threads()),
        )
        return out


def _described(layer: Any) -> _Layer:
    products = [layer.get_submodule(name) for name in _PRODUCTS]
    norm, heads = layer.self_attn.heads.norm_weight, layer.self_attn.heads
    names = list(FORMATS)
    return _Layer(
        weights=(ctypes.c_void_p * 4)(*(product.packed.data_ptr() for product in products)),
        biases=(ctypes.c_void_p * 4)(*(None if p.bias is None else p.bias.data_ptr() for p in products)),
        formats=(ctypes.c_int64 * 4)(*(names.index(product.layout) for product in products)),
        first_norm=layer.input_layernorm.weight.data_ptr(),
        second_norm=layer.post_attention_layernorm.weight.data_ptr(),
        head_norm=None if norm is None else norm.data_ptr(),
        first_eps=layer.input_layernorm.eps,
        second_eps=layer.post_attention_layernorm.eps,
        head_eps=heads.norm_eps,
    )
