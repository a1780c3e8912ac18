"""A decoder's layers as one loop over their weights, without the modules around them.

A pass reads all weights and so empties the processor's caches; every object that Python touches on its way through a
layer is then fetched from memory. Here a layer is one small object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.models.attention import LayerMasks
from agentspec.models.compiled import CompiledLayers
from agentspec.models.fusion import (
    Call,
    Fused,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    Heads,
    Product,
    attend,
    cache_of,
    feed_forward,
    record_calls,
)
from agentspec.models.packing import PackedLinear, product


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer."""

    first_norm: Tensor
    first_eps: float
    qkv: Product
    out: Product
    heads: Heads
    second_norm: Tensor
    second_eps: float
    gate_up: Product
    activate: Callable[[Tensor], Tensor]
    down: Product

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        first, attention = layer.input_layernorm, layer.self_attn
        second, mlp = layer.post_attention_layernorm, layer.mlp
        return cls(
            first.weight,
            first.eps,
            product(attention.qkv_proj),
            product(attention.o_proj),
            attention.heads,
            second.weight,
            second.eps,
            product(mlp.gate_up_proj),
            mlp.act_fn.forward,
            product(mlp.down_proj),
        )


class Stack(Fused):
    """Layers that add attention and then a feed-forward block, each after a norm.

    Args:
        layers: transformers' own, with fused and (if at all) packed parts; they are kept, and hold the weights. They
            are not called, so that hooks on them see no hidden states.
    """

    parts = frozenset(("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"))

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        # Models ask a layer for its kind, and such like.
        self.__dict__ |= {name: value for name, value in vars(layers[0]).items() if not name.startswith("_")}
        self.layers = nn.ModuleList(layers)
        self.register_load_state_dict_post_hook(_flatten)  # type: ignore[no-untyped-call]
        self._flatten()

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether ``module`` is a layer as meant here, with fused parts."""
        if not super().fits(module):
            return False
        kinds = {
            "input_layernorm": FusedNorm,
            "self_attn": FusedAttention,
            "post_attention_layernorm": FusedNorm,
            "mlp": FusedMLP,
        }
        products = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        return all(type(module.get_submodule(name)) is kind for name, kind in kinds.items()) and all(
            type(layer) is nn.Linear or isinstance(layer, PackedLinear) for layer in map(module.get_submodule, products)
        )

    def __getstate__(self) -> dict[str, Any]:
        """All but what holds, or knows the place of, the weights of this one: a copy makes its own."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_flat", "compiled")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy from its state."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._flatten()

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Weights move, or become of another type."""
        moved = super()._apply(*arguments, **options)  # type: ignore[no-untyped-call]
        self._flatten()
        return moved

    def _flatten(self) -> None:
        layers = list(self.layers)
        self._flat = [_Layer.of(layer) for layer in layers]
        self.compiled = CompiledLayers(layers) if CompiledLayers.fit(layers) else None
        """The layers for our own kernels; None where these do not compute them."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``[B, F, dim]`` to ``[B, F, dim]``. Of ``options`` the cache alone counts."""
        cache = cache_of(options)
        if self.compiled is not None:
            computed = self.compiled(hidden_states, position_embeddings, attention_mask, cache)
            if computed is not None:
                return computed
        cosines, sines = (part[:, None] for part in position_embeddings)
        for layer in self._flat:
            norm = layer.first_norm
            normed = torch.rms_norm(hidden_states, norm.shape, norm, layer.first_eps)
            hidden_states = hidden_states + attend(
                normed, layer.qkv, layer.out, layer.heads, cosines, sines, attention_mask, cache
            )
            norm = layer.second_norm
            normed = torch.rms_norm(hidden_states, norm.shape, norm, layer.second_eps)
            hidden_states = hidden_states + feed_forward(normed, layer.gate_up, layer.activate, layer.down)
        return hidden_states


def _flatten(stack: Stack, _: Any) -> None:
    """Other weights may have been put in the place of those that it knows."""
    stack._flatten()


@torch.no_grad()
def stack_layers(model: PreTrainedModel) -> int:
    """Replace layers of ``model`` by loops; how many were replaced. Fuse and pack it before.

    Layers of one kind become one loop. Where kinds are mixed, each has its own, since each gets a mask of its own.
    """
    is_uniform = len(LayerMasks.of(model).windows) == 1
    count = 0
    for name, parent in list(model.named_modules()):
        if not isinstance(parent, nn.ModuleList) or not parent or not all(map(Stack.fits, parent)):
            continue
        layers = list(parent)
        calls = list(record_calls(model, [f"{name}.{index}" for index in range(len(layers))]).values())
        groups = [slice(None)] if is_uniform else [slice(index, index + 1) for index in range(len(layers))]
        stacks = [stack for group in groups if (stack := _stacked(layers[group], calls[group]))]
        if len(stacks) == len(groups):
            model.set_submodule(name, nn.ModuleList(stacks))
            count += len(layers)
    return count


def _stacked(layers: Sequence[nn.Module], calls: Sequence[Sequence[Call]]) -> Stack | None:
    """``layers`` as one; None where they were not called, or not given the same, or give anything else."""
    if not all(calls):
        return None
    stack = Stack(layers).eval()
    for passed in zip(*calls, strict=True):  # of each layer in one forward
        first, last = passed[0], passed[-1]
        is_given_the_same = all(
            call.options.keys() == first.options.keys()
            and all(value is first.options[name] for name, value in call.options.items())
            for call in passed
        )
        if not is_given_the_same or not Call(first.arguments, first.options, last.result).is_answered_by(stack):
            return None
    return stack
