"""`SequenceRng`: the randomness that tokens are drawn with.

It is counter-based, keyed by (seed, position, role): a row never depends on its neighbours, and nothing has to be
remembered between rounds.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.models.backends.sampling import TORCH, SamplingKernels, cumulative_shares
from agentspec.runtime.device import upload
from agentspec.runtime.splitmix import GOLDEN, MASK_64, logical_shift, mix, signed


class Role(IntEnum):
    """What a random number is for. Numbers of different roles at one position are independent."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


class SequenceRng:
    """Independent uniforms for a batch of sequences, keyed by (seed, position, role).

    Rejected positions are drawn again in a later round with the same key. That is sound: what a round commits
    depends only on the numbers of positions up to the last committed one, never on later ones.

    Args:
        seeds: one per row.
        positions: index, among the emitted tokens, of the token that each row decides next.
        device: where numbers are needed.
        kernels: draw tokens.
    """

    needs_edges = False
    """Whether ``uniform`` looks at the edges of a decision."""

    def __init__(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        device: torch.device | str = "cpu",
        kernels: SamplingKernels = TORCH,
    ) -> None:
        self._kernels = kernels
        self._seeds = mix(np.array([seed & MASK_64 for seed in seeds], dtype=np.uint64))
        self._positions = np.array(positions, dtype=np.uint64)
        self._device = torch.device(device)

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        """Return uniforms in [0, 1), float64, of the shape of ``offsets``.

        Args:
            role: what they are for.
            offsets: ``[B]`` or ``[B, K]``, counted from the position.
            edges: the values at which the caller's decision changes (``[..., E]`` or of the shape of ``offsets``). They
                change nothing here; an rng that enumerates branches splits the unit interval at them.
        """
        if offsets.is_cpu:
            return torch.from_numpy((self._numbers(role, offsets) >> np.uint64(11)) * 2.0**-53)
        return (logical_shift(self._hash(role, offsets), 11)).double() * 2.0**-53

    def draw(self, probs: Tensor, role: Role, offsets: Tensor) -> Tensor:
        """Draw one token per row from ``probs`` ``[B, V]`` (any positive mass) by inverting their cumulative sum.

        Returns:
            ``[B]``; 0 where the probs are NaN or have no mass.
        """
        edges = cumulative_shares(probs) if self.needs_edges else None
        return self._kernels.draw(probs, self.uniform(role, offsets, edges))

    def select(self, rows: list[int]) -> SequenceRng:
        """Return the randomness of some of the rows."""
        chosen = object.__new__(type(self))
        chosen._seeds, chosen._positions, chosen._device = self._seeds[rows], self._positions[rows], self._device
        chosen._kernels = self._kernels
        return chosen

    def _hash(self, role: int, offsets: Tensor) -> Tensor:
        """Return a number of 64 bits for each of ``offsets``, on their device."""
        if offsets.is_cpu:
            return torch.from_numpy(self._numbers(role, offsets).view(np.int64))
        return self._numbers_there(role, offsets)

    def _numbers_there(self, role: int, offsets: Tensor) -> Tensor:
        """Return the numbers, computed on a device."""
        shape = (-1,) + (1,) * (offsets.dim() - 1)
        seeds, positions = (part.view(shape) for part in self._uploaded)
        return mix(mix(seeds + signed(GOLDEN) * (positions + offsets + 1)) + role)

    @functools.cached_property
    def _uploaded(self) -> tuple[Tensor, Tensor]:
        """Seeds and positions, on the device of the batch."""
        seeds, positions = (torch.from_numpy(part.view(np.int64)) for part in (self._seeds, self._positions))
        return upload(seeds, self._device), upload(positions, self._device)

    def _numbers(self, role: int, offsets: Tensor) -> npt.NDArray[np.uint64]:
        """Return the numbers, computed on the host: numpy takes a fraction of torch's time for a few."""
        shape = (-1,) + (1,) * (offsets.dim() - 1)
        positions = self._positions.reshape(shape) + offsets.numpy().astype(np.uint64)
        keys = self._seeds.reshape(shape) + np.uint64(GOLDEN) * (positions + np.uint64(1))
        return mix(mix(keys) + np.uint64(role))


class CoupledRng(SequenceRng):
    """Draws in which draft and target share their noise: the winner of a race of exponential clocks.

    The token is ``argmin noise / probs`` with noise a pure function of (seed, position, token id), whatever the role.
    Its distribution is ``probs``; and where q is near p, both races have the same winner (Gumbel coupling).
    """

    def draw(self, probs: Tensor, role: Role, offsets: Tensor) -> Tensor:
        """Draw one token per row of ``probs`` (``[B, V]`` with offsets ``[B]``, or ``[B, K, V]`` with ``[B, K]``)."""
        return self._kernels.race(probs, self._hash(Role.TARGET, offsets))


def fresh_seed() -> int:
    """Return a seed for a request that names none."""
    return secrets.randbits(64)


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index`` of a request: sample 0 has the request's own, so n=1 equals a single call."""
    return seed if index == 0 else int(mix(np.array([(seed + index * GOLDEN) & MASK_64], dtype=np.uint64))[0])


Acceptance = Literal["rejection", "coupled"]
"""The rule by which drafted tokens are accepted; each has its own way to draw."""

RNGS: dict[Acceptance, type[SequenceRng]] = {"rejection": SequenceRng, "coupled": CoupledRng}
