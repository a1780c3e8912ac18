"""Cached logits are the uncached ones, whatever was asked before; and what cannot be served is refused by name."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, MAX_CONTEXT, VOCABULARY, gpt2, llama, mistral, phi3
from torch import Tensor
from transformers import PreTrainedModel

from agentspec.errors import ContextOverflowError, InvalidRequestError, ModelLoadError
from agentspec.models import LanguageModel, attention, forward
from agentspec.models.attention import FULL, SLIDING, LayerMasks, _folded_sdpa
from agentspec.models.causal_lm import SHORT_FEED, CausalLM
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.packing import has_linear_kernels

needs_kernels = pytest.mark.skipif(not has_linear_kernels(), reason="this torch has no oneDNN")

TOLERANCE = 1e-5
"""Largest difference allowed, as a share of the largest logit (float32)."""


def uncached(model: PreTrainedModel, context: list[int]) -> Tensor:
    """Logits after every token of ``context`` ``[len, V]``: one plain forward, without any cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([context]), use_cache=False).logits[0]


def assert_scores(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def ask(lm: CausalLM, model: PreTrainedModel, contexts: list[list[int]], last: list[int]) -> None:
    """Compare one ``next_logits`` with plain forwards of ``model``, and check what the cache says about itself."""
    promised = [lm.cached_tokens(context) for context in contexts]
    before = lm.computed_tokens
    found = lm.next_logits(contexts, last).values
    assert found.shape == (len(contexts), max(last), lm.vocab_size)
    assert found.dtype == torch.float32
    for row, context, count in zip(found, contexts, last, strict=True):
        if count:
            assert_scores(row[:count], uncached(model, context)[-count:])
    lm.kv.check_integrity()
    if len(contexts) == 1:
        start = min(promised[0], len(contexts[0]) - last[0])
        assert lm.computed_tokens - before == len(contexts[0]) - start
        assert lm.cached_tokens(contexts[0]) == len(contexts[0])


def cursor(lm: CausalLM, model: PreTrainedModel, seed: int, steps: int) -> None:
    """Conversations that arrive, grow, lose a tail, go back and part, in calls of all sizes."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))]

    conversations: list[list[int]] = [tokens(40)]
    for _ in range(steps):
        act = rng.choice(["arrive", "arrive", "grow", "grow", "grow", "reject", "reject", "part", "return", "leave"])
        index = rng.randrange(len(conversations))
        chosen = conversations[index]
        if act == "arrive":
            conversations.append(tokens(80))
        elif act == "grow":
            chosen.extend(tokens(6))
        elif act == "reject":
            conversations[index] = chosen[: max(1, len(chosen) - rng.randint(1, 5))] + tokens(2)
        elif act == "part":
            conversations.append([*chosen, *tokens(3)])
        elif act == "return":
            conversations[index] = chosen[: rng.randint(1, len(chosen))] + tokens(50)
        elif len(conversations) > 1:
            conversations.pop(index)
        conversations = [context[: MAX_CONTEXT // 2] for context in conversations]
        called = [list(rng.choice(conversations)) for _ in range(rng.choice([1, 1, 2, 3, 5]))]
        ask(lm, model, called, [min(len(context), rng.choice([0, 1, 1, 2, 4, 9, 99])) for context in called])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_scores_equal_uncached_ones_on_a_random_walk(name: str) -> None:
    lm = CausalLM(ARCHITECTURES[name](), rows=3, prefill_chunk=16)
    cursor(lm, ARCHITECTURES[name](), seed=1, steps=40)


def test_a_walk_under_a_tight_memory_budget_stays_correct() -> None:
    slot_bytes = CausalLM(llama()).kv.slot_bytes
    lm = CausalLM(llama(), rows=4, memory_budget_bytes=(MAX_CONTEXT // 2 + SHORT_FEED) * 2 * slot_bytes)
    cursor(lm, llama(), seed=2, steps=60)
    assert len(lm.kv.rows) < 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_a_row_alone_equals_the_row_in_any_batch(name: str) -> None:
    rng = random.Random(3)
    contexts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (3, 29, 64, 17)]
    together, alone = (CausalLM(ARCHITECTURES[name]()) for _ in range(2))
    together.next_logits([context[:-2] for context in contexts], [0, 0, 0, 0])
    batch = together.next_logits(contexts, [1, 2, 3, 2]).values
    for row, context, count in zip(batch, contexts, [1, 2, 3, 2], strict=True):
        assert_scores(row[:count], alone.next_logits([context], [count]).values[0])


@pytest.mark.parametrize("length", [10, 90])
def test_equal_contexts_are_computed_once_and_part_later(length: int) -> None:
    lm, model = CausalLM(llama()), llama()
    prompt = list(range(1, length + 1))
    ask(lm, model, [prompt] * 4, [1, 3, 0, 1])
    assert lm.computed_tokens == length
    ask(lm, model, [[*prompt, 7], [*prompt, 8], [*prompt, 9], [*prompt, 8]], [1, 1, 1, 1])
    assert lm.computed_tokens == length + 3
    ask(lm, model, [[*prompt, 7, 1], [*prompt, 8, 1], [*prompt, 9, 1]], [1, 1, 1])
    assert lm.computed_tokens == length + 6


def test_contexts_that_share_a_long_prompt_prefill_it_once() -> None:
    lm = CausalLM(llama())
    prompt = list(range(90))
    ask(lm, llama(), [[*prompt, 7], [*prompt, 8, 9], prompt], [1, 1, 1])
    assert lm.computed_tokens == 91 + 2 + 1


def test_a_newcomer_forks_from_a_row_that_its_owner_continues() -> None:
    lm = CausalLM(llama())
    prompt = list(range(40))
    lm.next_logits([[*prompt, 1, 2, 3]], [1])
    before = lm.computed_tokens
    ask(lm, llama(), [[*prompt, 9], [*prompt, 1, 2, 3, 4]], [1, 1])
    assert lm.computed_tokens - before == 2
    assert lm.cached_tokens([*prompt, 1, 2, 3, 4]) == 44


def test_more_contexts_than_rows_are_served_in_turns() -> None:
    lm = CausalLM(llama(), rows=2)
    contexts = [[base, *range(20 + base)] for base in range(7)]
    ask(lm, llama(), contexts, [1, 2, 3, 0, 5, 6, 7])
    assert len(lm.kv.rows) == 2


def test_asking_for_nothing_only_fills_the_cache() -> None:
    lm = CausalLM(llama())
    contexts = [list(range(70)), [5, 6]]
    assert lm.next_logits(contexts, [0, 0]).values.shape == (2, 0, VOCABULARY)
    assert [lm.cached_tokens(context) for context in contexts] == [70, 2]
    assert lm.next_logits([], []).values.shape == (0, 0, VOCABULARY)


def test_a_context_may_fill_the_last_position() -> None:
    for maker in (llama, gpt2):
        lm, model = CausalLM(maker()), maker()
        context = [token % VOCABULARY for token in range(MAX_CONTEXT)]
        # Beside a longer feed, the row at the end of its positions is padded beyond them.
        lm.next_logits([context[:-1]], [0])
        ask(lm, model, [context, [1, 2, 3, 4, 5]], [1, 5])


def test_results_are_ordinary_tensors() -> None:
    logits = CausalLM(llama()).next_logits([[1, 2]], [1]).values
    logits += 1.0
    assert not logits.is_inference()


def test_it_is_a_caching_model() -> None:
    lm = CausalLM(llama())
    assert isinstance(lm, LanguageModel)
    assert (lm.vocab_size, lm.max_context, lm.device.type, lm.dtype) == (VOCABULARY, MAX_CONTEXT, "cpu", torch.float32)
    assert (lm.computed_tokens, lm.cached_tokens([1])) == (0, 0)


@pytest.mark.parametrize("length", [6, 80])
def test_an_exception_in_a_forward_leaves_a_correct_cache(length: int) -> None:
    lm, model = CausalLM(llama(), prefill_chunk=32), llama()
    prompt = list(range(5, 5 + length))
    lm.next_logits([prompt, [1, 2, 3]], [1, 1])

    def fail(*_: Any) -> None:
        raise RuntimeError("the last layer failed")

    # The first layer has already overwritten K and V where the rejected tails were.
    hook = lm.model.model.layers[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the last layer failed"):
        lm.next_logits([[*prompt[:-3], 95, 96], [1, 2, 96, 96]], [1, 1])
    hook.remove()
    lm.kv.check_integrity()
    assert lm.cached_tokens(prompt) == length - 3
    ask(lm, model, [prompt, [1, 2, 3]], [4, 3])


def test_a_failing_chunk_keeps_the_chunks_before_it() -> None:
    lm = CausalLM(llama(), prefill_chunk=32)
    chunks = []

    def fail_third(*_: Any) -> None:
        chunks.append(1)
        if len(chunks) == 3:
            raise RuntimeError("the third chunk failed")

    hook = lm.model.model.layers[-1].register_forward_pre_hook(fail_third)
    with pytest.raises(RuntimeError, match="the third chunk failed"):
        lm.next_logits([list(range(90))], [1])
    hook.remove()
    assert lm.cached_tokens(list(range(90))) == 64
    ask(lm, llama(), [list(range(90))], [1])


@pytest.mark.parametrize(
    ("contexts", "last", "error", "message"),
    [
        ([[1] * (MAX_CONTEXT + 1)], [1], ContextOverflowError, f"{MAX_CONTEXT + 1} tokens, .* reach {MAX_CONTEXT}"),
        ([[1, VOCABULARY]], [1], InvalidRequestError, f"context 0 holds the id {VOCABULARY}"),
        ([[1], [-1]], [1, 1], InvalidRequestError, "context 1 holds the id -1"),
        ([[1], []], [1, 0], InvalidRequestError, "context 1 is empty"),
        ([[1, 2]], [3], InvalidRequestError, r"last\[0\] is 3, expected 0 to 2"),
        ([[1, 2]], [-1], InvalidRequestError, r"last\[0\] is -1"),
        ([[1, 2]], [1, 1], InvalidRequestError, "2 for 1 contexts"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_computed(
    contexts: list[list[int]], last: list[int], error: type[Exception], message: str
) -> None:
    lm = CausalLM(llama())
    with pytest.raises(error, match=message):
        lm.next_logits(contexts, last)
    assert lm.computed_tokens == 0


def test_a_context_beyond_the_memory_budget_is_refused_before_anything_is_computed() -> None:
    lm = CausalLM(llama(), memory_budget_bytes=20_000)
    ask(lm, llama(), [[1, 2, 3], [4, 5]], [1, 1])
    before = lm.computed_tokens
    with pytest.raises(InvalidRequestError, match="raise memory_budget_bytes"):
        lm.next_logits([[1], [2] * 100], [1, 1])
    assert lm.computed_tokens == before


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
HEADED = SMALL | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("architecture", "sizes", "message"),
    [
        ("Mamba", SMALL, "recurrent state"),
        ("Jamba", HEADED | {"mamba_d_state": 4}, "recurrent state"),
        ("Lfm2", HEADED | {"layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
        ("Llama4", HEADED, "layers of kind chunked_attention"),
        ("Bloom", SMALL | {"n_head": 4}, "takes no position_ids"),
        (
            "GPTNeo",
            {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
            "masks by the length",
        ),
    ],
)
def test_state_that_positions_cannot_address_is_refused(
    architecture: str, sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    suffix = "TextConfig" if architecture == "Llama4" else "Config"
    config = getattr(transformers, architecture + suffix)(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        CausalLM.from_pretrained(tmp_path, device="cpu")
    with pytest.raises(ModelLoadError, match=message):
        CausalLM(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        CausalLM(transformers.T5ForConditionalGeneration(config))


def test_a_wrong_mask_is_caught_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerMasks, "of", classmethod(lambda cls, model: cls({FULL: None})))
    with pytest.raises(ModelLoadError, match=r"cached logits differ .* choose another model"):
        CausalLM(mistral())


def test_the_probe_leaves_no_trace() -> None:
    model = mistral()
    window = model.config.sliding_window
    lm = CausalLM(model, rows=3)
    assert (model.config.sliding_window, lm.computed_tokens, lm.kv.capacity) == (window, 0, 0)
    assert [row.tokens for row in lm.kv.rows] == [[], [], []]
    lm.kv.check_integrity()


def test_longrope_is_served_up_to_where_its_frequencies_switch() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10_000.0}
    model = phi3(rope_parameters=rope, original_max_position_embeddings=64)
    assert CausalLM(model).max_context == 64


def test_masks_hide_the_future_and_what_left_the_window() -> None:
    masks = LayerMasks({FULL: None, SLIDING: 2}).build(torch.tensor([[1, 2], [3, 4]]), 5, torch.float32)
    assert isinstance(masks, dict)
    seen = {
        kind: [[mask[row, 0, column].eq(0).nonzero().flatten().tolist() for column in range(2)] for row in range(2)]
        for kind, mask in masks.items()
    }
    assert seen[FULL] == [[[0, 1], [0, 1, 2]], [[0, 1, 2, 3], [0, 1, 2, 3, 4]]]
    assert seen[SLIDING] == [[[0, 1], [1, 2]], [[2, 3], [3, 4]]]


def test_folding_query_heads_is_the_same_attention() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 4)
    mask = LayerMasks({FULL: None}).build(torch.tensor([[1, 2, 3], [2, 3, 4]]), 5, torch.float32)
    assert isinstance(mask, Tensor)
    repeated = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), attn_mask=mask, scale=0.3
    )
    torch.testing.assert_close(_folded_sdpa(query, key, value, mask, 0.0, 0.3), repeated)


@pytest.mark.parametrize("are_multiplied", [False, pytest.param(True, marks=needs_kernels)], ids=["sdpa", "products"])
@pytest.mark.parametrize("kind", [FULL, SLIDING])
def test_many_queries_step_by_step_are_the_same_attention(
    kind: str, are_multiplied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    width, live = 300, 340
    query, key, value = torch.randn(2, 6, width, 8), torch.randn(2, 2, live, 8), torch.randn(2, 2, live, 4)
    slots = torch.stack([torch.arange(40, 340), torch.arange(7, 307)])
    mask = LayerMasks({kind: 100 if kind == SLIDING else None}).build(slots, live, torch.float32)
    at_once = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    name = "_multiplied_sdpa" if are_multiplied else "scaled_dot_product_attention"
    original, sizes = getattr(attention, name), []

    def noted(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        sizes.append((query.shape[2], key.shape[2]))
        return original(query, key, *rest, **options)

    monkeypatch.setattr(attention, name, noted)
    monkeypatch.setattr(attention, "_MANY_SCORES", 0 if are_multiplied else math.inf)
    mixed, _ = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(mixed, at_once.transpose(1, 2))
    assert sizes == [(128, 168), (128, 296), (44, 340)]


@pytest.mark.parametrize("kind", ["boolean", "for every row"])
def test_masks_of_other_forms_are_left_to_sdpa(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own masks, where somebody calls the module itself."""
    monkeypatch.setattr(attention, "_MANY_SCORES", 0)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask = LayerMasks({FULL: 3}).build(torch.arange(4, 9)[None], 9, torch.float32)
    assert isinstance(mask, Tensor)
    mask = mask == 0 if kind == "boolean" else mask
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    mixed, _ = attention.grouped_sdpa(torch.nn.Identity(), query, key, value, mask)
    torch.testing.assert_close(mixed, expected.transpose(1, 2))


@needs_kernels
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_attention_by_products_computes_the_same_on_a_random_walk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], attention._multiplied_sdpa
    monkeypatch.setattr(attention, "_multiplied_sdpa", lambda *parts: (calls.append(1), original(*parts))[1])
    monkeypatch.setattr(attention, "_MANY_SCORES", 0)
    monkeypatch.setattr(forward, "LONG", 10)
    monkeypatch.setattr(forward, "_LIVE_STEP", 16)
    lm = CausalLM(ARCHITECTURES[name](), rows=3, prefill_chunk=48)
    cursor(lm, ARCHITECTURES[name](), seed=8, steps=30)
    assert bool(calls) == (name != "gemma2")  # whose attention is its own


