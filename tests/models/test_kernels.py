"""Our own kernels: every number of a weight is found again, sums do not depend on what else is computed, and the rest
does without what cannot be compiled."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from test_causal_lm import cursor
from tiny import SIZES, VOCABULARY, build, llama, mistral, qwen3
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from agentspec import Batch, CausalLM, PromptLookupDrafter, SamplingParams, Sequence, SpeculativeDecoder
from agentspec.models import Logits, compiled_pass
from agentspec.models import attention as attention_module
from agentspec.models.backends import native as kernels_module
from agentspec.models.backends.native import KernelsMissingError, compiles, kernels
from agentspec.models.backends.native.sampling import NativeSampling
from agentspec.models.backends.sampling import TORCH
from agentspec.models.compiled import CompiledLayers
from agentspec.models.compiled_pass import CompiledPass
from agentspec.models.direct import direct
from agentspec.models.packing import layouts
from agentspec.models.panels import FORMATS, fits, laid_out, product
from agentspec.models.stack import Stack
from agentspec.models.tuning import tune
from agentspec.rng import CoupledRng, Role, SequenceRng
from agentspec.runtime.paths import CACHE_VARIABLE
from agentspec.runtime.tokens import NO_TOKEN
from agentspec.sampling import argmax_tokens

needs_compiler = pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")
GGUF = {"Q4_0": "int4", "Q4_1": "int4", "Q5_0": "int8", "Q8_0": "int8", "F16": "float16", "BF16": "bfloat16"}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(format: str) -> Tensor:
    """``[70, 96]``, which is no whole number of panels, as a checkpoint of this format gives them."""
    if format == "float32":
        return normal(70, 96)
    kind = next(kind for kind, found in GGUF.items() if found == format)
    return as_gguf(normal(70, 96), kind)


def as_gguf(weight: Tensor, kind: str) -> Tensor:
    type_ = getattr(gguf.GGMLQuantizationType, kind)
    return torch.tensor(gguf.dequantize(gguf.quantize(weight.numpy(), type_), type_))


def multiplied(weight: Tensor, block: Tensor) -> Tensor:
    return product(*laid_out(weight), None, len(weight))(block)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has no kernels yet, and its cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    kernels_module._kernels.cache_clear()
    yield tmp_path / "cache" / "kernels"
    kernels_module._kernels.cache_clear()


@needs_compiler
@pytest.mark.parametrize(("kind", "format"), GGUF.items())
def test_what_was_quantised_is_held_in_as_few_bytes_and_found_again(kind: str, format: str) -> None:
    weight = as_gguf(normal(70, 96), kind)
    found, panels = laid_out(weight)
    assert found == format
    assert panels.nbytes <= {"int4": 0.75, "int8": 1.125, "float16": 2, "bfloat16": 2}[format] * 96 * 96
    assert torch.equal(multiplied(weight, torch.eye(96)).T, weight)


@needs_compiler
def test_blocks_of_both_kinds_of_four_bits_are_held_together() -> None:
    weight = torch.cat([as_gguf(normal(16, 64, seed=seed), kind) for seed, kind in enumerate(("Q4_0", "Q4_1"))])
    assert laid_out(weight)[0] == "int4"
    assert torch.equal(multiplied(weight, torch.eye(64)).T, weight)


@needs_compiler
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("change", ["one bit", "not a number", "an infinity"])
def test_a_number_that_a_format_lacks_is_held_by_another(format: str, change: str) -> None:
    weight = weights(format)
    if change == "one bit":
        weight.view(torch.int32)[3, 5] ^= 1
    else:
        weight[3, 5] = float("nan" if change == "not a number" else "inf")
    found, _ = laid_out(weight)
    assert found != format or (format, change) in [
        ("float32", change),
        *(("bfloat16", other) for other in ("not a number", "an infinity")),
    ]
    block = torch.zeros(1, 96)
    block[0, 5] = 1.0
    column = multiplied(weight, block)[0]
    assert torch.equal(column[:3], weight[:3, 5])
    assert torch.equal(column[3:4], weight[3:4, 5]) or (change == "not a number" and column[3].isnan())


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 2.0**-20, 2.0**-30], ids=["normal", "subnormal", "zero"])
def test_small_halves_are_found_again(scale: float) -> None:
    weight = (normal(32, 32) * scale).half().float()
    assert torch.equal(multiplied(weight, torch.eye(32)).T, weight)


@needs_compiler
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_as_close_as_torchs(format: str) -> None:
    weight, block = weights(format), normal(9, 96, seed=1)
    exact = block.double() @ weight.double().T
    off = (multiplied(weight, block) - exact).abs().max()
    assert off <= 4 * (block @ weight.T - exact).abs().max()


@needs_compiler
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_bit_by_bit_whatever_else_is_computed(format: str) -> None:
    multiply, block = product(*laid_out(weights(format)), None, 70), normal(300, 96, seed=1)  # more than one slab
    alone = torch.cat([multiply(row[None]) for row in block])
    for count in (*range(1, 41), 255, 256, 257, 300):
        assert torch.equal(multiply(block[:count]), alone[:count]), count


@needs_compiler
def test_a_weight_that_was_laid_out_on_another_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    format, panels = laid_out(weights("int4"))
    monkeypatch.setattr(kernels(), "panel_rows", kernels().panel_rows // 2)
    with pytest.raises(RuntimeError, match="another processor"):
        product(format, panels, None, 70)


@needs_compiler
def test_blocks_of_any_shape_and_layout() -> None:
    weight, block = weights("int4"), normal(96, 4, 2, seed=1)
    expected = multiplied(weight, block.permute(2, 1, 0).contiguous())
    assert torch.equal(multiplied(weight, block.permute(2, 1, 0)), expected)
    assert expected.shape == (2, 4, 70)
    assert multiplied(weight, torch.empty(0, 96)).shape == (0, 70)


@needs_compiler
@pytest.mark.parametrize(
    "block",
    [
        torch.zeros(1, 96, dtype=torch.bfloat16),
        torch.zeros(1, 64),
        torch.zeros(1, 96, device="meta"),
        torch.zeros(1, 96, requires_grad=True),
    ],
    ids=["another type", "another width", "another device", "with gradients"],
)
def test_another_block_is_refused(block: Tensor) -> None:
    with pytest.raises(TypeError, match=r"float32 \[\.\.\., 96\] on a CPU, without gradients, got"):
        multiplied(weights("int4"), block)


def attended(
    width: int, live: int, *, heads: int = 6, kv_heads: int = 2, dim: int = 64, window: int | None = None
) -> Any:
    """Queries, keys, values and a mask for the last ``width`` of ``live`` positions, as a cache hands them out."""
    query = normal(2, width, heads, dim, seed=1).transpose(1, 2) * 3
    key, value = (normal(2, kv_heads, live + 7, dim, seed=seed)[:, :, :live] for seed in (2, 3))
    positions, slots = torch.arange(live - width, live)[:, None], torch.arange(live)
    hidden = slots > positions
    if window is not None:
        hidden |= slots <= positions - window
    mask = torch.zeros(width, live).masked_fill_(hidden, torch.finfo(torch.float32).min)
    return query, key, value, mask.expand(2, 1, width, live)


@needs_compiler
@pytest.mark.parametrize("sizes", [{}, {"dim": 32, "kv_heads": 6}, {"dim": 96, "heads": 7, "kv_heads": 1}], ids=str)
@pytest.mark.parametrize(("width", "live", "window"), [(1, 1, None), (1, 700, None), (5, 300, 40), (130, 513, None)])
def test_attention_is_as_close_as_torchs(sizes: dict[str, int], width: int, live: int, window: int | None) -> None:
    query, key, value, mask = attended(width, live, window=window, **sizes)
    options: Any = {"scale": 0.2, "enable_gqa": True}
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double(), **options)
    off = (scaled_dot_product_attention(query, key, value, mask, **options) - exact).abs().max()
    found = kernels().attention(query, key, value, mask, 0.2)
    assert found.shape == (2, width, query.shape[1], query.shape[3])
    assert (found.transpose(1, 2) - exact).abs().max() <= 4 * off + 1e-7


@needs_compiler
def test_a_position_attends_the_same_bit_by_bit_whatever_else_is_computed() -> None:
    query, key, value, mask = attended(130, 513)
    together = kernels().attention(query, key, value, mask, 0.125)
    for position in range(130):
        seen = 513 - 130 + position + 1
        one = query[1:, :, position, None], key[1:, :, :seen], value[1:, :, :seen], torch.zeros(1, 1, 1, seen)
        assert torch.equal(kernels().attention(*one, 0.125), together[1:, position, None])


@needs_compiler
@pytest.mark.parametrize("hiding", [float("-inf"), torch.finfo(torch.float32).min], ids=["infinite", "finite"])
def test_keys_that_are_hidden_count_for_nothing(hiding: float) -> None:
    query, key, value, _ = attended(3, 600)
    mask = torch.full((1, 1, 3, 600), hiding)
    mask[..., 5] = 0.0
    found = kernels().attention(query, key, value, mask, 0.125)
    assert torch.equal(found, value[:, :, 5].repeat_interleave(3, 1)[:, None].expand(-1, 3, -1, -1))


@needs_compiler
@pytest.mark.parametrize("live", [1, 600])
def test_a_position_that_sees_nothing_gets_zeros(live: int) -> None:
    query, key, value, _ = attended(1, live)
    mask = torch.full((1, 1, 1, live), torch.finfo(torch.float32).min)
    assert not kernels().attention(query, key, value, mask, 0.125).any()


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_attention_does_not_depend_on_threads(threads: int) -> None:
    arguments = *attended(70, 600), 0.125
    expected, before = kernels().attention(*arguments), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(kernels().attention(*arguments), expected)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize(
    "change", ["no mask", "float64", "heads of 48", "a mask by head", "scattered numbers", "gradients"]
)
def test_attention_that_the_kernel_does_not_compute_is_torchs(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, mask = attended(3, 10, dim=48 if change == "heads of 48" else 64)
    if change == "float64":
        query, key, value, mask = (tensor.double() for tensor in (query, key, value, mask))
    elif change == "a mask by head":
        mask = mask.expand(2, 6, 3, 10)
    elif change == "scattered numbers":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    elif change == "gradients":
        query.requires_grad_()
    monkeypatch.setattr(attention_module, "kernels", None)
    arguments = query, key, value, None if change == "no mask" else mask
    module = SimpleNamespace(is_causal=True)
    expected, _ = attention_module.grouped_sdpa(module, *arguments)
    assert torch.equal(attention_module.compiled_sdpa(module, *arguments)[0], expected)


def test_terms_that_the_kernel_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="does not compute softcap"):
        attention_module.compiled_sdpa(None, *attended(3, 10), softcap=30.0)


# Draws and filters: what they find is what torch finds


SIZES_OF_LAWS = [1, 3, 7, 8, 63, 64, 65, 1000, 49152]


def native() -> NativeSampling:
    return NativeSampling(kernels())


def some_probs(size: int) -> Iterator[Tensor]:
    """``[5, size]``: flat and peaked ones, with and without zeros."""
    generator = torch.Generator().manual_seed(size)
    for spread in (0.1, 1.0, 4.0, 30.0):
        probs = (torch.randn(5, size, generator=generator) * spread).softmax(-1)
        yield probs
        yield probs * (torch.rand(5, size, generator=generator) < 0.3)


@needs_compiler
@pytest.mark.parametrize("kind", [SequenceRng, CoupledRng])
@pytest.mark.parametrize("size", SIZES_OF_LAWS)
def test_tokens_are_drawn_as_torch_draws_them(size: int, kind: type[SequenceRng]) -> None:
    for number, probs in enumerate(some_probs(size)):
        rngs = [
            kind([3, 2**64 - 1, 7 + number, 11, 2**63], [0, 1, 2, 3, number], "cpu", by) for by in (native(), TORCH)
        ]
        offsets = torch.tensor([0, 1, 2, 3, 4])
        found, expected = [rng.draw(probs, Role.TARGET, offsets) for rng in rngs]
        some = probs.sum(-1) > 0
        assert torch.equal(found[some], expected[some])
        assert (probs[torch.arange(5), found][some] > 0).all()


@needs_compiler
def test_coupled_draws_of_several_positions_are_those_of_each() -> None:
    probs = torch.rand(2, 3, 100, generator=torch.Generator().manual_seed(0))
    rng, offsets = CoupledRng([5, 6], [7, 8], "cpu", native()), torch.arange(3).expand(2, 3)
    found = rng.draw(probs.transpose(0, 1).contiguous().transpose(0, 1), Role.TARGET, offsets)
    for k in range(3):
        assert torch.equal(found[:, k], rng.draw(probs[:, k], Role.TARGET, offsets[:, k]))


@needs_compiler
@pytest.mark.parametrize("draw", [SequenceRng, CoupledRng])
def test_what_is_no_distribution_gives_some_token(draw: type[SequenceRng]) -> None:
    """Nobody takes it: such a position raises. But it has to be one."""
    probs = torch.stack([torch.full((70,), math.nan), torch.zeros(70)])
    found = draw([1, 2], [3, 4], "cpu", native()).draw(probs, Role.TARGET, torch.zeros(2, dtype=torch.long))
    assert found.tolist() == [0, 0]


@needs_compiler
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_without_mass_is_never_drawn(u: float) -> None:
    generator = torch.Generator().manual_seed(7)
    probs = torch.rand(3000, 300, generator=generator) * torch.exp(-60 * torch.rand(3000, 300, generator=generator))
    probs *= torch.rand(probs.shape, generator=generator) < 0.5
    probs[:, :70], probs[:, -9:] = 0, 0
    drawn = kernels().draw(probs, torch.full((3000,), u, dtype=torch.float64))
    assert (probs[torch.arange(3000), drawn] > 0).all()


@needs_compiler
def test_races_are_won_by_who_is_first() -> None:
    """Near-flat distributions, in which every token may win."""
    generator = torch.Generator().manual_seed(7)
    probs = 1 + 0.01 * torch.rand(3000, 3001, generator=generator)
    offsets = torch.zeros(3000, dtype=torch.long)
    rngs = [CoupledRng(range(3000), [0] * 3000, "cpu", by) for by in (native(), TORCH)]
    found, expected = [rng.draw(probs, Role.TARGET, offsets) for rng in rngs]
    assert torch.equal(found, expected)
    assert len(found.unique()) > 1000


def test_a_device_has_the_numbers_of_the_host() -> None:
    rng = SequenceRng([3, -1, 2**64 - 1, 2**70 + 5], [0, 1, 7, 2**40])
    offsets = torch.arange(6).expand(4, 6)
    for role in Role:
        assert torch.equal(rng._hash(role, offsets), rng._numbers_there(role, offsets))
        assert torch.equal(rng._hash(role, offsets[:, 0]), rng._numbers_there(role, offsets[:, 0]))


@needs_compiler
def test_rows_and_options_have_to_match() -> None:
    with pytest.raises(ValueError, match=r"an option for each, got \[3, 10\] and \[2\]"):
        SequenceRng([1, 2], [0, 0], "cpu", native()).draw(
            torch.rand(3, 10), Role.TARGET, torch.zeros(2, dtype=torch.long)
        )
    with pytest.raises(ValueError, match="rows"):
        kernels().draw(torch.rand(10), torch.rand(10).double())


@needs_compiler
def test_filters_of_all_there_is_keep_all() -> None:
    scores = torch.randn(1, 2, 5000, generator=torch.Generator().manual_seed(0)) * 0.1
    for keep, value in ((native().keep_top_p, 1 - 2.0**-53), (native().keep_top_k, 10**400)):
        assert (keep(scores, [value]) > -math.inf).sum() >= 2 * 4998


@pytest.mark.parametrize("by", ["torch", pytest.param("native", marks=needs_compiler)])
def test_draws_follow_their_distribution(by: str) -> None:
    """A chi-square test of 40,000 draws of each kind."""
    probs = torch.tensor([0.5, 0.25, 0.0, 0.125, 0.0625, 0.0625])
    count = 40_000
    for kind in (SequenceRng, CoupledRng):
        rng = kind(range(count), [0] * count, "cpu", native() if by == "native" else TORCH)
        drawn = rng.draw(probs.expand(count, -1), Role.TARGET, torch.zeros(count, dtype=torch.long))
        expected = count * probs[probs > 0]
        found = torch.bincount(drawn, minlength=len(probs))
        assert found[2] == 0
        assert ((found[probs > 0] - expected) ** 2 / expected).sum() < 18.5  # one in a thousand of 4 degrees of freedom


@needs_compiler
@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 1000, 49152])
def test_filters_keep_what_torch_keeps(size: int) -> None:
    generator, cuts = torch.Generator().manual_seed(size), 0
    for spread, form in itertools.product((0.1, 1.0, 4.0, 30.0), ("", "ties", "masked", "nothing legal")):
        scores = torch.randn(3, 2, size, generator=generator) * spread
        if form == "ties":
            scores = scores.round()
        elif form:
            scores[torch.rand(scores.shape, generator=generator) < (0.6 if form == "masked" else 2.0)] = -math.inf
        for keep, values in (
            ("keep_top_k", [1, 50, 10**6]),
            ("keep_top_k", [2, 5, 1000]),
            ("keep_top_p", [0.5, 0.9, 1e-6]),
            ("keep_top_p", [0.95, 0.99, 0.3]),
        ):
            found, expected = [getattr(by, keep)(scores, values) for by in (native(), TORCH)]
            differing = ((found > -math.inf) != (expected > -math.inf)).sum(-1)
            # Torch adds up shares in float32, which may leave out one of thousands that are much alike.
            assert (differing <= (expected > -math.inf).sum(-1) // 100).all()
            cuts += int((found != scores).any())
    assert cuts > 0 or size == 1


# Models


WHOLE = {"head_dim": 32, "intermediate_size": 64}  # sizes that all kernels compute


def compiled(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    tune(model, **({"fuse": True, "pack": None, "native_kernels": True} | options))
    return model


def uneven(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with norms and biases that are not all ones and zeros, as new ones are."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def compiled_layers(model: PreTrainedModel) -> int:
    """Layers that are computed without Python in between."""
    return sum(len(m.layers) for m in model.modules() if isinstance(m, Stack) and m.compiled is not None)


@needs_compiler
@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {}, 2),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, 2),
        ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 0.1}, 2),
        ("Qwen3", {}, 2),  # norms of queries and keys
        (
            "Qwen2",
            {"head_dim": None, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
            2,
        ),  # biases of queries, keys and values
        ("Mistral", {"sliding_window": 6}, 2),
        ("Llama", {"hidden_act": "gelu"}, 0),
        ("Llama", {"head_dim": 16}, 0),
        ("Llama", {"intermediate_size": 48}, 0),
    ],
    ids=str,
)
def test_a_compiled_model_computes_the_same_on_a_random_walk(
    architecture: str, changes: dict[str, Any], expected: int
) -> None:
    sizes = {name: value for name, value in (SIZES | WHOLE | changes).items() if value is not None}
    model = compiled(uneven(build(architecture, 0, **sizes)))
    assert model.config._attn_implementation == attention_module.COMPILED_SDPA
    assert compiled_layers(model) == expected
    lm = CausalLM(model, rows=3, prefill_chunk=16)
    assert (lm._forward._compiled is not None) == (expected > 0)
    cursor(lm, uneven(build(architecture, 0, **sizes)), seed=7, steps=40)


def rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, **options}}


@needs_compiler
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"head_bias": True}),
        ("Llama", rope("linear")),
        ("Llama", rope("dynamic")),  # up to the positions that it was made for
        ("Mistral", {"sliding_window": 6}),
        ("Qwen3", {}),
    ],
    ids=str,
)
def test_a_pass_in_one_call_is_the_pass_in_parts(architecture: str, changes: dict[str, Any]) -> None:
    """The parts have masks, angles that were computed for the block, and torch's own norm."""
    sizes = {name: value for name, value in changes.items() if name != "head_bias"}
    model: Any = build(architecture, 0, **SIZES | WHOLE | sizes)
    if "head_bias" in changes:
        model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCABULARY, bias=True)
    model = compiled(uneven(model))
    whole, parts = CausalLM(model, rows=3, prefill_chunk=16), CausalLM(model, rows=3, prefill_chunk=16)
    assert whole._forward._compiled is not None
    parts._forward._compiled = None
    rng = random.Random(3)
    texts = [[rng.randrange(VOCABULARY) for _ in range(60)] for _ in range(3)]
    ends = [1, 1, 1]
    while min(ends) < 60:
        ends = [min(60, end + rng.choice([1, 1, 2, 7, 33])) for end in ends]
        contexts = [text[:end] for text, end in zip(texts, ends, strict=True)]
        last = [rng.randrange(min(end, 5) + 1) for end in ends]
        found, expected = whole.next_logits(contexts, last).values, parts.next_logits(contexts, last).values
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("known", [2000, 1037, 1])
def test_a_pass_tells_the_best_tokens_of_its_scores(known: int, threads: int) -> None:
    """Over ids that count, for rows of any widths, the same context twice, and contexts that are known already."""
    lm = CausalLM(compiled(uneven(build("Llama", 0, **SIZES | WHOLE | {"vocab_size": 2000}))), rows=3)
    lm.limit_vocab(known)
    generator, before = torch.Generator().manual_seed(known), torch.get_num_threads()
    contexts = [torch.randint(known, (n,), generator=generator).tolist() for n in (7, 3, 9, 7)]
    contexts[3] = contexts[0]
    try:
        torch.set_num_threads(threads)
        for last in ([2, 3, 9, 5], [0, 1, 1, 1], [7, 3, 0, 0]):
            logits = lm.next_logits(contexts, last)
            expected = [row[:count] for row, count in zip(argmax_tokens(logits.values), last, strict=True)]
            assert logits.argmax == expected
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_pass_that_is_computed_in_parts_finds_no_argmax() -> None:
    lm, contexts = CausalLM(compiled(build("Llama", 0, **SIZES | WHOLE)), rows=2), [[1, 2, 3], [*range(1, 60)]]
    logits = lm.next_logits(contexts, [2, 2])  # the long one is read by itself
    assert logits.argmax == argmax_tokens(logits.values)
    with torch.inference_mode():
        assert lm.next_logits(contexts, [1, 1]).argmax == argmax_tokens(lm.next_logits(contexts, [1, 1]).values)
    lm.model.model.norm.register_forward_hook(lambda *_: None)
    assert lm.next_logits(contexts, [2, 2]).argmax is None


