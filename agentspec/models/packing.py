"""Linear layers with packed weights: on the CPU, small blocks read them as fast as they come from memory.

What torch does by default with a block of a few tokens (another kernel for nearly every width, of which some take twice
as long as others) is 2 to 4 times slower on some machines. Where there is a C++ compiler, our own kernels read weights
in the fewest bytes that hold them (``panels.py``); elsewhere oneDNN reads its layout of them. The numbers are the same,
and sums over them differ in their last bits.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.errors import ModelLoadError
from agentspec.models import panels
from agentspec.models.backends.native import kernels

_WIDTH_HINT = 8  # tokens; the layout that is chosen for it is as good for others
_TOLERANCE = 1e-4  # of the largest output


class PackedLinear(nn.Module):
    """``nn.Linear`` on float32 weights in another layout.

    Args:
        linear: gives weight and bias; its weight is copied.
        packed: the copy.
    """

    def __init__(self, linear: nn.Linear, packed: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed: Tensor
        self.register_buffer("packed", packed, persistent=False)
        self.bias = linear.bias

    @property
    def layout(self) -> str:
        """The name of the layout."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """``[out_features, in_features]``: the weight in torch's own layout; a copy."""
        raise NotImplementedError

    def product(self) -> Callable[[Tensor], Tensor]:
        """Return what the layer computes, as a function that holds its weight."""
        raise NotImplementedError

    def forward(self, block: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return self.product()(block)


class PanelLinear(PackedLinear):
    """Weights in the fewest bytes that hold them, for our own kernels."""

    def __init__(self, linear: nn.Linear) -> None:
        format, packed = panels.laid_out(linear.weight)
        super().__init__(linear, packed)
        self._format = format

    @property
    def layout(self) -> str:
        """The format of its numbers."""
        return self._format

    @property
    def weight(self) -> Tensor:
        """``[out_features, in_features]``: each number once, times 1; a copy."""
        rows = panels.product(self._format, self.packed, None, self.out_features)(torch.eye(self.in_features))
        return rows.T.contiguous()

    def product(self) -> Callable[[Tensor], Tensor]:
        """Return what the layer computes, as a function that holds its weight."""
        return panels.product(self._format, self.packed, self.bias, self.out_features)


class OneDnnLinear(PackedLinear):
    """Weights in oneDNN's layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _WIDTH_HINT))

    @property
    def layout(self) -> str:
        """The library's name."""
        return "oneDNN"

    @property
    def weight(self) -> Tensor:
        """``[out_features, in_features]``: the weight in torch's own layout; a copy."""
        dense: Tensor = self.packed.to_dense()
        return dense

    def product(self) -> Callable[[Tensor], Tensor]:
        """Return what the layer computes, as a function that holds its weight."""
        packed, bias = self.packed, self.bias
        return lambda block: multiply(block, packed, bias)


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
    """Return what ``linear`` computes, as a function that holds its weights."""
    if isinstance(linear, PackedLinear):
        return linear.product()
    weight, bias = linear.weight, linear.bias
    return lambda block: nn.functional.linear(block, weight, bias)


def packs(wanted: bool | None, model: PreTrainedModel, compile: bool = False) -> bool:
    """Whether to pack: as wanted, or wherever it can be done.

    Raises:
        ModelLoadError: where it is wanted and cannot be done.
    """
    can = model.device.type == "cpu" and model.dtype == torch.float32 and (compile or has_linear_kernels())
    if wanted and not can:
        raise ModelLoadError(
            "Weights are packed in float32, on a CPU, for kernels of our own (which take a C++ compiler) or of oneDNN; "
            f"this model is in {model.dtype} on {model.device}. Leave pack out."
        )
    return can if wanted is None else wanted


def layouts(model: nn.Module) -> Counter[str]:
    """How many layers are packed, by layout."""
    return Counter(layer.layout for layer in model.modules() if isinstance(layer, PackedLinear))


def compiled_by(model: nn.Module) -> str | None:
    """Return the version of our own kernels that compute products of ``model``; None where none of them does."""
    return kernels().version if any(isinstance(layer, PanelLinear) for layer in model.modules()) else None


def pack_linears(model: nn.Module, compile: bool = False) -> int:
    """Replace the linear layers of ``model`` by packed ones; return how many were. Unshared weights are freed.

    A layer whose packed form computes something else stays as it is, and where the kernels fail all do: with one
    warning, and the same results.

    Args:
        model: changed in place.
        compile: for our own kernels, where a weight fits them.
    """
    count = 0
    names = [name for name, layer in model.named_modules(remove_duplicate=False) if type(layer) is nn.Linear]
    for name in names:
        linear: Any = model.get_submodule(name)
        is_ours = compile and panels.fits(linear.weight)
        if not is_ours and not has_linear_kernels():
            continue
        kind = PanelLinear if is_ours else OneDnnLinear
        try:
            packed = kind(linear)
            is_same = _computes_the_same(packed, linear)
        except Exception as error:  # private operators of torch: they may refuse in any way
            warnings.warn(f"Weights could not be packed, decoding will be slower: {error}", stacklevel=2)
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
