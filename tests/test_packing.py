"""Weights laid out for oneDNN: the same numbers, sums that differ in their last bits, and a way back."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gpt2, llama, qwen3
from torch import nn

import agentspec.models.packing
from agentspec import CausalLM, ModelLoadError
from agentspec.models.packing import PackedLinear, pack_linears, packed_layers, packs

pytestmark = pytest.mark.skipif(not packs(None, llama()), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5)], ids=str)
def test_a_packed_layer_computes_the_same(bias: bool, shape: tuple[int, int]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
        block = torch.randn(*shape, 24)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        assert torch.allclose(packed(block), linear(block), rtol=1e-5, atol=1e-6)
    assert torch.equal(packed.weight, linear.weight)
    assert (packed.in_features, packed.out_features) == (24, 40)


@pytest.mark.parametrize("make", [llama, qwen3])
def test_a_model_with_packed_layers_is_the_same_model(make: Any) -> None:
    plain, model = CausalLM(make()), make()
    linears = sum(type(layer) is nn.Linear for layer in model.modules())
    assert pack_linears(model) == packed_layers(model) == linears > 0
    packed = CausalLM(model)
    context = list(range(3, 40))
    assert torch.allclose(packed.next_logits([context], [37]), plain.next_logits([context], [37]), atol=1e-4)
    assert packed.fingerprint != plain.fingerprint


def test_dense_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = llama(), []
    dense = [weakref.ref(module) for module in model.modules() if type(module) is nn.Linear]
    original = agentspec.models.packing._computes_the_same

    def noted(packed: PackedLinear, linear: nn.Linear) -> bool:
        alive.append(sum(module() is not None for module in dense))
        return original(packed, linear)

    monkeypatch.setattr(agentspec.models.packing, "_computes_the_same", noted)
    assert pack_linears(model) == len(dense)
    assert alive == list(range(len(dense), 0, -1))


def test_layers_of_another_kind_stay() -> None:
    model: Any = gpt2()  # whose layers are Conv1D, but for the head
    assert pack_linears(model) == 1
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)  # tied: a copy now, of the same numbers


def test_models_are_packed_as_they_are_loaded(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert packed_layers(CausalLM.from_pretrained(tmp_path, device="cpu").model) > 0
    assert packed_layers(CausalLM.from_pretrained(tmp_path, device="cpu", pack=False).model) == 0
    assert packed_layers(CausalLM.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").model) == 0
    with pytest.raises(ModelLoadError, match=r"float32.*bfloat16"):
        CausalLM.from_pretrained(tmp_path, device="cpu", dtype="bfloat16", pack=True)


def test_kernels_that_fail_leave_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = llama(), CausalLM(llama())

    class Broken(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(agentspec.models.packing, "PackedLinear", Broken)
    with pytest.warns(UserWarning, match="no such kernel") as warned:
        assert pack_linears(model) == 0
    assert len(warned) == 1
    assert torch.equal(CausalLM(model).next_logits([[1, 2, 3]], [3]), before.next_logits([[1, 2, 3]], [3]))


def test_a_layer_whose_packed_form_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()

    class Wrong(PackedLinear):
        def forward(self, block: torch.Tensor) -> torch.Tensor:
            return super().forward(block) * 2

    monkeypatch.setattr(agentspec.models.packing, "PackedLinear", Wrong)
    assert pack_linears(model) == 0
    assert packed_layers(model) == 0
