"""Fused modules and stacked layers compute what transformers' own do; whatever computes anything else stays."""

from __future__ import annotations

import copy
from collections import Counter
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from test_causal_lm import TOLERANCE, assert_scores, cursor, uncached
from test_graphs import captured
from tiny import ARCHITECTURES, MAX_CONTEXT, SIZES, VOCABULARY, build, gemma3, llama, qwen3
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel

import agentspec.models.fusion
from agentspec.errors import ModelLoadError
from agentspec.models.causal_lm import CausalLM
from agentspec.models.direct import direct
from agentspec.models.fusion import (
    Call,
    Fused,
    FusedAttention,
    FusedMLP,
    FusedNorm,
    fuse_modules,
    fused_modules,
    joined,
    record_calls,
)
from agentspec.models.packing import layouts
from agentspec.models.stack import Stack, _stacked, stack_layers
from agentspec.models.tuning import tune

# Of each architecture: norms, feed-forward blocks, attentions, loops. Norms of queries and keys are parts of attention.
FOUND = {
    "llama": (5, 2, 2, 1),
    "qwen3": (5, 2, 2, 1),
    "qwen3_mixed": (7, 3, 3, 3),
    "mistral": (5, 2, 2, 1),
    "gpt2": (0, 0, 0, 0),
    "gemma2": (13, 3, 0, 0),  # scores of attention are capped
    "gemma3": (13, 3, 3, 0),  # norms behind the blocks too
    "phi3": (5, 0, 0, 0),  # written otherwise
    "olmo2": (9, 2, 0, 0),  # norms over all queries at once
    "granite": (5, 2, 2, 0),  # residuals are multiplied
}


def fused(model: PreTrainedModel) -> PreTrainedModel:
    fuse_modules(model)
    stack_layers(model)
    return model