def test_limited_logits_keep_an_argmax_that_is_within() -> None:
    values = torch.tensor([[[0.0, 1.0, 2.0, 3.0], [9.0, 1.0, 2.0, 3.0]]])
    assert Logits(values, [[2, 0]]).limit(3).argmax == [[2, 0]]
    assert Logits(values, [[3, 0]]).limit(3).argmax is None
    assert Logits(values, [[3, 0]]).limit(4).argmax == [[3, 0]]
    assert torch.equal(Logits(values).limit(3).values, values[..., :3])


class Biased(CausalLM):
    """One that always says 7, by a tensor of its own or by writing into the other's."""

    how = "not at all"  # while it is made

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Logits:
        logits = super().next_logits(contexts, last)
        if self.how == "in place":
            logits.values[..., 7] = 1e9
        if self.how == "by another":
            return Logits(logits.values + 1e9 * torch.nn.functional.one_hot(torch.tensor(7), self.vocab_size))
        return Logits(logits.values) if self.how == "in place" else logits


class Around:
    """A model around another, which it asks for whatever it lacks."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        return -self.model.next_logits(contexts, last).values


@needs_compiler
def test_who_changes_the_scores_has_the_last_word() -> None:
    for how in ("in place", "by another"):
        model = Biased(compiled(build("Llama", 0, **SIZES | WHOLE)), rows=2)
        model.how = how
        assert said(model) == [7] * 5
    plain = CausalLM(compiled(build("Llama", 0, **SIZES | WHOLE)), rows=2)
    expected: list[int] = []
    for _ in range(5):
        expected.append(int(plain.next_logits([[1, 2, *expected]], [1]).values[0, 0].argmin()))
    assert said(Around(plain)) == expected
    first = said(plain)[0]
    assert first not in said(plain, banned_token_ids=(first,))
    assert said(plain, logit_bias={9: 1e6}) == [9] * 5


def said(model: Any, **settings: Any) -> list[int]:
    """Five greedy tokens, by speculation and without; they are the same."""
    texts = []
    for drafter in (None, PromptLookupDrafter(min_ngram=1)):
        sequence = Sequence([1, 2], SamplingParams(temperature=0, max_tokens=5, **settings), seed=0)
        decoder = SpeculativeDecoder(model, drafter, 3)
        while sequence.finish_reason is None:
            decoder.round(Batch([sequence]))
        texts.append(sequence.tokens)
    assert texts[0] == texts[1]
    return texts[0]


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("change", ["ties", "a single score", "no number", "no number at the end", "no score"])
def test_the_best_token_is_the_first_with_a_score(change: str, threads: int) -> None:
    bias = torch.full((2001,), -math.inf if change in ("a single score", "no score") else 0.0)
    ids = {"ties": [40, 1100, 1900], "a single score": [2000], "no number": [17], "no number at the end": [2000]}
    if change in ids:  # ties: beside so much, all else vanishes
        bias[ids[change]] = {"ties": 1e9, "a single score": 0.0}.get(change, math.nan)
    lm = CausalLM(compiled(build("Llama", 0, **SIZES | WHOLE | {"vocab_size": 2001})), rows=2)
    lm.model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        logits = lm.next_logits([[1, 2, 3]], [2])
        expected = {"ties": 40, "a single score": 2000}.get(change, NO_TOKEN)
        assert logits.argmax == argmax_tokens(logits.values) == [[expected, expected]]
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_angles_are_the_same_in_whatever_steps_they_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, context = CausalLM(compiled(llama(**WHOLE))), [i * 7 % VOCABULARY for i in range(60)]
    expected = lm.next_logits([context], [60]).values
    monkeypatch.setattr(compiled_pass, "_STEP", 3)
    for ends in ([60], range(1, 61)):
        again = CausalLM(compiled(llama(**WHOLE)))
        found = [again.next_logits([context[:end]], [min(end, 60 if len(ends) == 1 else 1)]).values for end in ends]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_other_defaults_of_torch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the process's: somebody who loads a model elsewhere sets them for a while."""
    monkeypatch.setattr(compiled_pass, "_STEP", 3)
    context = [i * 7 % VOCABULARY for i in range(60)]
    expected = CausalLM(compiled(llama(**WHOLE))).next_logits([context], [60]).values
    lm, probs = CausalLM(compiled(llama(**WHOLE))), torch.full((1, 4), 0.25)
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        found = lm.next_logits([context], [60]).values
        token = kernels().draw(probs, torch.tensor([0.6], dtype=torch.float64, device="cpu"))
        least = kernels().least_of_top_k(probs, [1])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert found.dtype == least.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (token.item(), least.item()) == (2, 0.25)


