"""Which tokens are legal, a bit each: what a grammar says of a position, and what is made of it for a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from agentspec.runtime.device import upload_beside

_WORD = 8  # bytes


class TokenMask:
    """The legal ones of V tokens. It does not change.

    Args:
        bits: a bit per token, the lowest of the first byte for token 0; those behind the last token count for nothing.
        size: V.
    """

    def __init__(self, bits: bytes, size: int) -> None:
        if 8 * len(bits) < size:
            raise ValueError(f"Expected a bit for each of {size} tokens, got {8 * len(bits)}.")
        length, (whole, rest) = -(-size // (8 * _WORD)) * _WORD, divmod(size, 8)
        if rest:
            bits = bits[:whole] + bytes([bits[whole] & ((1 << rest) - 1)])
        self._bits = bits[: whole + (rest > 0)].ljust(length, b"\0")
        self.size = size

    @classmethod
    def of(cls, legal: Tensor) -> TokenMask:
        """``[V]`` bool, True for what is legal."""
        return cls(np.packbits(legal.numpy(force=True), bitorder="little").tobytes(), len(legal))

    @classmethod
    def empty(cls, size: int) -> TokenMask:
        """Nothing is legal."""
        return cls(bytes(-(-size // 8)), size)

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
    def _words(self) -> list[int]:
        """The places of the first two words in which something is legal."""
        [places] = np.frombuffer(self._bits, dtype=np.uint64).nonzero()
        found: list[int] = places[:2].tolist()
        return found

    @property
    def is_empty(self) -> bool:
        """Whether nothing is legal."""
        return not self._words

    @property
    def first(self) -> int | None:
        """The first legal token; None where there is none."""
        if self.is_empty:
            return None
        word = self._word(self._words[0])
        return 8 * _WORD * self._words[0] + (word & -word).bit_length() - 1

    @cached_property
    def single_token(self) -> int | None:
        """The legal token where there is just one."""
        return self.first if len(self._words) == 1 and self._word(self._words[0]).bit_count() == 1 else None

    def _word(self, at: int) -> int:
        return int.from_bytes(self._bits[_WORD * at : _WORD * (at + 1)], "little")

    def with_tokens(self, tokens: Iterable[int], *, legal: bool) -> TokenMask:
        """The same, but for ``tokens``; an id that is no token of these V is left out."""
        others = [token for token in tokens if 0 <= token < self.size and (token in self) != legal]
        if not others:
            return self
        bits = bytearray(self._bits)
        for token in others:
            bits[token >> 3] ^= 1 << (token & 7)
        return TokenMask(bytes(bits), self.size)

    def tensor(self) -> Tensor:
        """``[V]`` bool, True for what is legal."""
        bits = np.unpackbits(np.frombuffer(self._bits, dtype=np.uint8), count=self.size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))


class Masks:
    """The masks of a batch: per row, one per position; None where all tokens are legal.

    Args:
        rows: of different lengths.
        device: where they are needed.
    """

    def __init__(self, rows: Sequence[Sequence[TokenMask | None]], device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self._device = device

    @cached_property
    def tensor(self) -> Tensor | None:
        """``[B, K, V]`` bool, True for what is legal and behind the end of a row; None where all is."""
        size = next((mask.size for row in self.rows for mask in row if mask is not None), None)
        if size is None:
            return None
        stacked = torch.ones(len(self.rows), max(map(len, self.rows)), size, dtype=torch.bool)
        for row, masks in enumerate(self.rows):
            for k, mask in enumerate(masks):
                if mask is not None:
                    stacked[row, k] = mask.tensor()
        return upload_beside(stacked, self._device)
