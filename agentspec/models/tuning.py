"""Making a loaded model compute the same in less time: fused modules, packed weights, native kernels, flat layers."""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from agentspec.models.attention import compile_attention
from agentspec.models.backends.native import compiles
from agentspec.models.fusion import fuse_modules
from agentspec.models.packing import compiled_by, pack_linears, packs
from agentspec.models.stack import stack_layers
from agentspec.models.switches import Switch


def tune(model: PreTrainedModel, *, fuse: bool, pack: bool | None, native_kernels: Switch) -> None:
    """Change ``model`` as requested; what cannot be changed stays as it is.

    One warning where native kernels are demanded, and nothing uses them.

    Args:
        model: changed in place.
        fuse: into fewer operators.
        pack: weights for their products; None where that can be done.
        native_kernels: for packed weights, and for attention, on a CPU.

    Raises:
        ModelLoadError: where packing is wanted and cannot be done.
    """
    is_on_cpu = model.device.type == "cpu"
    has_kernels = is_on_cpu and model.dtype == torch.float32 and pack is not False and compiles(native_kernels)
    packing = packs(pack, model, has_kernels)
    if has_kernels:
        compile_attention(model)
    if fuse:
        fuse_modules(model)
    if packing:
        pack_linears(model, has_kernels)
    if fuse:
        stack_layers(model)
    if fuse and model.device.type == "cuda":
        torch.cuda.empty_cache()  # of weights that were fused, before what is free is shared out
    if native_kernels is True and compiled_by(model) is None:
        warnings.warn(
            "native_kernels=True compiles the products of float32 weights that are packed on a CPU, with a C++ "
            f"compiler. On this {model.device.type} there was nothing to compile, or nothing to do it with; results "
            "are the same.",
            RuntimeWarning,
            stacklevel=3,
        )