@needs_compiler
def test_weights_that_move_after_loading_are_found_again() -> None:
    model: Any = compiled(uneven(llama(**WHOLE)))
    lm, context = CausalLM(model), list(range(20))
    before = lm.next_logits([context], [20]).values
    lm.model.float()  # anew, though nothing moves
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.clone()
    lm.kv.clear()
    lm.next_logits([context[:3]], [1])
    assert torch.equal(lm.next_logits([context], [17]).values[0], before[0, 3:])
    assert lm._forward._compiled is not None
    assert lm._forward._compiled.is_current()
    lm.model.load_state_dict({name: 2 * tensor for name, tensor in lm.model.state_dict().items()}, assign=True)
    lm.kv.clear()
    expected = CausalLM(copy.deepcopy(lm.model)).next_logits([context], [1]).values
    lm.kv.clear()
    torch.testing.assert_close(lm.next_logits([context], [1]).values, expected, rtol=1e-5, atol=1e-5)
    lm.model.load_state_dict({name: tensor / 2 for name, tensor in lm.model.state_dict().items()}, assign=True)
    for part in ("model.norm.weight", "model.embed_tokens.weight"):
        weight = model.get_parameter(part)
        kept, weight.data = weight.data, torch.zeros_like(weight)
        lm.kv.clear()
        assert lm.next_logits([context], [1]).values.abs().max() < before.abs().max() / 100
        weight.data = kept
    lm.kv.clear()
    lm.next_logits([context[:3]], [1])
    assert torch.equal(lm.next_logits([context], [17]).values[0], before[0, 3:])
    model.model.embed_tokens.to(torch.float64)
    lm.kv.clear()
    with pytest.raises((TypeError, UserWarning)):  # whatever comes first: no logits of weights that are gone
        lm.next_logits([context], [1])


