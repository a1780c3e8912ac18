"""Making a loaded model compute the same in less time: fused modules, packed weights, compiled kernels, flat layers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from agentspec.models.attention import compile_attention
from agentspec.models.backends.native import Compile, compiles
from agentspec.models.fusion import fuse_modules
from agentspec.models.packing import pack_linears, packs
from agentspec.models.stack import stack_layers


def tune(model: PreTrainedModel, *, fuse: bool, pack: bool | None, compile: Compile) -> None:
    """Change ``model`` as requested; what cannot be changed stays as it is.

    Args:
        model: changed in place.
        fuse: into fewer operators.
        pack: weights for their products; None where that can be done.
        compile: kernels for packed weights, and for attention, on a CPU.

    Raises:
        ModelLoadError: where packing is wanted and cannot be done.
    """
    is_on_cpu = model.device.type == "cpu"
    has_kernels = is_on_cpu and model.dtype == torch.float32 and pack is not False and compiles(compile)
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
