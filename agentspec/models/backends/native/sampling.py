"""Draws and filters by the native kernels: float32 on a CPU; by torch for all else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.models.backends.native import Kernels
from agentspec.models.backends.sampling import SamplingKernels


class NativeSampling(SamplingKernels):
    """Draws that equal torch's, and filters that do but for rounding: top-p sums shares in float64, torch in float32.

    Args:
        kernels: of this process.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def keep_top_k(self, logits: Tensor, counts: Sequence[float]) -> Tensor:
        """Return logits as ``SamplingKernels.keep_top_k`` does."""
        if not _is_native(logits):
            return super().keep_top_k(logits, counts)
        within = [min(int(count), logits.shape[-1]) for count in counts]
        return _at_least(logits, self._kernels.least_of_top_k(logits.flatten(0, 1), _by_position(within, logits)))

    def keep_top_p(self, logits: Tensor, shares: Sequence[float]) -> Tensor:
        """Return logits as ``SamplingKernels.keep_top_p`` does."""
        if not _is_native(logits):
            return super().keep_top_p(logits, shares)
        return _at_least(logits, self._kernels.least_of_top_p(logits.flatten(0, 1), _by_position(shares, logits)))

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Return tokens as ``SamplingKernels.draw`` does."""
        return self._kernels.draw(probs, uniforms) if _is_native(probs) else super().draw(probs, uniforms)

    def race(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Return tokens as ``SamplingKernels.race`` does."""
        if not _is_native(probs):
            return super().race(probs, keys)
        return self._kernels.race(probs.reshape(-1, probs.shape[-1]), keys.reshape(-1)).view(keys.shape)


def _is_native(numbers: Tensor) -> bool:
    return numbers.is_cpu and numbers.dtype == torch.float32


def _at_least(logits: Tensor, least: Tensor) -> Tensor:
    """Return logits ``[R, K, V]`` with those below ``least`` ``[R K]`` set to -inf."""
    return logits.masked_fill(logits < least.view(*logits.shape[:2], 1), -math.inf)


def _by_position(values: Sequence[float], logits: Tensor) -> list[float]:
    """Return the value of each row for each of its positions, ``[R K]``."""
    return [value for value in values for _ in range(logits.shape[1])]