@needs_compiler
def test_a_loaded_model_may_be_copied() -> None:
    lm = CausalLM(compiled(llama(**WHOLE)))
    expected, other = lm.next_logits([[1, 2, 3]], [3]).values, copy.deepcopy(lm)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            parameter.zero_()
    assert other._forward._compiled is not None
    assert torch.equal(other.next_logits([[1, 2, 3]], [3]).values, expected)


@needs_compiler
def test_angles_that_depend_on_other_positions_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [3.0] * 16, "original_max_position_embeddings": 20}
    model: Any = compiled(llama(**WHOLE | rope("longrope", **factors)))
    around = direct(model)
    assert around is not None
    assert CompiledPass.of(model, around) is not None  # up to position 20, which is as far as such a model is used
    monkeypatch.setattr(compiled_pass, "longest_context", lambda model: 21)
    assert CompiledPass.of(model, around) is None


@needs_compiler
@pytest.mark.parametrize("part", ["", "model", "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"])
def test_a_model_that_somebody_changed_is_computed_in_parts(part: str) -> None:
    lm, context = CausalLM(compiled(llama(**WHOLE))), [1, 2, 3]
    before, seen = lm.next_logits([context], [3]).values, []
    handle = lm.model.get_submodule(part).register_forward_hook(lambda *call: seen.append(call))
    lm.next_logits([[*context, 4]], [3])
    assert seen
    handle.remove()
    seen.clear()
    assert torch.equal(lm.next_logits([context], [3]).values, before)
    assert not seen


