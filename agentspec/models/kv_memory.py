"""The memory of a KV cache: its bounds, and where it comes from."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """The bounds of a KV cache.

    Args:
        rows: contexts that are kept at most.
        tokens: the most tokens of each, if all rows are to be as long; fewer rows may be longer.
        token_bytes: K and V of a token over all layers.
        budget_bytes: the bound on all of them; None for none.
    """

    rows: int
    tokens: int
    token_bytes: int
    budget_bytes: int | None

    def __str__(self) -> str:
        """In words."""
        budget = "no bound" if self.budget_bytes is None else f"at most {self.budget_bytes / 2**20:,.0f} MiB"
        return f"{self.rows} rows of {self.tokens:,} tokens, {self.token_bytes:,} bytes a token, {budget}"


def zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros of this shape, as ``like``; on a CPU, of memory that is taken only as it is written, in small pages.

    Raises ``MemoryError``.
    """
    if like.device.type != "cpu" or 0 in shape:
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    try:
        # Private: a process that is forked from this one must not write here.
        memory = mmap.mmap(-1, size, **({"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}))
    except OSError as error:
        raise MemoryError(f"{size:,} bytes for K and V of one layer could not be had: {error}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def default_budget(device: torch.device) -> int:
    """Return the bytes of K and V that a model may take where no bound is named."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 4 << 30
