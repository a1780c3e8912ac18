"""Keys and values of many contexts, addressed by row and position. Nothing else touches K and V.

Every row holds one context. Writing is by position, so a rejected draft is overwritten, not removed; a fork copies a
prefix; what was used longest ago gives way. Losing a row costs time, never correctness: the tokens recorded for a row
say what its slots mean, and slots after them mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentspec.errors import InvalidRequestError
from agentspec.models.kv_memory import Memory, zeros
from agentspec.runtime.tokens import common_prefix

SHORT_TAIL = 64
"""Tokens that may be thrown away to continue a row in place; a longer tail is kept, and its prefix copied."""

_FIRST_CAPACITY = 256
_CAPACITY_STEP = 64


@dataclass(eq=False)
class Row:
    """What one row of K and V holds: the context whose first ``len(tokens)`` slots are valid."""

    tokens: list[int] = field(default_factory=list)
    last_used: int = 0
    taken: bool = False


@dataclass(frozen=True)
class Block:
    """The shape of a forward.

    Args:
        rows: how many KV rows it writes.
        width: slots that it writes in each.
        live: slots that attention reads, from the first on.
        first: the first of consecutive rows, which are read as a view; None where rows are gathered.
        start: of a single row, the first slot written; None where slots are looked up in a tensor.
        spare: how many of the live slots are after all tokens, read to round their number and hidden by the mask.
        counts: per row, how many slots do not only pad; None where all rows have ``width``, or it may not matter.
    """

    rows: int
    width: int
    live: int
    first: int | None = None
    start: int | None = None
    spare: int = 0
    counts: tuple[int, ...] | None = None

    def meant(self) -> Tensor | None:
        """``[rows, width]`` bool, on the host: what does not only pad; None where ``counts`` is."""
        return None if self.counts is None else torch.arange(self.width) < torch.tensor(self.counts)[:, None]


@dataclass(frozen=True)
class _Writing:
    """The forward in progress: its shape, and where it writes."""

    block: Block
    rows: Tensor  # [B]
    slots: Tensor  # [B, width]


class RaggedKV(Cache):
    """Preallocated K and V, per layer ``[rows, kv_heads, capacity, head_dim]``, behind transformers' cache interface.

    ``rows`` is the most that are kept, ``max_slots`` the longest a row may become, ``budget_bytes`` the bound on all K
    and V together. Layers may differ in heads and dimensions; their layout is taken from the first forward.
    """

    def __init__(self, *, rows: int, max_slots: int, budget_bytes: int | None = None) -> None:
        super().__init__(layers=[])
        self.max_rows = rows
        self.max_slots = max_slots
        self.budget_bytes = budget_bytes
        self.capacity = 0
        self.rows = [Row() for _ in range(rows)]
        self._keys: dict[int, Tensor] = {}  # layer -> [rows, kv_heads, capacity, head_dim]
        self._values: dict[int, Tensor] = {}
        self.layout = 0
        """Another number means that K and V have moved to other tensors."""
        self._clock = 0
        self._writing: _Writing | None = None

    # --- who holds what ---------------------------------------------------------------------------------------------

    def longest_prefix(self, context: Sequence[int]) -> tuple[Row | None, int]:
        """Return the row that shares the longest prefix with ``context``, and its length; None and 0 without one.

        Of equally good rows, the one that would lose least by being continued with ``context``.
        """
        best, length = None, 0
        for row in self.rows:
            # The last token of the best prefix tells most rows apart without comparing the whole of it.
            if len(row.tokens) < length or (length and row.tokens[length - 1] != context[length - 1]):
                continue
            if row.tokens[:length] != context[:length]:
                continue
            shared = length + common_prefix(row.tokens[length:], context[length:])
            if shared > length or (shared and best and (row.taken, len(row.tokens)) < (best.taken, len(best.tokens))):
                best, length = row, shared
        return best, length

    def claim(self, context: Sequence[int], limit: int) -> tuple[int, int]:
        """Take a row for ``context`` until ``release``: its index, and how many tokens (at most ``limit``) it holds.

        The row is cut back to those tokens. Call it for no more contexts than there are rows before a ``release``.
        """
        source, shared = self.longest_prefix(context)
        start = min(shared, limit)
        if source is not None and not source.taken and len(source.tokens) - start <= SHORT_TAIL:
            row = source
        else:
            idle = [row for row in self.rows if not row.taken]
            if not idle:
                raise RuntimeError(f"all {len(self.rows)} KV rows are taken; release them before claiming more")
            row = min(idle, key=lambda candidate: (bool(candidate.tokens), candidate.last_used))
            if source is not None and row is not source and start:
                self._copy_prefix(source, row, start)
        del row.tokens[start:]
        row.taken = True
        self._clock += 1
        row.last_used = self._clock
        return self.rows.index(row), start

    def record(self, row: int, tokens: Sequence[int]) -> None:
        """Note that ``tokens`` now fill the next slots of ``row``: call it after the forward that wrote them."""
        self.rows[row].tokens.extend(tokens)

    def release(self) -> None:
        """Let every row be claimed again; what they hold stays."""
        for row in self.rows:
            row.taken = False

    @torch.inference_mode()
    def _copy_prefix(self, source: Row, target: Row, length: int) -> None:
        origin, destination = self.rows.index(source), self.rows.index(target)
        target.tokens.clear()  # nothing recorded while the slots change
        for store in (*self._keys.values(), *self._values.values()):
            store[destination, :, :length] = store[origin, :, :length]
        target.tokens.extend(source.tokens[:length])

    # --- memory -----------------------------------------------------------------------------------------------------

    @property
    def slot_bytes(self) -> int:
        """Bytes of K and V that one token takes over all layers; 0 before the first forward."""
        stores = (*self._keys.values(), *self._values.values())
        return sum(store.shape[1] * store.shape[3] * store.element_size() for store in stores)

    @property
    def memory(self) -> Memory:
        """Its bounds."""
        tokens = self.max_slots
        if self.budget_bytes is not None and self.slot_bytes:
            tokens = min(tokens, self.budget_bytes // (self.slot_bytes * self.max_rows))
        return Memory(self.max_rows, tokens, self.slot_bytes, self.budget_bytes)

    def _affordable(self, capacity: int) -> int:
        row_bytes = self.slot_bytes * capacity
        if self.budget_bytes is None or row_bytes == 0:
            return self.max_rows
        return min(self.max_rows, self.budget_bytes // row_bytes)

    def reserve(self, rows: int, slots: int) -> int:
        """Make room for ``rows`` rows of ``slots`` tokens as far as the budget goes; returns how many rows there are.

        Capacity grows while that costs no row (to all that the budget allows, where memory is taken only as it is
        written), and follows the need closely where it does; the rows used longest ago are evicted. Raises
        ``InvalidRequestError`` when not even one row fits the budget.
        """
        if rows <= len(self.rows) and slots <= self.capacity:
            return len(self.rows)
        allowed = self.memory.tokens if self.budget_bytes is not None and self._is_lazy() else 0
        capacity = min(max(2 * self.capacity, slots, allowed, _FIRST_CAPACITY), self.max_slots)
        if self._affordable(capacity) < self.max_rows:
            capacity = min(-(-slots // _CAPACITY_STEP) * _CAPACITY_STEP, self.max_slots)
        if not self._affordable(capacity):
            capacity = slots
        affordable = self._affordable(capacity)
        if affordable == 0:
            raise InvalidRequestError(
                f"a context of {slots} tokens needs {slots * self.slot_bytes:,} bytes of K and V, the memory budget is "
                f"{self.budget_bytes:,} bytes: raise memory_budget_bytes or shorten the context"
            )
        if slots > self.capacity or affordable > len(self.rows):
            try:
                self._lay_out(affordable, capacity)
            except MemoryError:  # of a process that may not even ask for so much
                self._lay_out(affordable, min(-(-slots // _CAPACITY_STEP) * _CAPACITY_STEP, capacity))
        return len(self.rows)

    def _is_lazy(self) -> bool:
        return any(store.device.type == "cpu" for store in self._keys.values())

    @torch.inference_mode()
    def _lay_out(self, rows: int, capacity: int) -> None:
        """Move to ``rows`` x ``capacity``; the most recently used rows that fit come along."""
        fitting = [row for row in self.rows if row.tokens and len(row.tokens) <= capacity]
        kept = sorted(sorted(fitting, key=lambda row: -row.last_used)[:rows], key=self.rows.index)
        origins = [self.rows.index(row) for row in kept]
        # Empty until all layers have moved: memory may run out in between, and must leave a usable cache.
        self.rows, self.capacity = [Row() for _ in range(rows)], 0
        for stores in (self._keys, self._values):
            for layer, old in stores.items():
                new = zeros(old, rows, old.shape[1], capacity, old.shape[3])
                for destination, (origin, row) in enumerate(zip(origins, kept, strict=True)):
                    new[destination, :, : len(row.tokens)] = old[origin, :, : len(row.tokens)]
                stores[layer] = new
        self.layout += 1
        self.rows = kept + [Row() for _ in range(rows - len(kept))]
        self.capacity = capacity

    def resize(self, *, rows: int, budget_bytes: int | None) -> None:
        """Forget every context, give the memory back, and start over with other bounds on the same layers."""
        self.max_rows, self.budget_bytes = rows, budget_bytes
        self.clear()

    def clear(self) -> None:
        """Forget every context and give the memory back; the layout of the layers stays known."""
        for row in self.rows:
            row.tokens.clear()
        self._lay_out(self.max_rows, 0)

    # --- the forward in progress ------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, block: Block, rows: Tensor, slots: Tensor) -> Iterator[None]:
        """Within this context a forward writes ``slots`` [B, width] of ``rows`` [B].

        Columns that only pad may be left out, or land after the tokens of their row, where the next write replaces
        them.
        """
        self._writing = _Writing(block, rows, slots)
        try:
            yield
        finally:
            self._writing = None

    @property
    def is_writing(self) -> bool:
        """Whether a forward is in progress."""
        return self._writing is not None

    def written(self) -> tuple[Block, Tensor, Tensor]:
        """Of the forward in progress: its shape, the rows ``[B]`` and the slots ``[B, width]`` that it writes."""
        assert self._writing is not None
        return self._writing.block, self._writing.rows, self._writing.slots

    def stores(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """K and V of a layer, ``[rows, kv_heads, capacity, head_dim]`` each; None before its first forward."""
        return (self._keys[layer], self._values[layer]) if layer in self._values else None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new K and V [B, kv_heads, width, dim]; returns all live ones [B, kv_heads, live, dim]."""
        if self._writing is None:
            raise RuntimeError("a forward with this cache has to run inside RaggedKV.writing(...), in inference mode")
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
            self.layout += 1
        return (
            _write(self._keys[layer_idx], key_states, self._writing),
            _write(self._values[layer_idx], value_states, self._writing),
        )

    def _allocate(self, states: Tensor) -> Tensor:
        # Zeros, not empty: a masked slot still enters attention as weight 0 times its value, which must be finite.
        return zeros(states, len(self.rows), states.shape[1], self.capacity, states.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before the block in progress (of the longest row; rounded up where passes are captured), or 0."""
        if self._writing is None:
            return 0
        block = self._writing.block
        return block.live - block.spare - block.width

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that attention reads, and their offset."""
        return (self._writing.block.live if self._writing is not None else query_length), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Longest a row may become, in slots."""
        return self.max_slots

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        held = [len(row.tokens) for row in self.rows]
        return f"RaggedKV(rows={held}, capacity={self.capacity}, slot_bytes={self.slot_bytes})"

    # --- self-check -------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` naming whatever is wrong with an idle cache; return when all is well."""
        wrong: list[str] = []
        if self._writing is not None:
            wrong.append("a forward is still open")
        if not 1 <= len(self.rows) <= self.max_rows:
            wrong.append(f"{len(self.rows)} rows, expected 1 to {self.max_rows}")
        if self.capacity > self.max_slots:
            wrong.append(f"capacity {self.capacity} exceeds {self.max_slots}")
        for index, row in enumerate(self.rows):
            if row.taken:
                wrong.append(f"row {index} is taken while idle")
            if len(row.tokens) > self.capacity:
                wrong.append(f"row {index} records {len(row.tokens)} tokens in {self.capacity} slots")
            if row.last_used > self._clock:
                wrong.append(f"row {index} was used at {row.last_used}, after now ({self._clock})")
        if self._keys.keys() != self._values.keys():
            wrong.append(f"layers with K {sorted(self._keys)} and with V {sorted(self._values)} differ")
        for name, stores in (("K", self._keys), ("V", self._values)):
            for layer, store in stores.items():
                if (store.shape[0], store.shape[2]) != (len(self.rows), self.capacity):
                    wrong.append(
                        f"{name} of layer {layer} is {tuple(store.shape)} for {len(self.rows)} x {self.capacity}"
                    )
        held = len(self.rows) * self.capacity * self.slot_bytes
        if self.budget_bytes is not None and held > self.budget_bytes:
            wrong.append(f"{held:,} bytes held with a budget of {self.budget_bytes:,}")
        if wrong:
            raise RuntimeError("KV cache is inconsistent: " + "; ".join(wrong))


def _write(store: Tensor, states: Tensor, writing: _Writing) -> Tensor:
    """Put ``states`` [B, heads, width, dim] into their slots; returns the live part of their rows."""
    block = writing.block
    if block.first is not None and block.start is not None:
        store[block.first, :, block.start : block.start + block.width] = states[0]
    else:
        store[writing.rows[:, None], :, writing.slots] = states.transpose(1, 2)  # both [B, width, heads, dim]
    live = store[:, :, : block.live]
    if block.first is not None:
        return live[block.first : block.first + block.rows]
    return live.index_select(0, writing.rows)