@needs_compiler
def test_layers_of_different_sizes_are_no_one_call() -> None:
    first, second = (
        next(module for module in compiled(llama(**WHOLE | changes)).modules() if isinstance(module, Stack))
        for changes in ({}, {"intermediate_size": 96})
    )
    assert CompiledLayers.fit([*first.layers])
    assert not CompiledLayers.fit([*first.layers, *second.layers])


@needs_compiler
@pytest.mark.parametrize("make", [llama, qwen3, mistral])
def test_kernels_serve_modules_that_are_not_fused(make: Any) -> None:
    model = compiled(make(**WHOLE), fuse=False)
    assert compiled_layers(model) == 0
    cursor(CausalLM(model, rows=3, prefill_chunk=16), make(**WHOLE), seed=7, steps=40)


@needs_compiler
def test_mixed_layers_are_compiled_one_by_one() -> None:
    mixed = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    model = compiled(qwen3(**WHOLE, **mixed))
    assert compiled_layers(model) == 2
    cursor(CausalLM(model, rows=3), qwen3(**WHOLE, **mixed), seed=7, steps=40)


@needs_compiler
def test_copies_of_a_compiled_model_have_weights_of_their_own() -> None:
    model = compiled(llama(**WHOLE))
    expected = CausalLM(copy.deepcopy(model)).next_logits([[1, 2, 3]], [3]).values
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.zero_()
    assert torch.equal(CausalLM(again).next_logits([[1, 2, 3]], [3]).values, expected)


