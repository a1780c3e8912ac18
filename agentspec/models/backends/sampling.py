"""`SamplingKernels`: the functions that draw tokens and filter logits, by torch. ``native.sampling`` has faster ones.

Which are used comes with the batch: a draw is a function of its arguments, never of what the process loaded before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.runtime.device import vector
from agentspec.runtime.splitmix import GOLDEN, logical_shift, mix, signed

_CACHED = 1 << 17  # numbers of 8 bytes that a CPU works on without going to memory in between


class SamplingKernels:
    """Draws and filters by torch, on any device and for any floating dtype.

    Filters cut by value, not by rank: tied tokens share one fate, whatever order a sort would give them.
    """

    def keep_top_k(self, logits: Tensor, counts: Sequence[float]) -> Tensor:
        """Return logits ``[R, K, V]`` with those below the ``counts[r]``-th largest of a position set to -inf."""
        within = [min(int(count), logits.shape[-1]) for count in counts]
        largest = logits.topk(max(within), dim=-1).values
        index = vector(within, logits, torch.long).view(-1, 1, 1) - 1
        return logits.masked_fill(logits < largest.gather(-1, index.expand(-1, logits.shape[1], 1)), -math.inf)

    def keep_top_p(self, logits: Tensor, shares: Sequence[float]) -> Tensor:
        """Return logits ``[R, K, V]`` with all but the likeliest tokens that sum to ``shares[r]`` set to -inf."""
        top_p, p = vector(shares, logits).view(-1, 1, 1), logits.softmax(-1)
        head = p.topk(min(512, p.shape[-1]), dim=-1).values
        if bool((head.sum(-1, keepdim=True) < top_p).any()):
            head = p.sort(dim=-1, descending=True).values
        preceding = head.cumsum(-1) - head
        kept = (preceding < top_p).sum(-1, keepdim=True).clamp(min=1)
        return logits.masked_fill(p < head.gather(-1, kept - 1), -math.inf)

    def draw(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Return the first token of each ``probs`` ``[N, V]`` whose cumulative share exceeds ``uniforms`` ``[N]``.

        Args:
            probs: of any positive mass.
            uniforms: in [0, 1), float64.

        Returns:
            ``[N]``; 0 where the probs are NaN or have no mass.
        """
        shares = cumulative_shares(probs)
        drawn = torch.searchsorted(shares, uniforms[:, None], right=True)[:, 0]
        return drawn.where(shares[:, -1] == 1, 0)

    def race(self, probs: Tensor, keys: Tensor) -> Tensor:
        """Return the winner of each race of exponential clocks, ``argmin -log(uniform) / probs``.

        Args:
            probs: ``[..., V]``.
            keys: ``[...]`` int64; the uniform of a token is a hash of its id and the key.

        Returns:
            The tokens ``[...]``.
        """
        keys, size = keys[..., None], probs.shape[-1]
        step = max(1, _CACHED * size // max(1, probs.numel())) if probs.device.type == "cpu" else size
        heats = [_winners(keys, probs[..., start : start + step], start) for start in range(0, size, step)]
        best = torch.stack([values for values, _ in heats]).argmax(0)
        return torch.stack([tokens for _, tokens in heats]).gather(0, best[None])[0]


def cumulative_shares(probs: Tensor) -> Tensor:
    """Return the cumulative sums of ``probs`` ``[N, V]`` over the whole, float64.

    They end at 1, above every uniform: a token without mass is not drawn.
    """
    sums = probs.double().cumsum(-1)
    return sums / sums[:, -1:]


def _winners(keys: Tensor, probs: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Return the winners among the tokens from ``start`` on, after the negatives of their clocks."""
    tokens = torch.arange(start + 1, start + probs.shape[-1] + 1, device=probs.device) * signed(GOLDEN)
    # 52 bits and a half keep the uniform inside (0, 1): no clock shows 0, so no token of no mass can win.
    uniform = (logical_shift(mix(keys + tokens), 12).double() + 0.5) * 2.0**-52
    values, winners = (uniform.log() / probs).max(-1)
    return values, winners + start


TORCH = SamplingKernels()
"""Those of torch."""
