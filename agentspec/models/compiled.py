"""Layers of a decoder that our own kernels compute from first to last, without Python in between."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from agentspec.models.attention import compiled_sdpa
from agentspec.models.backends.native import BLOCK, Sizes, kernels
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.packing import PanelLinear
from agentspec.models.panels import FORMATS

_PRODUCTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


class Layer(ctypes.Structure):
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
        layers: that ``fit``; their weights, as they are now.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._heads = [layer.self_attn.heads for layer in layers]
        self.heads = self._heads[0]
        """Those of the first layer: all are alike."""
        self.inner: int = layers[0].mlp.down_proj.in_features
        """Numbers between gate and down of a feed-forward block."""
        self._weights = list(map(_weights, layers))  # which the addresses below need
        self._layers = (Layer * len(layers))(*map(_described, layers, self._weights))
        # By cache, since several may serve one model in threads of their own: its layout, and layers over it.
        self._by_cache: WeakKeyDictionary[RaggedKV, tuple[int, Any]] = WeakKeyDictionary()
        self._compute = kernels().function(
            "layers",
            *(ctypes.POINTER(Layer), ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.c_int64, ctypes.c_int64),
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
            *(ctypes.POINTER(ctypes.c_int64), ctypes.c_void_p, ctypes.c_float, ctypes.c_int),
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
        norms = [tensor for layer in layers for tensor in _weights(layer)[8:] if tensor is not None]
        of_first = heads[0]
        return (
            len(sizes) == len(kinds) == 1
            and products[0][0].out_features == (of_first.query_heads + 2 * of_first.kv_heads) * of_first.dim
            and all(norm.dtype == torch.float32 and norm.is_cpu for norm in norms)
            and all(each.attention is compiled_sdpa and each.dim % BLOCK == 0 for each in heads)
            and all(isinstance(layer.mlp.act_fn, nn.SiLU | SiLUActivation) for layer in layers)
        )

    def __call__(self, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any) -> Tensor | None:
        """``[B, F, dim]`` to ``[B, F, dim]``.

        Angles are ``[B, F, heads.dim]``, or one for all rows, cosines first; the mask is ``[B, 1, F, live]``. None
        where this is no pass that writes a cache which knows all layers, or something is not as the kernels read it.
        """
        if mask is None or mask.stride(-1) != 1 or not isinstance(cache, RaggedKV) or not cache.is_writing:
            return None
        if not all(tensor.dtype == torch.float32 and tensor.is_cpu for tensor in (hidden, mask, *angles)):
            return None
        layers = self.over(cache)
        return None if layers is None else self._computed(layers, hidden, angles, mask, cache)

    def over(self, cache: RaggedKV) -> Any:
        """Return the layers (an array of ``Layer``) with the addresses of their K and V; None without them."""
        layout, layers = self._by_cache.get(cache, (None, None))
        if layout != cache.layout:
            stores = [cache.stores(heads.layer) for heads in self._heads]
            if None in stores:
                return None
            layers = type(self._layers).from_buffer_copy(self._layers)
            for layer, store in zip(layers, stores, strict=True):
                assert store is not None
                layer.keys, layer.values = (part.data_ptr() for part in store)
            self._by_cache[cache] = cache.layout, layers
        return layers

    def sizes(
        self, batch: int, width: int, live: int, cache: RaggedKV, *, mask: tuple[int, int] = (0, 0), window: int = 0
    ) -> Any:
        """Return the ``Sizes`` of attention over ``live`` slots of a cache, for rows of at most ``width`` positions.

        Args:
            batch: number of rows.
            width: the most positions of a row.
            live: slots that attention reads.
            cache: holds K and V.
            mask: strides by row and by position, where there is one.
            window: slots that a position sees where there is none; 0 for all.
        """
        heads, stores = self.heads, cache.stores(self.heads.layer)
        if stores is None or live > cache.capacity:
            raise IndexError(f"Expected a cache that has {live} slots; got one of {cache.capacity}.")
        each = (heads.query_heads + 2 * heads.kv_heads) * heads.dim
        return Sizes(
            *(batch, heads.query_heads, heads.kv_heads, width, live, heads.dim),
            *(width * each, heads.dim, each),
            *(step for store in stores for step in store.stride()[:3]),
            *(*mask, window),
        )

    def _computed(
        self, layers: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, cache: RaggedKV
    ) -> Tensor:
        batch, width, dim = hidden.shape
        block, rows, slots = cache.written()
        meant = block.meant()
        mask = mask.expand(batch, 1, width, block.live)
        sizes = self.sizes(batch, width, block.live, cache, mask=(mask.stride(0), mask.stride(2)))
        starts = (ctypes.c_int64 * (batch + 1))(0, *accumulate(block.counts or [width] * batch))
        parts = [part.expand(batch, *part.shape[1:]) for part in (hidden, *angles, slots)]
        tokens, cosines, sines, slots = (part.flatten(0, 1) if meant is None else part[meant] for part in parts)
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        cosines, sines, slots, rows = cosines.contiguous(), sines.contiguous(), slots.contiguous(), rows.contiguous()
        self._compute(
            *(layers, len(layers), sizes, dim, self.inner, tokens.data_ptr()),
            *(cosines.data_ptr(), sines.data_ptr(), mask.data_ptr(), rows.data_ptr(), starts, slots.data_ptr()),
            *(self.heads.scaling, torch.get_num_threads()),
        )
        if meant is None:
            return tokens.view(batch, width, dim)
        out = hidden.new_zeros(batch, width, dim)
        out[meant] = tokens
        return out


def _weights(layer: Any) -> list[Tensor | None]:
    """Weights and biases of the products, then the norms."""
    products = [layer.get_submodule(name) for name in _PRODUCTS]
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight, layer.self_attn.heads.norm_weight
    found = [*(product.packed for product in products), *(product.bias for product in products), *norms]
    return [None if tensor is None else tensor.detach().contiguous() for tensor in found]


def _described(layer: Any, weights: Sequence[Tensor | None]) -> Layer:
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in weights]
    places = [list(FORMATS).index(layer.get_submodule(name).layout) for name in _PRODUCTS]
    return Layer(
        weights=(ctypes.c_void_p * 4)(*addresses[:4]),
        biases=(ctypes.c_void_p * 4)(*addresses[4:8]),
        formats=(ctypes.c_int64 * 4)(*places),
        first_norm=addresses[8],
        second_norm=addresses[9],
        head_norm=addresses[10],
        first_eps=layer.input_layernorm.eps,
        second_eps=layer.post_attention_layernorm.eps,
        head_eps=layer.self_attn.heads.norm_eps,
    )