def found(model: nn.Module) -> tuple[int, ...]:
    kinds = Counter(type(module) for module in model.modules() if isinstance(module, Fused))
    return tuple(kinds[kind] for kind in (FusedNorm, FusedMLP, FusedAttention, Stack))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_can_be_fused_is(name: str) -> None:
    model = ARCHITECTURES[name]()
    fuse_modules(model)
    stack_layers(model)
    assert found(model) == FOUND[name]
    assert fused_modules(model) == sum(FOUND[name])


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_fused_model_computes_the_same_on_a_random_walk(name: str, is_captured: bool) -> None:
    lm = CausalLM(fused(ARCHITECTURES[name]()), rows=3, prefill_chunk=16)
    recorder = captured(lm) if is_captured else None
    cursor(lm, ARCHITECTURES[name](), seed=4, steps=40)
    assert recorder is None or recorder.recorded > 3


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_mixed", "gemma3", "granite"])
def test_a_model_that_is_fused_packed_and_stacked_computes_the_same(name: str, compile: bool) -> None:
    model = ARCHITECTURES[name]()
    tune(model, fuse=True, pack=None, native_kernels="auto" if compile else False)
    assert found(model) == FOUND[name]
    cursor(CausalLM(model, rows=3), ARCHITECTURES[name](), seed=5, steps=20)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}, (5, 2, 2, 1)),
        ("Llama", {"head_dim": 12}, (5, 2, 2, 1)),
        ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}, (5, 2, 2, 1)),
        ("Qwen2", {}, (5, 2, 2, 1)),  # queries, keys and values have a bias, the output has none
        ("Gemma", {"head_dim": 8}, (5, 2, 2, 1)),
        ("SmolLM3", {"pad_token_id": 0, "no_rope_layers": [1, 0]}, (5, 2, 0, 0)),  # chooses whether to turn
        ("Ministral3", {"head_dim": 8}, (5, 2, 0, 0)),  # queries are scaled by position
        ("Olmo", {"clip_qkv": 8.0}, (0, 2, 0, 0)),  # large values are cut
        ("Cohere", {}, (0, 2, 0, 0)),  # other norms, pairs are turned that lie side by side
        ("Helium", {"head_dim": 8}, (5, 2, 0, 0)),  # so they are here, in the same words
        ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, (5, 0, 2, 0)),  # experts
    ],
)
def test_variants_are_fused_as_far_as_they_are_the_same(
    architecture: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    sizes = SIZES | changes
    model, plain = build(architecture, **sizes), build(architecture, **sizes)
    _randomize(model)
    plain.load_state_dict(model.state_dict())
    lm = CausalLM(fused(model))
    assert found(lm.model) == expected
    context = list(range(3, 60))
    lm.next_logits([context[:20]], [1])
    assert_scores(lm.next_logits([context], [30]).values[0], uncached(plain, context)[-30:], 10 * TOLERANCE)


def _randomize(model: PreTrainedModel) -> None:
    """Weights and biases that a fresh model has as ones and zeros get values of their own."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))


def test_layers_side_by_side_are_one_layer() -> None:
    layers = [nn.Linear(6, 4), nn.Linear(6, 2, bias=False), nn.Linear(6, 3)]
    block = torch.randn(2, 5, 6)
    with torch.no_grad():
        assert torch.allclose(joined(*layers)(block), torch.cat([layer(block) for layer in layers], -1), atol=1e-6)
    assert joined(layers[1], layers[1]).bias is None


def test_layers_that_are_more_than_linear_are_not_joined() -> None:
    class Adapted(nn.Linear):
        def forward(self, block: Tensor) -> Tensor:
            return super().forward(block) + 1

    with pytest.raises(TypeError, match=r"plain linear layers, got Linear, Adapted"):
        joined(nn.Linear(2, 2), Adapted(2, 2))
    model: Any = llama()
    projection = model.model.layers[0].self_attn.k_proj
    projection.__class__ = Adapted
    plain = copy.deepcopy(model)
    assert found(fused(model)) == (5, 2, 1, 0)
    cursor(CausalLM(model, rows=2), plain, seed=6, steps=5)


@pytest.mark.parametrize("kind", ["FusedNorm", "FusedMLP", "FusedAttention"])
@pytest.mark.parametrize("fault", ["another result", "another result later", "an error", "no number"])
def test_a_fused_form_that_computes_anything_else_is_not_taken(
    kind: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(agentspec.models.fusion, kind)

    def wrong(self: Any, hidden_states: Tensor, **options: Any) -> Any:
        if fault == "an error":
            raise RuntimeError("no such kernel")
        result = original_forward(self, hidden_states, **options)
        self.calls = getattr(self, "calls", 0) + 1
        factor = {"another result": 1.001, "another result later": 1.0 + 0.001 * (self.calls - 1), "no number": nan}
        return (factor[fault] * result[0], None) if isinstance(result, tuple) else factor[fault] * result

    original_forward = original.forward
    monkeypatch.setattr(original, "forward", wrong)
    model = llama()
    fuse_modules(model)
    assert not any(isinstance(module, original) for module in model.modules())
    assert len([module for module in model.modules() if isinstance(module, Fused)]) > 0
    monkeypatch.undo()
    cursor(CausalLM(model, rows=2), llama(), seed=7, steps=5)


def test_a_loop_that_computes_anything_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forward = llama(), Stack.forward
    fuse_modules(model)
    monkeypatch.setattr(Stack, "forward", lambda self, *a, **k: 1.001 * forward(self, *a, **k))
    assert stack_layers(model) == 0
    assert not any(isinstance(module, Stack) for module in model.modules())
    monkeypatch.undo()
    assert stack_layers(model) == 2


def test_a_result_of_another_shape_is_another_result() -> None:
    assert Call((), {}, torch.ones(2, 3)).is_answered_by(lambda: torch.ones(2, 3))  # type: ignore[arg-type]
    assert not Call((), {}, torch.ones(2, 3)).is_answered_by(lambda: torch.ones(1, 3))  # type: ignore[arg-type]
    assert not Call((), {}, torch.ones(2, 3)).is_answered_by(lambda: torch.ones(2, 3).double())  # type: ignore[arg-type]
    assert not Call((), {}, torch.ones(0, 3)).is_answered_by(lambda: torch.ones(0, 3))  # type: ignore[arg-type]


def test_forms_are_compared_at_the_first_and_at_the_last_positions() -> None:
    calls = record_calls(llama(), ["model.rotary_emb"])["model.rotary_emb"]
    positions = [call.options["position_ids"].flatten().tolist() for call in calls]
    assert positions == [[0, 1, 2, 3, 4], list(range(MAX_CONTEXT - 5, MAX_CONTEXT))]


def test_attention_that_was_chosen_stays() -> None:
    assert found(fused(build("Llama", **SIZES, attn_implementation="eager"))) == (5, 2, 0, 0)


def test_layers_that_are_given_other_masks_are_not_one_loop() -> None:
    model: Any = llama()
    fuse_modules(model)
    layers = list(model.model.layers)
    shown = list(record_calls(model, ["model.layers.0", "model.layers.1"]).values())
    assert _stacked(layers, shown) is not None
    cosines, sines = shown[1][0].options["position_embeddings"]
    shown[1][0].options["position_embeddings"] = (cosines, sines)  # another object, though it holds the same
    assert _stacked(layers, shown) is None


def test_layers_that_were_not_called_are_not_one_loop() -> None:
    model: Any = llama()
    fuse_modules(model)
    assert _stacked(list(model.model.layers), [[], []]) is None


def test_hooks_and_forwards_of_their_own_are_kept() -> None:
    model: Any = llama()
    first, second = model.model.layers
    first.mlp.register_forward_pre_hook(lambda module, arguments: (2 * arguments[0],))
    first.self_attn.o_proj.register_forward_hook(lambda module, arguments, result: 2 * result)
    second.input_layernorm.forward = lambda block: 3 * block
    plain = copy.deepcopy(model)
    assert found(fused(model)) == (4, 1, 1, 0)
    context = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert_scores(model(input_ids=context).logits[0], plain(input_ids=context).logits[0])


def test_code_within_code_is_read_as_well() -> None:
    class Clipped(type(llama().model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            square = lambda block: block.clamp(-50, 50).pow(2)  # noqa: E731
            variance = square(hidden_states.to(torch.float32)).mean(-1, keepdim=True)
            return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

    assert FusedNorm.fits(llama().model.norm)
    assert not FusedNorm.fits(Clipped(32))
    limit = 50

    class Closed(type(llama().model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return self.weight * hidden_states * limit

    assert not FusedNorm.fits(Closed(32))
    assert not FusedNorm.fits(torch.jit.ScriptModule())


def test_layers_with_adapters_are_not_stacked() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight  # as adapters show them, whatever they add; without a bias

        def forward(self, block: Tensor) -> Tensor:
            return self.base(block)

    model: Any = llama()
    model.model.layers[0].self_attn.o_proj = Adapted(model.model.layers[0].self_attn.o_proj)
    fuse_modules(model)
    assert stack_layers(model) == 0


def test_norms_of_queries_and_keys_with_another_eps_are_kept() -> None:
    model: Any = qwen3()
    model.model.layers[0].self_attn.k_norm.variance_epsilon = 1e-3
    assert found(fused(model)) == (7, 2, 1, 0)


def test_a_copy_has_weights_of_its_own() -> None:
    model, context = fused(llama()), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = model(input_ids=context).logits
        twin = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(input_ids=context).logits, before)


def test_memory_that_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*parts: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(agentspec.models.fusion, "joined", full)
    with pytest.raises(MemoryError, match="no room"):
        fuse_modules(llama())


def test_a_loop_tells_what_its_layers_tell() -> None:
    model: Any = llama()
    model.model.layers[0].attention_type = "full_attention"
    assert fused(model).model.layers[0].attention_type == "full_attention"
    assert model.model.layers[0].hidden_size == SIZES["hidden_size"]


def test_layers_that_are_not_fused_throughout_are_not_stacked() -> None:
    model: Any = llama()
    fuse_modules(model)
    model.model.layers[1].mlp = llama().model.layers[1].mlp  # type: ignore[union-attr, index]
    assert stack_layers(model) == 0


def test_weights_that_move_are_followed() -> None:
    model = fused(qwen3())
    with torch.no_grad():
        single = model(input_ids=torch.tensor([[1, 2, 3]])).logits
        double = model.to(torch.float64)(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert double.dtype == torch.float64
    assert torch.allclose(single.double(), double, atol=1e-3)


def test_weights_around_zero_stay_in_half_precision() -> None:
    assert found(fused(gemma3().to(torch.bfloat16)))[0] == 0
    assert found(fused(llama().to(torch.bfloat16))) == FOUND["llama"]


def test_weights_are_not_kept_twice() -> None:
    model = llama()
    before = sum(parameter.numel() for parameter in model.parameters())
    fused(model)
    assert sum(parameter.numel() for parameter in model.parameters()) == before


def test_a_model_that_cannot_run_stays_as_it_is() -> None:
    model: Any = llama()
    model.model.rotary_emb = nn.Identity()
    assert fuse_modules(model) == 0
    assert found(model) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fuse": "no"}, r"fuse must be one of True, False, got 'no'"),
        ({"pack": "yes"}, r"pack must be one of None, True, False, got 'yes'"),
        ({"native_kernels": "maybe"}, r"native_kernels must be one of 'auto', True, False, got 'maybe'"),
        ({"device": "nowhere"}, r"device 'nowhere' cannot be used: .*Expected 'cpu'"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        CausalLM.from_pretrained(tmp_path / "nothing", **options)


def test_models_are_fused_as_they_are_loaded(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    lm = CausalLM.from_pretrained(tmp_path, device="cpu")
    assert found(lm.model) == FOUND["llama"]
    assert layouts(lm.model).total() in (0, 2 * 4 + 1)  # where this torch has oneDNN; of 15 when each is by itself
    plain = CausalLM.from_pretrained(tmp_path, device="cpu", fuse=False)
    assert fused_modules(plain.model) == 0
    unpacked = CausalLM.from_pretrained(tmp_path, device="cpu", fuse=False, pack=False)
    assert CausalLM.from_pretrained(tmp_path, device="cpu", pack=False).fingerprint != unpacked.fingerprint
    context = list(range(3, 40))
    assert_scores(lm.next_logits([context], [37]).values[0], plain.next_logits([context], [37]).values[0])


@pytest.mark.parametrize(
    ("name", "is_direct"),
    [("llama", True), ("qwen3", True), ("qwen3_mixed", False), ("gemma3", False), ("gpt2", False)],
)
def test_what_is_around_a_stack_is_left_out_where_it_computes_nothing_else(name: str, is_direct: bool) -> None:
    lm = CausalLM(compiled_or_not(ARCHITECTURES[name]()), rows=3)
    assert (lm._forward._direct is not None) == is_direct
    cursor(lm, ARCHITECTURES[name](), seed=8, steps=20)


def compiled_or_not(model: PreTrainedModel) -> PreTrainedModel:
    tune(model, fuse=True, pack=None, native_kernels="auto")
    return model


def altered(model: Any, part: Any, forward: Any) -> Any:
    """``model``, of which ``part`` has a class of its own with this forward."""
    part.__class__ = type("Altered", (type(part),), {"forward": forward})
    return model


def scaled(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    output = LlamaForCausalLM.forward(self, input_ids, **options)
    output.logits = output.logits * 0.5
    return output


def clipped(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    output = LlamaForCausalLM.forward(self, input_ids, **options)
    output.logits = output.logits.clamp(-1000, 1000)  # which no sample reaches
    return output


def shifted(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
    return LlamaModel.forward(self, inputs_embeds=self.embed_tokens(input_ids) + 0.01, **options)


@pytest.mark.parametrize("change", ["a hook on the head", "a hook on the model", "a scale", "a clip", "a shift"])
def test_a_model_that_computes_more_around_its_stack_is_called_whole(change: str) -> None:
    model: Any = llama()
    tune(model, fuse=True, pack=False, native_kernels=False)
    assert direct(model) is not None
    if change.startswith("a hook"):
        part = model.lm_head if change == "a hook on the head" else model
        part.register_forward_hook(lambda module, arguments, output: None)
    elif change == "a shift":
        altered(model, model.model, shifted)
    else:
        altered(model, model, scaled if change == "a scale" else clipped)
    assert direct(model) is None


def test_hooks_and_heads_that_come_later_are_seen() -> None:
    lm, calls = CausalLM(compiled_or_not(llama())), []
    before = lm.next_logits([[1, 2, 3]], [3]).values
    lm.model.model.register_forward_hook(lambda module, arguments, output: calls.append(1))
    assert torch.allclose(
        lm.next_logits([[4, 2, 3]], [3]).values[0, 0], lm.next_logits([[4]], [1]).values[0, 0], atol=1e-5
    )
    assert calls
    lm.model.lm_head = torch.nn.Linear(32, VOCABULARY, bias=False)
    assert not torch.allclose(lm.next_logits([[1, 2, 3]], [3]).values, before)
