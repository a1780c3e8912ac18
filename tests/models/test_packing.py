"""Weights laid out for their products: the same numbers, sums that differ in their last bits, and a way back."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gpt2, llama, qwen3
from torch import nn

import agentspec.models.packing
from agentspec import CausalLM, ModelLoadError
from agentspec.models.backends.native import compiles
from agentspec.models.packing import OneDnnLinear, PackedLinear, PanelLinear, has_linear_kernels, layouts, pack_linears

needs_onednn = pytest.mark.skipif(not has_linear_kernels(), reason="this torch has no oneDNN")
needs_compiler = pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")
KINDS = [pytest.param(OneDnnLinear, marks=needs_onednn), pytest.param(PanelLinear, marks=needs_compiler)]
WAYS = [pytest.param(False, marks=needs_onednn, id="oneDNN"), pytest.param(True, marks=needs_compiler, id="compiled")]


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5)], ids=str)
def test_a_packed_layer_computes_the_same(kind: Any, bias: bool, shape: tuple[int, int]) -> None:
    layer = linear(64, 40, bias)
    block = torch.randn(*shape, 64, generator=torch.Generator().manual_seed(1))
    packed = kind(layer)
    with torch.inference_mode():
        assert torch.allclose(packed(block), layer(block), rtol=1e-5, atol=1e-6)
    assert torch.equal(packed.weight, layer.weight)
    assert (packed.in_features, packed.out_features) == (64, 40)


@needs_compiler
def test_a_compiled_layer_can_be_copied() -> None:
    packed, block = PanelLinear(linear(64, 40, True)), torch.ones(2, 64)
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert torch.equal(copied(block), packed(block))


@pytest.mark.parametrize("compile", WAYS)
@pytest.mark.parametrize("make", [llama, qwen3])
def test_a_model_with_packed_layers_is_the_same_model(make: Any, compile: bool) -> None:
    plain, model = CausalLM(make()), make()
    linears = sum(type(layer) is nn.Linear for layer in model.modules())
    assert pack_linears(model, compile) == layouts(model).total() == linears > 0
    packed = CausalLM(model)
    context = list(range(3, 40))
    assert torch.allclose(
        packed.next_logits([context], [37]).values, plain.next_logits([context], [37]).values, atol=1e-4
    )
    assert packed.fingerprint != plain.fingerprint


@pytest.mark.parametrize("compile", WAYS)
def test_dense_weights_are_freed_one_by_one(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = llama(), []
    dense = [weakref.ref(module) for module in model.modules() if type(module) is nn.Linear]
    original = agentspec.models.packing._computes_the_same

    def noted(packed: PackedLinear, linear: nn.Linear) -> bool:
        alive.append(sum(module() is not None for module in dense))
        return original(packed, linear)

    monkeypatch.setattr(agentspec.models.packing, "_computes_the_same", noted)
    assert pack_linears(model, compile) == len(dense)
    assert alive == list(range(len(dense), 0, -1))


@pytest.mark.parametrize("compile", WAYS)
def test_layers_of_another_kind_stay(compile: bool) -> None:
    model: Any = gpt2()  # whose layers are Conv1D, but for the head
    assert pack_linears(model, compile) == 1
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)  # tied: a copy now, of the same numbers


@needs_onednn
def test_models_are_packed_as_they_are_loaded(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert layouts(CausalLM.from_pretrained(tmp_path, device="cpu").model).total() > 0
    assert layouts(CausalLM.from_pretrained(tmp_path, device="cpu", native_kernels=False).model).keys() == {"oneDNN"}
    assert layouts(CausalLM.from_pretrained(tmp_path, device="cpu", pack=False).model).total() == 0
    assert layouts(CausalLM.from_pretrained(tmp_path, device="cpu", dtype="bfloat16").model).total() == 0
    with pytest.raises(ModelLoadError, match=r"float32.*bfloat16"):
        CausalLM.from_pretrained(tmp_path, device="cpu", dtype="bfloat16", pack=True)


@pytest.mark.parametrize("compile", WAYS)
def test_kernels_that_fail_leave_the_model_as_it_was(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = llama(), CausalLM(llama())
    kind = "PanelLinear" if compile else "OneDnnLinear"

    class Broken(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(agentspec.models.packing, kind, Broken)
    with pytest.warns(UserWarning, match="no such kernel") as warned:
        assert pack_linears(model, compile) == 0
    assert len(warned) == 1
    assert torch.equal(
        CausalLM(model).next_logits([[1, 2, 3]], [3]).values, before.next_logits([[1, 2, 3]], [3]).values
    )


@needs_onednn
def test_a_layer_whose_packed_form_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()

    class Wrong(OneDnnLinear):
        def forward(self, block: torch.Tensor) -> torch.Tensor:
            return super().forward(block) * 2

    monkeypatch.setattr(agentspec.models.packing, "OneDnnLinear", Wrong)
    assert pack_linears(model) == 0
    assert layouts(model).total() == 0
