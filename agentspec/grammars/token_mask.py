"""Token masks, a bit per token: `TokenMask` of one position, `PackedMasks` of the positions of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.runtime.device import upload_beside

_UNIT = 8  # bytes that are looked at together


class TokenMask:
    """The legal ones of V tokens; immutable.

    Args:
        bits: a bit per token, the lowest bit of the first byte for token 0; bits after the last token are ignored.
        size: V.

    Raises:
        ValueError: for fewer bits than tokens.
    """

    def __init__(self, bits: bytes, size: int) -> None:
        if 8 * len(bits) < size:
            raise ValueError(f"Expected a bit for each of {size} tokens, got {8 * len(bits)}.")
        length, (whole, rest) = -(-size // (8 * _UNIT)) * _UNIT, divmod(size, 8)
        if rest:
            bits = bits[:whole] + bytes([bits[whole] & ((1 << rest) - 1)])
        self._bits = bits[: whole + (rest > 0)].ljust(length, b"\0")
        self.size = size

    @classmethod
    def of(cls, legal: Tensor) -> TokenMask:
        """Pack ``[V]`` bool, True where a token is legal."""
        return cls(np.packbits(legal.numpy(force=True), bitorder="little").tobytes(), len(legal))

    @classmethod
    def empty(cls, size: int) -> TokenMask:
        """Return the mask without a legal token."""
        return cls(bytes(-(-size // 8)), size)

    @property
    def words(self) -> npt.NDArray[np.int32]:
        """``[W]`` int32, 32 tokens each: bit i of word w is for token ``32 w + i``. W may exceed what V needs."""
        return np.frombuffer(self._bits, dtype="<i4")

    def __contains__(self, token: int) -> bool:
        """Whether ``token`` is legal."""
        return 0 <= token < self.size and bool(self._bits[token >> 3] >> (token & 7) & 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenMask) and (self.size, self._bits) == (other.size, other._bits)

    def __hash__(self) -> int:
        return hash((self.size, self._bits))

    def __repr__(self) -> str:
        return f"TokenMask({int(self.tensor().sum())} of {self.size})"

    @cached_property
    def _units(self) -> list[int]:
        """Indices of the first two units in which a token is legal."""
        [indices] = np.frombuffer(self._bits, dtype=np.uint64).nonzero()
        found: list[int] = indices[:2].tolist()
        return found

    @property
    def is_empty(self) -> bool:
        """Whether no token is legal."""
        return not self._units

    @property
    def first(self) -> int | None:
        """The first legal token; None where there is none."""
        if self.is_empty:
            return None
        unit = self._unit(self._units[0])
        return 8 * _UNIT * self._units[0] + (unit & -unit).bit_length() - 1

    @cached_property
    def single_token(self) -> int | None:
        """The only legal token; None where there are several or none."""
        return self.first if len(self._units) == 1 and self._unit(self._units[0]).bit_count() == 1 else None

    def _unit(self, index: int) -> int:
        return int.from_bytes(self._bits[_UNIT * index : _UNIT * (index + 1)], "little")

    def with_tokens(self, tokens: Iterable[int], *, legal: bool) -> TokenMask:
        """Return the mask in which ``tokens`` are legal, or are not; ids outside the vocabulary are ignored."""
        others = [token for token in tokens if 0 <= token < self.size and (token in self) != legal]
        if not others:
            return self
        bits = bytearray(self._bits)
        for token in others:
            bits[token >> 3] ^= 1 << (token & 7)
        return TokenMask(bytes(bits), self.size)

    def tensor(self) -> Tensor:
        """Unpack into ``[V]`` bool, True where a token is legal."""
        return torch.from_numpy(_unpack(self.words, self.size))


class PackedMasks:
    """The masks of a batch's positions, packed until they are applied. The length is the number of masks.

    Args:
        rows: per row of the batch, the mask of each position; None where every token is legal. Rows may be ragged.
        device: of the logits; the words are uploaded to it once, beside what it computes.
    """

    def __init__(self, rows: Sequence[Sequence[TokenMask | None]], device: torch.device | str = "cpu") -> None:
        self.rows = rows
        found = [(b, k, mask) for b, row in enumerate(rows) for k, mask in enumerate(row) if mask is not None]
        self._places = [(b, k) for b, k, _ in found]
        if found:
            words = torch.from_numpy(np.stack([mask.words for *_, mask in found]))
            self._size = found[0][2].size
            self._words = upload_beside(words, device)  # [M, W] int32
            self._index = upload_beside(torch.tensor(self._places).T.contiguous(), device)  # [2, M]

    @classmethod
    def of(cls, legal: Tensor) -> PackedMasks:
        """Pack ``[B, K, V]`` bool, True where a token is legal."""
        return cls([[TokenMask.of(mask) for mask in row] for row in legal], legal.device)

    def __len__(self) -> int:
        return len(self._places)

    def apply_(self, logits: Tensor) -> Tensor:
        """Set the logits of illegal tokens to -inf in place; return ``logits``. The host does not wait for a device.

        Args:
            logits: ``[B, K, V]``, float32 or float64. Positions without a mask keep theirs.
        """
        if self._places and logits.shape[-1] != self._size:
            raise ValueError(f"The masks are for {self._size} tokens, the logits for {logits.shape[-1]}.")
        if self._places and logits.device.type == "cpu":
            _apply_on_host(logits, self._places, self._words)
        elif self._places:
            _apply_on_device(logits, self._index, self._words)
        return logits


def _apply_on_host(logits: Tensor, places: Sequence[tuple[int, int]], words: Tensor) -> None:
    numbers = logits.detach().numpy()
    for place, illegal in zip(places, ~words.numpy(), strict=True):
        # Twice as fast as torch's masked_fill_ where few tokens are legal, or nearly all.
        np.copyto(numbers[place], -math.inf, where=_unpack(illegal, numbers.shape[-1]))


def _apply_on_device(logits: Tensor, index: Tensor, words: Tensor) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[..., None] >> shifts & 1).flatten(1)[:, : logits.shape[-1]]  # [M, V]
    rows, positions = index
    logits.index_put_((rows, positions), logits[rows, positions].masked_fill(bits == 0, -math.inf))


def _unpack(words: npt.NDArray[np.int32], size: int) -> npt.NDArray[np.bool_]:
    """Return the first ``size`` bits of packed words."""
    return np.unpackbits(words.view(np.uint8), count=size, bitorder="little").view(np.bool_)
