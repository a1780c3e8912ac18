"""The randomness that tokens are drawn with.

A ``SequenceRng`` is the randomness of one batch: counter-based, keyed by (seed, position, role): a row never depends
on its neighbours and nothing has to be remembered between rounds.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.models.backends.native import kernels_for
from agentspec.runtime.device import upload

MASK_64 = (1 << 64) - 1
_CACHED = 1 << 17  # numbers of 8 bytes that a CPU works on without going to memory in between
GOLDEN = 0x9E3779B97F4A7C15


class Role(IntEnum):
    """What a random number is for. Numbers of different roles at one position are independent."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2


class SequenceRng:
    """Independent uniforms for a batch of sequences, keyed by (seed, position, role).

    Rejected positions are drawn again in a later round with the same key. That is sound: what a round commits
    depends only on the numbers of positions up to the last committed one, never on those behind it.

    Args:
        seeds: one per row.
        positions: index, among the emitted tokens, of the token that each row decides next.
    """

    needs_edges = False
    """Whether ``uniform`` looks at the edges of a decision."""

    def __init__(self, seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._seeds = _mix(np.array([seed & MASK_64 for seed in seeds], dtype=np.uint64))
        self._positions = np.array(positions, dtype=np.uint64)
        self._device = torch.device(device)

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        """Uniforms in [0, 1), float64, of the shape of ``offsets`` (``[B]`` or ``[B, K]``, counted from the position).

        ``edges`` are the values at which the caller's decision changes (``[..., E]`` or of the shape of ``offsets``).
        They change nothing here; a rng that enumerates branches splits the unit interval at them.
        """
        if offsets.is_cpu:
            return torch.from_numpy((self._numbers(role, offsets) >> np.uint64(11)) * 2.0**-53)
        return (_logical_shift(self._hash(role, offsets), 11)).double() * 2.0**-53

    def draw(self, law: Tensor, role: Role, offsets: Tensor) -> Tensor:
        """One token per row from ``law`` (``[B, V]``, any positive mass) by inverting its cumulative sum; ``[B]``.

        0 where a law is NaN or has no mass.
        """
        kernels = None if self.needs_edges else kernels_for(law)
        if kernels is not None:
            return kernels.draw(law, self.uniform(role, offsets))
        cumulative = law.double().cumsum(-1)
        cumulative = cumulative / cumulative[:, -1:]  # ends at 1, above every u: a token without mass is not hit
        u = self.uniform(role, offsets, edges=cumulative)
        drawn = torch.searchsorted(cumulative, u[:, None], right=True)[:, 0]
        return drawn.where(cumulative[:, -1] == 1, 0)

    def select(self, rows: list[int]) -> SequenceRng:
        """The rng of some of the rows."""
        chosen = object.__new__(type(self))
        chosen._seeds, chosen._positions, chosen._device = self._seeds[rows], self._positions[rows], self._device
        return chosen

    def _hash(self, role: int, offsets: Tensor) -> Tensor:
        """A number of 64 bits for each of ``offsets``, where they are."""
        if offsets.is_cpu:
            return torch.from_numpy(self._numbers(role, offsets).view(np.int64))
        return self._numbers_there(role, offsets)

    def _numbers_there(self, role: int, offsets: Tensor) -> Tensor:
        """The same on a device."""
        shape = (-1,) + (1,) * (offsets.dim() - 1)
        seeds, positions = (part.view(shape) for part in self._uploaded)
        return _mix(_mix(seeds + _signed(GOLDEN) * (positions + offsets + 1)) + role)

    @functools.cached_property
    def _uploaded(self) -> tuple[Tensor, Tensor]:
        """Seeds and positions, where the batch is."""
        seeds, positions = (torch.from_numpy(part.view(np.int64)) for part in (self._seeds, self._positions))
        return upload(seeds, self._device), upload(positions, self._device)

    def _numbers(self, role: int, offsets: Tensor) -> npt.NDArray[np.uint64]:
        """The same on the host, where numpy takes a fraction of the time for a few."""
        shape = (-1,) + (1,) * (offsets.dim() - 1)
        positions = self._positions.reshape(shape) + offsets.numpy().astype(np.uint64)
        keys = self._seeds.reshape(shape) + np.uint64(GOLDEN) * (positions + np.uint64(1))
        return _mix(_mix(keys) + np.uint64(role))


class CoupledRng(SequenceRng):
    """Draws in which draft and target share their noise: the winner of a race of exponential clocks.

    The token is ``argmin noise / law`` with noise a pure function of (seed, position, token id), whatever the role.
    Its law is ``law``; and where q is near p, both races have the same winner (Gumbel coupling).
    """

    def draw(self, law: Tensor, role: Role, offsets: Tensor) -> Tensor:
        """One token per row of ``law`` (``[B, V]`` with offsets ``[B]``, or ``[B, K, V]`` with ``[B, K]``)."""
        keys = self._hash(Role.TARGET, offsets)
        kernels = kernels_for(law)
        if kernels is not None:
            return kernels.race(law.reshape(-1, law.shape[-1]), keys.reshape(-1)).view(keys.shape)
        keys, size = keys[..., None], law.shape[-1]
        step = max(1, _CACHED * size // max(1, law.numel())) if law.device.type == "cpu" else size
        heats = [self._winners(keys, law[..., start : start + step], start) for start in range(0, size, step)]
        best = torch.stack([values for values, _ in heats]).argmax(0)
        return torch.stack([tokens for _, tokens in heats]).gather(0, best[None])[0]

    def _winners(self, keys: Tensor, law: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """The winners among the tokens from ``start`` on, and the negatives of their clocks."""
        tokens = torch.arange(start + 1, start + law.shape[-1] + 1, device=law.device) * _signed(GOLDEN)
        # 52 bits and a half keep the uniform inside (0, 1): no clock shows 0, so no token of no mass can win.
        uniform = (_logical_shift(_mix(keys + tokens), 12).double() + 0.5) * 2.0**-52
        values, winners = (uniform.log() / law).max(-1)
        return values, winners + start


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(64)


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request: sample 0 has the request's own, so n=1 equals a single call."""
    return seed if index == 0 else int(_mix(np.array([(seed + index * GOLDEN) & MASK_64], dtype=np.uint64))[0])


def _signed(value: int) -> int:
    """A number modulo 2**64 as a two's-complement int64."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


_Numbers = TypeVar("_Numbers", Tensor, npt.NDArray[np.uint64])


def _mix(x: _Numbers) -> _Numbers:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on uint64, or on int64, which wraps like it."""
    number: Any = _signed if isinstance(x, Tensor) else np.uint64
    shift: Any = _logical_shift if isinstance(x, Tensor) else np.right_shift
    x = (x ^ shift(x, number(30))) * number(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, number(27))) * number(0x94D049BB133111EB)
    mixed: _Numbers = x ^ shift(x, number(31))
    return mixed


Acceptance = Literal["rejection", "coupled"]
"""The rule by which drafted tokens are accepted; each has its own way to draw."""

RNGS: dict[Acceptance, type[SequenceRng]] = {"rejection": SequenceRng, "coupled": CoupledRng}