def test_slots_read_to_round_their_number_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that asks its cache how long the context is gets the length, not the rounded number of slots."""
    monkeypatch.setattr(forward, "LONG", 10)
    lm, lengths = CausalLM(llama()), []
    original = RaggedKV.update

    def noted(self: RaggedKV, key: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        keys, values = original(self, key, *rest, **options)
        lengths.append((self.get_seq_length(), key.shape[2], keys.shape[2], self.get_mask_sizes(1)[0]))
        return keys, values

    monkeypatch.setattr(RaggedKV, "update", noted)
    lm.next_logits([list(range(70))], [1])
    lm.next_logits([list(range(72))], [1])
    assert [lengths[0], lengths[-1]] == [(0, 70, 128, 128), (70, 2, 128, 128)]


def test_a_saved_model_loads_and_scores_the_same(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    lm = CausalLM.from_pretrained(tmp_path, device="cpu", rows=2)
    assert (lm.dtype, lm.model.training, len(lm.kv.rows)) == (torch.float32, False, 2)
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())
    ask(lm, llama(), [[1, 2, 3, 4]], [4])


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_bfloat16_agrees_loosely(tmp_path: Path, dtype: str | torch.dtype) -> None:
    model = llama(initializer_range=0.1)
    model.save_pretrained(tmp_path)
    lm = CausalLM.from_pretrained(str(tmp_path), device="cpu", dtype=dtype)
    assert lm.dtype == torch.bfloat16
    context = list(range(50))
    lm.next_logits([context[:40]], [1])
    found = lm.next_logits([context], [5]).values[0]
    assert found.dtype == torch.float32
    assert_scores(found, uncached(model, context)[-5:], tolerance=0.05)


def test_pickled_weights_are_read_only_when_asked_for(tmp_path: Path) -> None:
    model = llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"only pickled weights \(pytorch_model.bin\).*allow_pickle=True"):
        CausalLM.from_pretrained(tmp_path, device="cpu")
    ask(CausalLM.from_pretrained(tmp_path, device="cpu", allow_pickle=True), model, [[1, 2]], [2])


def test_missing_weights_are_an_error_not_random_numbers(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    config = transformers.LlamaConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"weights are missing .*layers\.2"):
        CausalLM.from_pretrained(tmp_path, device="cpu")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="/no/such/model: no such directory"):
        CausalLM.from_pretrained("/no/such/model")
    with pytest.raises(ModelLoadError, match=r"expected config\.json in it, found none"):
        CausalLM.from_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"expected the GGUF file model\.gguf"):
        CausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    with pytest.raises(ModelLoadError, match="nobody/nothing: expected a causal language model"):
        CausalLM.from_pretrained("nobody/nothing")
    with pytest.raises(ModelLoadError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        CausalLM.from_pretrained(tmp_path, dtype="int8")


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    llama().save_pretrained(tmp_path)
    capfd.readouterr()
    CausalLM.from_pretrained(tmp_path, device="cpu")
    assert capfd.readouterr() == ("", "")
