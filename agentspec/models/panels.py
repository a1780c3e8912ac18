"""Weights in the fewest bytes that hold them exactly, laid out for the products of ``native/``.

A checkpoint of 16-bit numbers, or one that was quantised, keeps no more information when it is loaded as float32: only
more bytes, and a pass over a few tokens takes as long as its weights take to come from memory. Here every number is
found again as it was (a format that misses one is not taken), so nothing is rounded but sums.

Panels: ``panel_rows`` rows of a weight lie together, by blocks of ``BLOCK`` columns. A block holds its scales, then
words of 32 bits with one or several columns of one row each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentspec.models.backends.native import BLOCK, kernels

_SLAB = 1 << 20  # weights that are looked at together


class Codes(NamedTuple):
    """Weights as numbers of few bits.

    Attributes:
        cells: ``[rows, columns]``, or half as many columns of two numbers each; of a type as wide as its content.
        scales: ``[rows, columns / BLOCK]`` each, float32.
    """

    cells: Tensor
    scales: tuple[Tensor, ...] = ()


def _int4(weight: Tensor) -> Codes | None:
    """``q * step + least`` with q of 0 to 15, as GGUF's Q4_0 and Q4_1 have it."""
    blocks = weight.view(len(weight), -1, BLOCK)
    low, high = blocks.aminmax(dim=-1)
    spread = ((high - low) / 15).half().float()  # Q4_1: from the least of a block to its greatest
    signed = (torch.where(high > -low, high, low) / -8).half().float()  # Q4_0: the farthest from zero is -8 steps
    codes, is_exact = _quantised(blocks, spread, low)
    step, least = spread, low
    if not bool(is_exact.all()):
        others, is_other = _quantised(blocks, signed, -8 * signed)
        if not bool((is_exact | is_other).all()):
            return None
        codes = torch.where(is_exact[..., None], codes, others)
        step, least = torch.where(is_exact, spread, signed), torch.where(is_exact, low, -8 * signed)
    codes = codes.flatten(1).to(torch.uint8)
    return Codes(codes[:, ::2] | codes[:, 1::2] << 4, (step, least))


def _quantised(blocks: Tensor, step: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 0 to 15 for ``[rows, blocks, BLOCK]``, and for which blocks they are exact."""
    step, least = step[..., None], least[..., None]
    codes = ((blocks - least) / torch.where(step == 0, 1, step)).round_().clamp_(0, 15)
    return codes, (codes * step + least == blocks).all(dim=-1)


def _int8(weight: Tensor) -> Codes | None:
    """``q * step`` with q of -127 to 127, as GGUF's Q8_0 has it, or of -16 to 15, as Q5_0."""
    blocks = weight.view(len(weight), -1, BLOCK)
    for most in (127, 16):
        step = (blocks.abs().amax(dim=-1, keepdim=True) / most).half().float()
        codes = (blocks / torch.where(step == 0, 1, step)).round_().clamp_(-127, 127)
        if torch.equal(codes * step, blocks):
            return Codes(codes.flatten(1).to(torch.int8), (step[..., 0],))
    return None


def _bfloat16(weight: Tensor) -> Codes | None:
    bits = weight.view(torch.int32)
    return None if bool((bits & 0xFFFF).any()) else Codes((bits >> 16).to(torch.int16))


def _float16(weight: Tensor) -> Codes | None:
    halves = weight.half()
    return Codes(halves) if torch.equal(halves.float(), weight) and bool(weight.isfinite().all()) else None


def _float32(weight: Tensor) -> Codes:
    return Codes(weight)


FORMATS: dict[str, Callable[[Tensor], Codes | None]] = {
    "int4": _int4,
    "int8": _int8,
    "bfloat16": _bfloat16,
    "float16": _float16,
    "float32": _float32,
}
"""How a weight ``[rows, columns]`` is held, the shortest first; None where a number would be lost. In the order of the
kernels' MULTIPLY."""


def fits(weight: Tensor) -> bool:
    """Whether a weight can be laid out: float32, on a CPU, with whole blocks of columns."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] % BLOCK == 0


@torch.no_grad()
def laid_out(weight: Tensor) -> tuple[str, Tensor]:
    """Pack a weight ``[rows, columns]`` that ``fits`` in the first of ``FORMATS`` that holds it.

    Returns the format, and int32 ``[panels, columns / BLOCK, words of a block]``. Takes seconds for 10^9 numbers.

    Raises:
        KernelsMissingError: without kernels to lay it out for.
    """
    weight = weight.detach().contiguous()
    rows = kernels().panel_rows
    step = rows * max(1, _SLAB // (rows * weight.shape[1]))
    for name, encode in FORMATS.items():
        parts = []
        for slab in torch.split(weight, step):
            codes = encode(slab)
            if codes is None:
                break
            parts.append(_panels(codes, weight.shape[1] // BLOCK, rows))
        else:
            return name, torch.cat(parts)
    raise AssertionError("float32 holds every weight")


def product(format: str, panels: Tensor, bias: Tensor | None, outputs: int) -> Callable[[Tensor], Tensor]:
    """Return what a layer with this weight computes: float32 ``[..., columns]`` to ``[..., outputs]``, on a CPU.

    A row's result does not depend on the others. The function raises ``TypeError`` for a block of another type, or on
    another device.

    Raises:
        RuntimeError: for a weight that was laid out on another processor (and pickled).
    """
    multiply, place = kernels().product, list(FORMATS).index(format)
    columns = panels.shape[1] * BLOCK
    if len(panels) != -(-outputs // kernels().panel_rows):
        raise RuntimeError("These weights were laid out for another processor; load the model anew.")

    def compute(block: Tensor) -> Tensor:
        is_traced = block.requires_grad and torch.is_grad_enabled()
        if block.dtype != torch.float32 or not block.is_cpu or block.shape[-1] != columns or is_traced:
            raise TypeError(
                f"Packed weights multiply float32 [..., {columns}] on a CPU, without gradients, got {block.dtype} "
                f"{[*block.shape]} on {block.device}{' with gradients' if is_traced else ''}."
            )
        block = block.contiguous()
        out = block.new_empty(*block.shape[:-1], outputs)
        rows, threads = block.numel() // columns, torch.get_num_threads()
        multiply(place, panels.data_ptr(), block.data_ptr(), out.data_ptr(), rows, columns, outputs, threads)
        return out if bias is None else out.add_(bias)

    return compute


def _panels(codes: Codes, blocks: int, panel_rows: int) -> Tensor:
    """Codes of ``blocks`` blocks in a row as ``[panels, blocks, words]``; rows that fill the last panel are zero."""
    missing = -len(codes.cells) % panel_rows
    parts = []
    for part in (*codes.scales, codes.cells):
        words = pad(part, (0, 0, 0, missing)).view(torch.int32)  # [rows, words of a row]
        parts.append(words.view(-1, panel_rows, blocks, words.shape[1] // blocks).permute(0, 2, 3, 1))
    return torch.cat(parts, dim=2).flatten(2)