@needs_compiler
def test_weights_that_move_are_found_again() -> None:
    model = compiled(llama(**WHOLE))
    context = list(range(20))
    expected = CausalLM(model).next_logits([context], [20]).values
    norms = [parameter for name, parameter in model.named_parameters() if name.endswith("layernorm.weight")]
    assert len(norms) == 4
    model.to(torch.float64)
    model.to(torch.float32)
    junk = [torch.full_like(norm, math.nan) for norm in norms * 50]  # where the norms may have been
    assert torch.equal(CausalLM(model).next_logits([context], [20]).values, expected)
    del junk
    with torch.no_grad():
        for norm in norms:
            norm.mul_(2)
    model.to(torch.float32)
    assert not torch.equal(CausalLM(model).next_logits([context], [20]).values, expected)


@needs_compiler
def test_one_compiled_model_may_serve_two_caches() -> None:
    model = compiled(llama(**WHOLE))
    first, second = CausalLM(model, rows=2), CausalLM(model, rows=3)
    context = list(range(20))
    for lm in (first, second, first):
        found = lm.next_logits([context, [5, *context]], [20, 3]).values
    assert torch.equal(found, CausalLM(compiled(llama(**WHOLE))).next_logits([context, [5, *context]], [20, 3]).values)


@needs_compiler
def test_a_compiled_model_scores_a_token_the_same_bit_by_bit_whatever_else_is_computed() -> None:
    lm, context = CausalLM(compiled(llama(**WHOLE)), rows=4), [i * 7 % VOCABULARY for i in range(60)]
    together = lm.next_logits([context], [60]).values[0]
    for row in lm.kv.rows:
        row.tokens.clear()
    for end in range(1, 61):
        others = [[end, 2, 3], context[:end], [5]] if end % 2 else [context[:end]]
        found = lm.next_logits(others, [1] * len(others)).values
        assert torch.equal(found[others.index(context[:end]), 0], together[end - 1]), end


