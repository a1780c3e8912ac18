"""The cache's bookkeeping, on tensors that say which token wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import llama
from torch import Tensor

import agentspec.models.kv_cache
from agentspec import CausalLM
from agentspec.errors import InvalidRequestError
from agentspec.models.kv_cache import SHORT_TAIL, Block, RaggedKV
from agentspec.models.kv_memory import zeros

HEADS, DIM, LAYERS = 2, 4, 2
SLOT_BYTES = LAYERS * 2 * HEADS * DIM * 4


@pytest.fixture(autouse=True)
def _as_in_a_forward() -> Iterator[None]:
    with torch.inference_mode():
        yield


def states(tokens: list[int]) -> Tensor:
    """K or V ``[1, HEADS, len(tokens), DIM]`` in which every entry is its token."""
    return torch.tensor(tokens, dtype=torch.float32)[None, None, :, None].expand(1, HEADS, -1, DIM)


def read(kv: RaggedKV, context: list[int], last: int = 1) -> tuple[int, int]:
    """Do what a model does with one context; returns the row and how many tokens it did not have to feed."""
    kv.reserve(1, len(context))
    row, start = kv.claim(context, limit=len(context) - last)
    news = context[start:]
    block = Block(1, len(news), live=len(context), first=row, start=start)
    with kv.writing(block, torch.tensor([row]), torch.arange(start, len(context))[None]):
        for layer in range(LAYERS):
            keys, values = kv.update(states(news), states(news), layer)
            assert keys.shape == values.shape == (1, HEADS, len(context), DIM)
            assert torch.equal(keys, states(context))
            assert torch.equal(values, states(context))
    kv.record(row, news)
    kv.release()
    kv.check_integrity()
    return row, start


def cache(rows: int = 3, max_slots: int = 512, budget_bytes: int | None = None) -> RaggedKV:
    kv = RaggedKV(rows=rows, max_slots=max_slots)
    read(kv, [0])  # the layout of the layers is known from here on
    kv.resize(rows=rows, budget_bytes=budget_bytes)
    return kv


def test_a_continued_context_stays_in_its_row() -> None:
    kv = cache()
    row, start = read(kv, [1, 2, 3])
    assert start == 0
    assert read(kv, [1, 2, 3, 4, 5], last=2) == (row, 3)
    assert kv.longest_prefix([1, 2, 3, 4, 9])[1] == 4


def test_a_short_rejected_tail_is_overwritten_in_place() -> None:
    kv = cache()
    row, _ = read(kv, [1, 2, 3, 4, 5])
    assert read(kv, [1, 2, 3, 9]) == (row, 3)
    assert kv.longest_prefix([1, 2, 3, 4, 5])[1] == 3


def test_a_long_tail_is_kept_and_its_prefix_copied() -> None:
    kv = cache()
    conversation = [1, 2, 3, *range(10, 11 + SHORT_TAIL)]
    row, _ = read(kv, conversation)
    other, start = read(kv, [1, 2, 3, 9])
    assert (other != row, start) == (True, 3)
    assert kv.longest_prefix(conversation)[1] == len(conversation)


def test_a_row_taken_in_this_call_is_forked_not_reused() -> None:
    kv = cache()
    first, _ = read(kv, [1, 2, 3])
    kv.reserve(2, 8)
    assert kv.claim([1, 2, 3, 4], limit=3) == (first, 3)
    second, start = kv.claim([1, 2, 3, 5], limit=3)
    assert (second != first, start) == (True, 3)
    kv.release()
    assert kv.rows[second].tokens == [1, 2, 3]


def test_the_row_used_longest_ago_gives_way() -> None:
    kv = cache(rows=2)
    long = [[base + step for step in range(100)] for base in (100, 300, 500)]
    read(kv, long[0])
    read(kv, long[1])
    read(kv, [*long[0], 7])
    read(kv, long[2])
    assert [kv.longest_prefix(context)[1] for context in long] == [100, 0, 100]


def test_a_row_that_must_give_way_to_its_own_fork_is_cut_back_in_place() -> None:
    kv = cache(rows=1)
    row, _ = read(kv, list(range(200)))
    assert read(kv, [*range(50), 7]) == (row, 50)


def test_more_claims_than_rows_are_an_error() -> None:
    kv = cache(rows=1)
    kv.reserve(1, 4)
    kv.claim([1], limit=0)
    with pytest.raises(RuntimeError, match="all 1 KV rows are taken"):
        kv.claim([2], limit=0)


@pytest.mark.parametrize("rows", [[0, 1], [0, 2]], ids=["view", "gathered"])
def test_ragged_rows_are_written_and_read_at_their_own_positions(rows: list[int]) -> None:
    kv = cache()
    for context in ([1, 2, 3], [5], [8, 9]):
        read(kv, context)
    starts = [len(kv.rows[row].tokens) for row in rows]
    slots = torch.tensor(starts)[:, None] + torch.arange(2)
    news = torch.cat([states([21, 22]), states([31, 32])])
    block = Block(2, 2, live=max(starts) + 2, first=0 if rows == [0, 1] else None)
    with kv.writing(block, torch.tensor(rows), slots):
        keys, _ = kv.update(news, news, 0)
        shared = keys.untyped_storage().data_ptr() == kv._keys[0].untyped_storage().data_ptr()
    assert shared == (rows == [0, 1])
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        expected = [*kv.rows[row].tokens, *news[index, 0, :, 0].tolist()]
        assert keys[index, 0, : start + 2, 0].tolist() == expected


def test_capacity_doubles_and_keeps_what_is_there() -> None:
    kv = cache(max_slots=1000)
    context = list(range(250))
    read(kv, context)
    assert kv.capacity == 256
    read(kv, [*context, *range(600, 650)])
    assert kv.capacity == 512
    kv.reserve(1, 900)
    assert kv.capacity == 1000
    assert kv.longest_prefix(context)[1] == 250


def test_within_a_budget_all_that_costs_no_row_is_laid_out_at_once() -> None:
    kv = cache(rows=2, max_slots=1000, budget_bytes=2 * 700 * SLOT_BYTES)
    read(kv, [1, 2, 3])
    assert (len(kv.rows), kv.capacity) == (2, 700)
    before = kv.layout
    read(kv, list(range(690)))
    assert kv.layout == before
    read(kv, list(range(710)))
    assert (len(kv.rows), kv.capacity) == (1, 768)


def test_a_budget_takes_rows_from_the_longest_idle_and_gives_them_back() -> None:
    kv = cache(rows=4, budget_bytes=4 * 256 * SLOT_BYTES)
    for base in range(4):
        read(kv, [base + 1, 7, 7])
    assert (len(kv.rows), kv.capacity) == (4, 256)
    read(kv, [4, *range(100, 499)])
    assert (len(kv.rows), kv.capacity) == (2, 448)
    assert [kv.longest_prefix([base + 1, 7, 7])[1] for base in range(4)] == [0, 0, 3, 1]
    assert kv.reserve(4, 40) == 4
    kv.check_integrity()
    assert kv.longest_prefix([3, 7, 7])[1] == 3


def test_a_context_beyond_the_budget_is_refused_with_the_numbers() -> None:
    kv = cache(budget_bytes=100 * SLOT_BYTES)
    read(kv, list(range(100)))
    with pytest.raises(InvalidRequestError, match=f"101 tokens needs {101 * SLOT_BYTES:,} .* {100 * SLOT_BYTES:,}"):
        kv.reserve(1, 101)
    kv.check_integrity()


def test_running_out_of_memory_while_growing_leaves_an_empty_usable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache()
    read(kv, [1, 2, 3])

    def exhausted(like: Tensor, *shape: int) -> Tensor:
        if like is kv._values[0]:
            raise torch.OutOfMemoryError("no memory left")
        return like.new_zeros(shape)

    with monkeypatch.context() as patch:
        patch.setattr(agentspec.models.kv_cache, "zeros", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            kv.reserve(1, 300)
    assert kv.longest_prefix([1, 2, 3])[1] == 0
    assert read(kv, [1, 2, 3])[1] == 0


def test_a_process_that_may_not_ask_for_the_whole_budget_takes_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = cache(rows=2, max_slots=1000, budget_bytes=2 * 700 * SLOT_BYTES)

    def limited(like: Tensor, *shape: int) -> Tensor:
        if shape[2] > 128:
            raise MemoryError("no more")
        return like.new_zeros(shape)

    monkeypatch.setattr(agentspec.models.kv_cache, "zeros", limited)
    read(kv, list(range(100)))
    assert (len(kv.rows), kv.capacity) == (2, 128)
    with pytest.raises(MemoryError):
        kv.reserve(1, 200)
    assert read(kv, [1, 2, 3])[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_writes_its_own() -> None:
    found = zeros(torch.empty(0), 1, 1, 4, 4)
    child = os.fork()
    if child == 0:
        found += 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not found.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_taken_as_it_is_written(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    found = zeros(torch.empty(0, dtype=dtype), 8, 4, 1 << 13, 512)  # 256 MiB or 512
    found[1, :, :9] = 1
    assert resident() - before < 64 << 20
    assert found.dtype == dtype
    assert found[1, :, :10].sum(1).eq(9).all()


def test_integrity_names_what_is_wrong() -> None:
    kv = cache()
    read(kv, [1, 2])
    kv.rows[0].taken = True
    kv.rows[1].tokens.extend(range(kv.capacity + 1))
    kv._keys[0] = kv._keys[0][:1]
    with pytest.raises(RuntimeError, match=r"row 0 is taken.*row 1 records 257 tokens in 256 slots.*K of layer 0"):
        kv.check_integrity()


def test_a_forward_outside_of_writing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"inside RaggedKV\.writing"):
        cache().update(states([1]), states([1]), 0)


def test_the_memory_budget_is_stated() -> None:
    model = CausalLM(llama(), rows=4, memory_budget_bytes=4 * 100 * 1024)
    memory = model.kv.memory
    assert memory.rows == 4
    assert memory.token_bytes == 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, dimension, bytes
    assert memory.tokens == min(model.kv.max_slots, 4 * 100 * 1024 // (4 * memory.token_bytes))
    assert str(memory).startswith(f"4 rows of {memory.tokens:,} tokens")
