"""What is handed to native code as an address is looked at before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import SIZES, build
from torch import Tensor

from agentspec import CausalLM
from agentspec.models.backends.native import compiles, kernels
from agentspec.models.compiled_pass import CompiledPass
from agentspec.models.tuning import tune

pytestmark = pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")


def flat(rows: int = 2, size: int = 5) -> Tensor:
    return torch.full((rows, size), 1 / size)


@pytest.mark.parametrize(
    ("probs", "options", "error"),
    [
        (flat().double(), torch.zeros(2, dtype=torch.float64), TypeError),
        (flat().half(), torch.zeros(2, dtype=torch.float64), TypeError),
        (flat().to("meta"), torch.zeros(2, dtype=torch.float64), TypeError),
        (flat(), torch.zeros(2, dtype=torch.long), TypeError),
        (flat(), torch.zeros(3, dtype=torch.float64), ValueError),
        (flat(), torch.zeros(2, 1, dtype=torch.float64), ValueError),
        (flat()[0], torch.zeros(5, dtype=torch.float64), ValueError),
        (flat()[None], torch.zeros(1, dtype=torch.float64), ValueError),
    ],
    ids=range(8),
)
def test_distributions_are_float32_on_a_cpu(probs: Tensor, options: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"got"):
        kernels().draw(probs, options)
    with pytest.raises(error, match=r"got"):
        kernels().race(probs, options.float() if options.dtype == torch.long else options.long())
    if options.dtype == torch.float64:
        with pytest.raises(error, match=r"got"):
            kernels().least_of_top_k(probs, [1.0] * (len(options) + (error is ValueError)))


def test_distributions_need_not_lie_together() -> None:
    probs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]).T  # [2, 3], column by column
    assert kernels().draw(probs, torch.tensor([0.9, 0.0, 0.9, 0.0], dtype=torch.float64)[::2]).tolist() == [1, 0]


def attended(**changes: Any) -> Tensor:
    parts = {
        "query": torch.randn(2, 4, 3, 32),
        "key": torch.randn(2, 2, 7, 32),
        "value": torch.randn(2, 2, 7, 32),
        "mask": torch.zeros(2, 1, 3, 7),
    }
    return kernels().attention(**{**parts, **changes}, scale=1.0)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("query", torch.randn(2, 3, 3, 32), ValueError),  # no multiple of the K/V heads
        ("query", torch.randn(2, 4, 3, 16), ValueError),
        ("query", torch.randn(1, 4, 3, 32), ValueError),
        ("query", torch.randn(2, 4, 3, 32).double(), TypeError),
        ("query", torch.randn(2, 4, 32, 3).transpose(2, 3), TypeError),
        ("key", torch.randn(2, 2, 6, 32), ValueError),
        ("key", torch.randn(2, 2, 7, 32).bfloat16(), TypeError),
        ("value", torch.randn(2, 1, 7, 32), ValueError),
        ("value", torch.randn(2, 2, 7, 64), ValueError),
        ("mask", torch.zeros(2, 1, 3, 6), RuntimeError),  # of torch
        ("mask", torch.zeros(2, 1, 3, 1), TypeError),  # one number for all keys
        ("mask", torch.zeros(2, 1, 3, 7).double(), TypeError),
        ("mask", torch.ones(2, 1, 3, 7, dtype=torch.bool), TypeError),
    ],
)
def test_attention_is_of_shapes_that_fit(name: str, change: Tensor, error: type[Exception]) -> None:
    assert attended().shape == (2, 3, 4, 32)
    assert attended(mask=torch.zeros(1, 1, 1, 7)).shape == (2, 3, 4, 32)
    with pytest.raises(error):
        attended(**{name: change})


def test_a_pass_reads_and_writes_inside_of_its_tables() -> None:
    model = build("Llama", **SIZES | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32})
    tune(model, fuse=True, pack=None, native_kernels=True)
    lm = CausalLM(model, rows=2)
    lm.next_logits([[1, 2, 3]], [1])
    compiled = lm._forward._compiled
    assert isinstance(compiled, CompiledPass)
    rows, capacity, ids = len(lm.kv.rows), lm.kv.capacity, lm.vocab_size
    good = {"row": 0, "start": 0, "tokens": [1, 2], "last": 1}
    assert compiled([SimpleNamespace(**good)], lm.kv, None, ids) is not None  # type: ignore[list-item]
    for bad in (
        {"row": -1},
        {"row": rows},
        {"start": -1},
        {"start": capacity - 1},
        {"tokens": [1, -1]},
        {"tokens": [ids]},
        {"last": 3},
        {"last": -1},
    ):
        with pytest.raises(IndexError, match=r"^Expected ids below"):
            compiled([SimpleNamespace(**{**good, **bad})], lm.kv, None, ids)  # type: ignore[list-item]
    with pytest.raises(IndexError, match="positions"):
        compiled._angles.reaching(lm.max_context + 10**6)