def test_what_fits() -> None:
    assert fits(torch.zeros(3, 64))
    assert not fits(torch.zeros(3, 48))
    assert not fits(torch.zeros(3, 64, dtype=torch.bfloat16))
    assert not fits(torch.zeros(3, 64, device="meta"))


@pytest.mark.sweep
@needs_compiler
@pytest.mark.parametrize(
    ("capability", "instructions", "expected"),
    [("avx2", None, True), ("default", (), True), ("default", None, False)],
    ids=["8 lanes", "4 lanes, as on ARM", "an old x86"],
)
def test_other_processors(capability: str, instructions: tuple[str, ...] | None, expected: bool) -> None:
    """Shorter vectors and fewer registers, or no kernels at all."""
    script = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import torch, test_kernels as t\n"
        "from agentspec import kernels\n"
        f"if {instructions} is not None: kernels._instructions = lambda: {instructions}\n"
        "kernels._kernels.cache_clear()\n"
        f"assert kernels.compiles('auto') == {expected}\n"
        f"for format in t.FORMATS if {expected} else ():\n"
        "    weight = t.weights(format)\n"
        "    assert torch.equal(t.multiplied(weight, torch.eye(96)).T, weight)\n"
        "    t.test_a_row_is_the_same_bit_by_bit_whatever_else_is_computed(format)\n"
        f"if {expected}:\n"
        "    t.test_a_position_attends_the_same_bit_by_bit_whatever_else_is_computed()\n"
        "    t.test_attention_is_as_close_as_torchs({}, 5, 300, 40)\n"
        "    t.test_a_compiled_model_computes_the_same_on_a_random_walk('Llama', {}, 2)\n"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=Path(__file__).parent, env=environment, capture_output=True
    )
    assert run.returncode == 0, run.stderr.decode()


