"""Linear layers whose weights are laid out for oneDNN, once: on the CPU, small blocks read them at memory speed.

What torch does by default with a block of a few tokens (another kernel for nearly every width, of which some take twice
as long as others) is 2 to 4 times slower on some machines. The layout is another; the numbers are the same, and sums
over them differ in their last bits.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.errors import ModelLoadError

_WIDTH_HINT = 8  # tokens; the layout that is chosen for it is as good for others
_TOLERANCE = 1e-4  # of the largest output


class PackedLinear(nn.Module):
    """``nn.Linear`` on float32 weights in oneDNN's layout.

    Args:
        linear: gives weight and bias; its weight is copied.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _WIDTH_HINT)
        self.packed: Tensor
        self.register_buffer("packed", packed, persistent=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """``[out_features, in_features]``: the weight in torch's own layout; a copy."""
        dense: Tensor = self.packed.to_dense()
        return dense

    def forward(self, block: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return multiply(block, self.packed, self.bias)


def multiply(block: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``block @ weight.T + bias`` by oneDNN: ``[..., in]`` and ``[out, in]``, packed or not, to ``[..., out]``."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(block, weight, bias, "none", [], "")
    return out


@functools.cache
def has_linear_kernels() -> bool:
    """Whether this torch can ``multiply``, and pack weights for it: tried on small ones."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    block, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _WIDTH_HINT)
        found = [multiply(block, weight), multiply(block, weight.clone().T.contiguous().T), multiply(block, packed)]
    except Exception:  # as in pack_linears
        return False
    return all(torch.allclose(product, block @ weight.T) for product in found)


def product(linear: nn.Linear | PackedLinear) -> Callable[[Tensor], Tensor]:
    """What ``linear`` computes, as a function that holds its weights."""
    bias = linear.bias
    if isinstance(linear, PackedLinear):
        packed = linear.packed
        return lambda block: multiply(block, packed, bias)
    weight = linear.weight
    return lambda block: nn.functional.linear(block, weight, bias)


def packs(wanted: bool | None, model: PreTrainedModel) -> bool:
    """Whether to pack: as wanted, or wherever it can be done.

    Raises:
        ModelLoadError: where it is wanted and cannot be done.
    """
    can = model.device.type == "cpu" and model.dtype == torch.float32 and has_linear_kernels()
    if wanted and not can:
        raise ModelLoadError(
            "Weights are packed in float32, on a CPU, by a torch with oneDNN; this model is in "
            f"{model.dtype} on {model.device}. Leave pack out."
        )
    return can if wanted is None else wanted


def packed_layers(model: nn.Module) -> int:
    """How many layers are packed."""
    return sum(isinstance(layer, PackedLinear) for layer in model.modules())


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of ``model`` by packed ones; how many were. Weights that nobody else holds are freed.

    A layer whose packed form computes something else stays as it is, and where the kernels fail all do: with one
    warning, and the same results.
    """
    count = 0
    names = [name for name, layer in model.named_modules(remove_duplicate=False) if type(layer) is nn.Linear]
    for name in names:
        linear: Any = model.get_submodule(name)
        try:
            packed = PackedLinear(linear)
            is_same = _computes_the_same(packed, linear)
        except Exception as error:  # private operators of torch: they may refuse in any way
            warnings.warn(f"Weights could not be packed for oneDNN, decoding will be slower: {error}", stacklevel=2)
            return count
        if is_same:
            model.set_submodule(name, packed)
            count += 1
    return count


@torch.inference_mode()
def _computes_the_same(packed: PackedLinear, linear: nn.Linear) -> bool:
    block = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0))
    expected = linear(block)
    return bool((packed(block) - expected).abs().max() <= _TOLERANCE * expected.abs().max())
