"""Masks of a bit per token are the sets that they stand for."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentspec.grammars.token_mask import PackedMasks, TokenMask, _apply_on_device

SIZES = [1, 7, 8, 63, 64, 65, 130, 1000]


def mask_of(tokens: set[int], size: int) -> TokenMask:
    return TokenMask.empty(size).with_tokens(tokens, legal=True)


def tokens_of(mask: TokenMask) -> set[int]:
    return set(mask.tensor().nonzero()[:, 0].tolist())


def some_sets(size: int) -> list[set[int]]:
    rng = random.Random(size)
    return [set(), {0}, {size - 1}, {0, size - 1}, set(range(size))] + [
        set(rng.sample(range(size), rng.randint(0, size))) for _ in range(20)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_a_mask_is_the_set_of_its_tokens(size: int) -> None:
    for tokens in some_sets(size):
        mask = mask_of(tokens, size)
        assert mask.tensor().shape == (size,)
        assert tokens_of(mask) == tokens == {token for token in range(-3, size + 200) if token in mask}
        assert mask.is_empty == (not tokens)
        assert mask.first == min(tokens, default=None)
        assert mask.single_token == (min(tokens) if len(tokens) == 1 else None)
        assert mask == TokenMask.of(mask.tensor())
        assert hash(mask) == hash(TokenMask.of(mask.tensor()))
        assert repr(mask) == f"TokenMask({len(tokens)} of {size})"


@pytest.mark.parametrize("size", SIZES)
def test_what_is_changed_is_another_mask(size: int) -> None:
    rng = random.Random(size)
    for tokens in some_sets(size):
        mask, others = mask_of(tokens, size), rng.sample(range(size), min(size, 3))
        assert tokens_of(mask.with_tokens(others, legal=True)) == tokens | set(others)
        assert tokens_of(mask.with_tokens(others, legal=False)) == tokens - set(others)
        assert tokens_of(mask) == tokens
        assert (mask.with_tokens(others, legal=True) == mask) == (set(others) <= tokens)


def test_ids_that_are_no_tokens_are_left_out() -> None:
    """A request may name an end token that this vocabulary does not have."""
    mask = TokenMask.empty(97).with_tokens([-1, 97, 100, 128, 10**6], legal=True)
    assert mask == TokenMask.empty(97)
    assert mask.is_empty
    assert TokenMask.of(torch.ones(97, dtype=torch.bool)).with_tokens([-1, 97, 10**6], legal=False).tensor().all()


def test_masks_of_other_sizes_or_things_are_not_equal() -> None:
    assert TokenMask.empty(9) != TokenMask.empty(10)
    assert TokenMask.empty(9) != set()


def test_bits_of_any_whole_number_of_bytes_are_taken() -> None:
    """Grammar engines pad them in their own ways."""
    assert TokenMask(b"\x05\x01", 9) == TokenMask(b"\x05\x01" + bytes(40), 9) == mask_of({0, 2, 8}, 9)
    assert TokenMask(b"\xe0", 5) == TokenMask.empty(5)
    with pytest.raises(ValueError, match="a bit for each of 9 tokens, got 8"):
        TokenMask(b"\x05", 9)


def test_the_words_hold_32_tokens_each() -> None:
    """As grammar engines pack them, and whatever the byte order of the machine."""
    words = mask_of({0, 33, 95}, 96).words
    assert words.dtype == "<i4"
    assert words[:3].tolist() == [1, 2, -(2**31)]


APPLIED = {"host": PackedMasks.apply_, "device": lambda masks, logits: on_device(masks, logits)}


def on_device(masks: PackedMasks, logits: Tensor) -> Tensor:
    """What ``apply_`` does on a device."""
    if masks:
        _apply_on_device(logits, masks._index, masks._words)
    return logits


@pytest.mark.parametrize("apply_", APPLIED.values(), ids=APPLIED)
def test_the_masks_of_a_batch_leave_what_they_do_not_forbid(apply_: Callable[[PackedMasks, Tensor], Tensor]) -> None:
    a, b = mask_of({1}, 3), mask_of({0, 2}, 3)
    masks, logits = PackedMasks([[a, None], [b, a, b], [None]]), torch.zeros(3, 3, 3)
    assert apply_(masks, logits) is logits
    assert (logits == 0).tolist() == [
        [[False, True, False], [True] * 3, [True] * 3],
        [[True, False, True], [False, True, False], [True, False, True]],
        [[True] * 3] * 3,
    ]
    assert len(masks) == 4
    assert not PackedMasks([[None], [None, None]])


@pytest.mark.parametrize("apply_", APPLIED.values(), ids=APPLIED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_masks_of_any_size_are_applied_as_the_tensors_they_stand_for(
    size: int, dtype: torch.dtype, apply_: Callable[[PackedMasks, Tensor], Tensor]
) -> None:
    generator = torch.Generator().manual_seed(size)
    legal = torch.rand(4, 5, size, generator=generator) < torch.rand(4, 5, 1, generator=generator)
    logits = torch.randn(legal.shape, generator=generator, dtype=dtype)
    logits[0, 0, 0], logits[1, 2, -1] = math.nan, math.inf
    expected = torch.where(legal, logits, -math.inf)
    found = apply_(PackedMasks.of(legal), logits)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_logits_of_another_size_are_an_error() -> None:
    with pytest.raises(ValueError, match="masks are for 9 tokens, the logits for 10"):
        PackedMasks([[TokenMask.empty(9)]]).apply_(torch.zeros(1, 1, 10))


def test_a_device_is_not_waited_for() -> None:
    """Tensors without numbers stand for those of a device: reading one back raises."""
    masks, logits = (
        PackedMasks([[None, mask_of({3}, 100)], [mask_of({5}, 100)]], "meta"),
        torch.empty(2, 3, 100).to("meta"),
    )
    assert masks.apply_(logits) is logits
    with pytest.raises(RuntimeError, match="meta"):
        bool(logits[0, 0, 0] > 0)