@needs_compiler
def test_they_are_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = kernels().version
    assert sorted(path.name for path in anew.iterdir()) == [f"{version}.digests.json", f"{version}.so"]
    assert anew.stat().st_mode & 0o077 == 0
    kernels_module._kernels.cache_clear()
    monkeypatch.setattr(kernels_module, "_build", None)
    assert kernels().version == version


@needs_compiler
def test_a_broken_library_is_made_anew(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = tmp_path / "other" / "kernels" / f"{kernels().version}.so"
    kept.parent.mkdir(parents=True, mode=0o700)
    kept.parent.parent.chmod(0o700)
    kept.write_bytes(b"no library")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    kernels_module._kernels.cache_clear()
    assert kernels().panel_rows > 0
    assert kept.stat().st_size > 1000


@needs_compiler
def test_a_library_that_does_not_load_is_not_kept(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = tmp_path / "count"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho >>{count}\nfor last; do :; done\necho nothing >"$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} --some-option")
    with pytest.raises(KernelsMissingError, match="OSError"):
        kernels()
    assert not list(anew.iterdir())
    assert len(count.read_text()) == 2  # one command to compile, one to link


@needs_compiler
def test_a_user_without_a_home_has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    kernels_module._kernels.cache_clear()
    assert kernels().panel_rows > 0


@needs_compiler
@pytest.mark.parametrize("obstacle", ["open to others", "a file"])
def test_what_cannot_be_kept_is_made_for_the_process(obstacle: str, anew: Path) -> None:
    anew.parent.mkdir()
    if obstacle == "a file":
        anew.write_text("in the way")
    else:
        anew.mkdir()
        anew.chmod(0o777)
        with pytest.warns(RuntimeWarning, match="compiled anew in every process.*only you may write"):
            kernels()
    assert kernels().panel_rows > 0
    assert anew.is_file() or not list(anew.iterdir())


@needs_compiler
def test_a_compiler_that_fails_costs_a_warning_and_nothing_else(
    anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho the disk is full >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    llama().save_pretrained(tmp_path / "model")
    with pytest.warns(RuntimeWarning, match=r"could not be compiled.*the disk is full") as warned:
        lm = CausalLM.from_pretrained(tmp_path / "model", device="cpu")
    assert len(warned) == 1
    assert layouts(lm.model).keys() <= {"oneDNN"}
    with pytest.warns(RuntimeWarning, match="nothing to do it with") as warned:
        CausalLM.from_pretrained(tmp_path / "model", device="cpu", native_kernels=True)
    assert len(warned) == 1
    expected = CausalLM.from_pretrained(tmp_path / "model", device="cpu", native_kernels=False)
    assert torch.equal(lm.next_logits([[1, 2, 3]], [3]).values, expected.next_logits([[1, 2, 3]], [3]).values)


def test_without_a_compiler_nobody_is_told(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    llama().save_pretrained(tmp_path / "model")
    CausalLM.from_pretrained(tmp_path / "model", device="cpu")
    with pytest.raises(KernelsMissingError, match="no C\\+\\+ compiler"):
        kernels()


@needs_compiler
@pytest.mark.parametrize("compile", ["auto", True, False])
def test_models_are_compiled_as_they_are_loaded(compile: bool, tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    lm = CausalLM.from_pretrained(tmp_path, device="cpu", native_kernels=compile)
    assert ("bfloat16" in layouts(lm.model)) == bool(compile)
