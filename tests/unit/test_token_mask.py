"""Masks of a bit per token are the sets that they stand for."""

from __future__ import annotations

import random

import pytest
import torch

from agentspec.grammars.token_mask import Masks, TokenMask

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


def test_the_tensor_of_a_batch_is_true_where_nothing_is_forbidden() -> None:
    a, b = mask_of({1}, 3), mask_of({0, 2}, 3)
    found = Masks([[a, None], [b, a, b], [None]]).tensor
    assert found is not None
    assert found.tolist() == [
        [[False, True, False], [True] * 3, [True] * 3],
        [[True, False, True], [False, True, False], [True, False, True]],
        [[True] * 3] * 3,
    ]
    assert Masks([[None], [None, None]]).tensor is None
    assert torch.equal(a.tensor(), torch.tensor([False, True, False]))
