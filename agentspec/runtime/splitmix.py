"""SplitMix64 (Steele, Lea, Flood 2014) on uint64 arrays of numpy, or on int64 tensors, which wrap like them."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

Numbers = TypeVar("Numbers", Tensor, npt.NDArray[np.uint64])


def mix(x: Numbers) -> Numbers:
    """Return the finaliser of SplitMix64."""
    number: Any = signed if isinstance(x, Tensor) else np.uint64
    shift: Any = logical_shift if isinstance(x, Tensor) else np.right_shift
    x = (x ^ shift(x, number(30))) * number(0xBF58476D1CE4E5B9)
    x = (x ^ shift(x, number(27))) * number(0x94D049BB133111EB)
    mixed: Numbers = x ^ shift(x, number(31))
    return mixed


def signed(value: int) -> int:
    """Return a number modulo 2**64 as a two's-complement int64."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def logical_shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
