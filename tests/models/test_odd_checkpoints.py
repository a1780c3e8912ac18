"""Odd checkpoints are served as they are meant, or refused in one line that names file, field, value and remedy."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import MAX_CONTEXT, VOCABULARY, WINDOW, gpt2, llama, mistral, phi3, qwen3
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentspec.errors import ModelLoadError
from agentspec.models import loading
from agentspec.models.attention import FULL, SLIDING
from agentspec.models.causal_lm import CausalLM
from agentspec.models.config_fields import check_layers, check_quantization

MAKERS: dict[str, Callable[..., PreTrainedModel]] = {
    maker.__name__: maker for maker in (llama, mistral, gpt2, qwen3, phi3)
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"


class _Absent:
    """Stands for a field that a file does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
NAN = float("nan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of each kind; ``sharded`` is a llama in several files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, make in MAKERS.items():
        make().save_pretrained(folder / name)
    llama().save_pretrained(folder / "sharded", max_shard_size="20KB")
    llama(tie_word_embeddings=True).save_pretrained(folder / "tied")
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where transformers is reached: what it would build has no end."""

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("transformers was reached")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reached)


def load(folder: Path, **options: Any) -> CausalLM:
    return CausalLM.from_pretrained(folder, device="cpu", rows=2, **options)


def change(path: Path, **fields: Any) -> None:
    """Set fields of a JSON object; ``ABSENT`` removes one."""
    known = json.loads(path.read_text())
    path.write_text(json.dumps({name: v for name, v in {**known, **fields}.items() if v is not ABSENT}))


def change_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def refusal(folder: Path, **options: Any) -> str:
    """The message by which a checkpoint is refused: one line."""
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1500
    return message


def assert_serves(lm: CausalLM, folder: Path) -> None:
    """Scores over a context longer than any window are transformers' own."""
    context = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(3))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model(input_ids=context, use_cache=False).logits[0]
    ids = context[0].tolist()
    lm.next_logits([ids[:17]], [0])
    found = lm.next_logits([ids], [40]).values[0]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


# --- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [CONFIG, GENERATION])
@pytest.mark.parametrize(
    "value", ["</s>", "2", [2, "</s>"], [[2]], True, [True], 2.0, 2.5, {"id": 2}, [2, None], NAN], ids=repr
)
def test_an_end_token_that_is_no_id_is_named(copy: Callable[[str], Path], file: str, value: object) -> None:
    folder = copy("llama")
    change(folder / file, eos_token_id=value)
    assert f"{folder / file}: eos_token_id is {value!r}, expected a token id, a list of" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (2, 5, {2, 5}),
        ([2, 7], ABSENT, {2, 7}),
        (None, [3, 4], {3, 4}),
        ([], 2, {2}),
        (ABSENT, [], {2}),  # the default of the family
        (-1, None, set()),
        ([2, VOCABULARY, 10**9], None, {2}),
    ],
)
def test_end_tokens_are_those_that_the_model_scores(
    copy: Callable[[str], Path],
    config: object,
    generation: object,
    ends: set[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = copy("llama")
    change(folder / CONFIG, eos_token_id=config)
    change(folder / GENERATION, eos_token_id=generation)
    with caplog.at_level(logging.WARNING, "agentspec"):
        assert load(folder).end_token_ids == ends
    strays = isinstance(config, list) and VOCABULARY in config
    assert bool(caplog.records) == strays
    assert not strays or f"eos_token_id names [{VOCABULARY}, 1000000000]" in caplog.text


def test_a_model_without_a_generation_config_has_the_ends_of_its_config(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / GENERATION).unlink()
    assert load(folder).end_token_ids == {2}


@pytest.mark.parametrize("value", ["</s>", [2, "x"], True, 2.0])
def test_a_module_whose_config_was_changed_is_refused_likewise(value: object) -> None:
    model = llama()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = value
    with pytest.raises(ModelLoadError, match=r"generation config of LlamaForCausalLM: eos_token_id is"):
        CausalLM(model)


@pytest.mark.parametrize("value", [-1, 0, 256.0, 1e30, "256", True, NAN, [256], {}], ids=repr)
@pytest.mark.parametrize(("kind", "field"), [("llama", "max_position_embeddings"), ("gpt2", "n_positions")])
def test_a_length_that_is_none_is_named(copy: Callable[[str], Path], kind: str, field: str, value: object) -> None:
    folder = copy(kind)
    change(folder / CONFIG, **{field: value})
    assert f"{folder / CONFIG}: {field} is {value!r}, expected a positive integer" in refusal(folder)


def test_a_length_too_short_to_check_and_a_missing_one_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change(folder / CONFIG, max_position_embeddings=7)
    assert "max_position_embeddings is 7, expected at least 8" in refusal(folder)
    change(folder / CONFIG, max_position_embeddings=8)
    assert load(folder).max_context == 8
    change(folder / CONFIG, max_position_embeddings=None)
    message = refusal(folder)
    assert message.startswith(f"{folder / CONFIG}: Validation error for field 'max_position_embeddings'")
    model = llama()
    fields = vars(model.config)  # which checks nothing
    fields["max_position_embeddings"] = None
    with pytest.raises(ModelLoadError, match="the config names no max_position_embeddings"):
        CausalLM(model)
    fields["max_position_embeddings"] = -4
    with pytest.raises(ModelLoadError, match="max_position_embeddings is -4, expected a positive integer"):
        CausalLM(model)


@pytest.mark.parametrize("value", [10**12, 2**63])
def test_a_length_without_end_is_served(copy: Callable[[str], Path], value: int) -> None:
    folder = copy("llama")
    change(folder / CONFIG, max_position_embeddings=value)
    lm = load(folder)
    assert lm.max_context == value
    assert_serves(lm, folder)


@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -1, None, "97", 97.0, True, [97]], ids=repr)
def test_a_size_that_is_none_is_named(copy: Callable[[str], Path], field: str, value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, **{field: value})
    assert f"{folder / CONFIG}: {field} is {value!r}, expected a positive integer" in refusal(folder)


@pytest.mark.parametrize("value", [96, 98, ABSENT], ids=str)
def test_a_vocabulary_of_another_size_than_the_weights_is_refused_with_both(
    copy: Callable[[str], Path], value: object
) -> None:
    folder = copy("llama")
    change(folder / CONFIG, vocab_size=value)
    size = 32000 if value is ABSENT else value
    assert f"model.embed_tokens.weight [97, 32] for [{size}, 32]" in refusal(folder)


@pytest.mark.parametrize("value", [97, 10**6, "0", 0.0, True, [0]], ids=repr)
def test_padding_that_is_no_id_is_named(copy: Callable[[str], Path], value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, pad_token_id=value)
    assert f"{folder / CONFIG}: pad_token_id is {value!r}, expected" in refusal(folder)


@pytest.mark.parametrize("value", [-1, 0, 96, None, ABSENT], ids=str)
def test_padding_changes_nothing(copy: Callable[[str], Path], value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, pad_token_id=value)
    assert_serves(load(folder), folder)


@pytest.mark.parametrize("value", ["float32", "bfloat16", "torch.float16", "float99", "auto", None, 7], ids=repr)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_dtype_of_a_file_decides_nothing(copy: Callable[[str], Path], field: str, value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, **{"dtype": ABSENT, field: value})
    assert load(folder).dtype == torch.float32


@pytest.mark.parametrize(("kind", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer"), ("sharded", "")])
@pytest.mark.parametrize("value", [201, 10_000_000, 10**30])
def test_more_layers_than_the_weights_name_are_refused_before_the_model_is_built(
    copy: Callable[[str], Path], unbuilt: None, kind: str, field: str, value: int
) -> None:
    folder, name = copy(kind), field or "num_hidden_layers"
    change(folder / CONFIG, **{name: value, "layer_types": ABSENT})
    assert f"{folder / CONFIG}: {name} is {value}, expected at most 200: 100 times the layers" in refusal(folder)
    change(folder / CONFIG, **{name: 2}, text_config={"num_hidden_layers": value})
    assert f"{folder / CONFIG}: num_hidden_layers is {value}, expected at most 200: 100 times the layers" in refusal(
        folder
    )


@pytest.mark.parametrize("name", ["model.layers.99999999.x", "transformer.attentions.0.x", "layers.x"])
def test_layers_have_a_bound_whatever_the_weights_name(copy: Callable[[str], Path], unbuilt: None, name: str) -> None:
    folder = copy("llama")
    save_file({name: torch.zeros(1)}, folder / WEIGHTS)
    change(folder / CONFIG, num_hidden_layers=10_001)
    assert "num_hidden_layers is 10001, expected at most 10000" in refusal(folder)
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    assert "num_hidden_layers is 10001, expected at most 10000" in refusal(folder, allow_pickle=True)


def test_the_layers_of_an_absent_encoder_do_not_count() -> None:
    config = {"model_type": "bart", "num_hidden_layers": 12, "encoder_layers": 12, "decoder_layers": 2}
    check_layers(CONFIG, config, ["model.decoder.layers.1.fc1.weight"])
    with pytest.raises(ModelLoadError, match="decoder_layers is 201, expected at most 200"):
        check_layers(CONFIG, {**config, "decoder_layers": 201}, ["model.decoder.layers.1.fc1.weight"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"quant_method": "nope"}, "quantization_config.quant_method is 'nope', expected one of "),
        ({"quant_method": ["gptq"]}, "quantization_config.quant_method is ['gptq'], expected one of "),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method is 'bitsandbytes', expected one of "),
        ({"bits": 4}, "quantization_config.quant_method is None, expected one of "),
        ("nope", "quantization_config is 'nope', expected an object"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_quantization_that_would_be_left_out_is_named(
    copy: Callable[[str], Path], value: object, expected: str, is_nested: bool
) -> None:
    folder, fields = copy("llama"), {"quantization_config": value}
    change(folder / CONFIG, **({"text_config": fields} if is_nested else fields))
    assert f"{folder / CONFIG}: {expected}" in refusal(folder)


def test_a_quantization_left_out_of_a_model_from_the_hub_is_named(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "check_checkpoint", lambda *_: None)  # as for the name of a repository
    folder = copy("llama")
    change(folder / CONFIG, quantization_config={"quant_method": "nope"})
    assert "quantization_config.quant_method is 'nope', expected one of " in refusal(folder)


@pytest.mark.parametrize("value", [None, {"quant_method": "gptq"}, {"load_in_8bit": True}], ids=str)
def test_a_quantization_that_transformers_knows_is_left_to_it(value: object) -> None:
    check_quantization(CONFIG, value)


# --- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("value", [4096, WINDOW, 5, 1, 0, -1, "12", 12.0, True, None], ids=repr)
def test_a_window_that_the_family_ignores_is_ignored(copy: Callable[[str], Path], kind: str, value: object) -> None:
    folder = copy(kind)
    change(folder / CONFIG, sliding_window=value)
    lm = load(folder)
    assert lm._forward._masks.windows == {FULL: None}
    assert_serves(lm, folder)


@pytest.mark.parametrize(
    "fields", [{"sliding_window": WINDOW, "layer_types": [SLIDING, FULL]}, {"layer_types": [SLIDING] * 2}]
)
def test_kinds_of_layers_that_the_family_ignores_are_ignored(
    copy: Callable[[str], Path], fields: dict[str, Any]
) -> None:
    folder = copy("llama")
    change(folder / CONFIG, **fields)
    assert_serves(load(folder), folder)


@pytest.mark.parametrize("kind", ["mistral", "phi3"])
@pytest.mark.parametrize("value", [WINDOW, 1, 4096])
def test_a_window_that_the_family_has_is_kept(copy: Callable[[str], Path], kind: str, value: int) -> None:
    folder = copy(kind)
    change(folder / CONFIG, sliding_window=value)
    lm = load(folder)
    assert lm._forward._masks.windows == {SLIDING: value}
    assert_serves(lm, folder)


@pytest.mark.parametrize("value", [0, -1, "12", 12.0, True], ids=repr)
@pytest.mark.parametrize("kind", ["mistral", "phi3"])
def test_a_window_that_is_none_is_named(copy: Callable[[str], Path], kind: str, value: object) -> None:
    folder = copy(kind)
    change(folder / CONFIG, sliding_window=value)
    assert f"sliding_window is {value!r}, expected" in refusal(folder)


def test_a_window_that_no_layer_uses_is_not_looked_at(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3")
    change(folder / CONFIG, sliding_window=0, use_sliding_window=False)
    assert_serves(load(folder), folder)


# --- rotary embeddings ----------------------------------------------------------------------------------------------

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("linear", "rope_scaling is 'linear', expected an object with a rope_type, or null"),
        ([1], "rope_scaling is [1], expected an object"),
        ({"type": "weird", "factor": 2.0}, "rope_scaling.type is 'weird', expected one of default, "),
        ({"rope_type": 3}, "rope_scaling.rope_type is 3, expected a name"),
        ({"type": "linear"}, "'factor'"),
        ({"factor": 2.0}, "rope_scaling is {'factor': 2.0}, expected a rope_type beside the factor"),
        ({"type": "linear", "factor": -1.0}, "rope_scaling.factor is -1.0, expected a positive number"),
        ({"type": "linear", "factor": 0}, "rope_scaling.factor is 0, expected a positive number"),
        ({"type": "linear", "factor": NAN}, "rope_scaling.factor is nan, expected a positive number"),
        ({"type": "linear", "factor": "2"}, "rope_scaling.factor is '2', expected a positive number"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": True}, "rope_scaling.beta_fast is True, expected a positive"),
        ({**LONGROPE, "original_max_position_embeddings": -4}, "original_max_position_embeddings is -4, expected"),
        ({**LONGROPE, "original_max_position_embeddings": "64"}, "original_max_position_embeddings is '64', expected"),
        ({**LONGROPE, "short_factor": 2.0}, "rope_scaling.short_factor is 2.0, expected a list of positive numbers"),
        ({**LONGROPE, "long_factor": [1.0, -1.0]}, "rope_scaling.long_factor is [1.0, -1.0], expected a list of"),
    ],
    ids=str,
)
def test_an_odd_rotary_embedding_is_named(copy: Callable[[str], Path], value: object, expected: str) -> None:
    folder = copy("llama")
    change(folder / CONFIG, rope_parameters=ABSENT, rope_scaling=value)
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "default"},
    ],
    ids=str,
)
def test_rotary_embeddings_of_old_and_new_forms_are_served(copy: Callable[[str], Path], value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, rope_parameters=ABSENT, rope_scaling=value)
    assert_serves(load(folder), folder)


def test_an_odd_field_within_a_text_config_is_found(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change(folder / CONFIG, text_config={"model_type": "llama", "max_position_embeddings": -3})
    assert "max_position_embeddings is -3, expected a positive integer" in refusal(folder)


def test_a_long_value_is_cut(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change(folder / CONFIG, eos_token_id="x" * 100_000)
    assert "eos_token_id is 'xxx" in refusal(folder)


# --- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.bias",
        "lm_head.bias",
        "gain",
    ],
)
def test_a_weight_without_a_use_is_named(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights.update({name: torch.zeros(4)}))
    assert f"1 weight ({name}) that config.json leaves without a use" in refusal(folder)


def test_layers_beyond_those_of_the_config_are_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change(folder / CONFIG, num_hidden_layers=1)
    message = refusal(folder)
    assert "9 weights (model.layers.1.input_layernorm.weight, " in message
    change(folder / CONFIG, num_nextn_predict_layers=1)  # which says what these are
    with pytest.warns(RuntimeWarning, match=r"9 weights \(model\.layers\.1\."):
        assert_serves(load(folder), folder)


@pytest.mark.parametrize("name", ["vision_tower.patch.weight", "v_head.summary.weight", "model.mtp.0.norm.weight"])
def test_a_part_that_the_model_does_not_have_is_left_out_with_a_warning(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights.update({name: torch.zeros(4)}))
    with pytest.warns(RuntimeWarning, match=rf"1 weight \({name}\) of the checkpoint belong"):
        lm = load(folder)
    assert_serves(lm, folder)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.position_ids"])
def test_what_a_module_computes_by_itself_may_be_in_the_file(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights.update({name: torch.zeros(4)}))
    assert_serves(load(folder), folder)


@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["equal", "another"])
def test_a_head_beside_tied_embeddings_counts(copy: Callable[[str], Path], shift: float) -> None:
    folder = copy("tied")
    change_weights(
        folder / WEIGHTS,
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + shift}),
    )
    assert_serves(load(folder), folder)


@pytest.mark.parametrize("name", ["model.norm.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_weight_is_named(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights.pop(name))
    assert f"1 weight is missing or of another shape ({name})" in refusal(folder)


def test_a_weight_of_another_shape_is_named_with_both(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}))
    assert "model.norm.weight [31] for [32]" in refusal(folder)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_weights_that_are_no_numbers_are_called_that(copy: Callable[[str], Path], value: float) -> None:
    folder = copy("llama")
    change_weights(folder / WEIGHTS, lambda weights: weights["model.norm.weight"].fill_(value))
    assert "its own logits are not finite" in refusal(folder)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 8, 100, 1000, -5000, -1])
def test_a_file_that_was_cut_is_named(copy: Callable[[str], Path], kept: int) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:kept])
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS}: ")
    assert "cut off" in message
    assert "fetch it again" in message


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<html>" + b"x" * 1000, "found something else"),
        (bytes(range(256)) * 20, "found something else"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a pointer of Git LFS (git lfs pull"),
        ((2).to_bytes(8, "little") + b"[]", "found something else"),
        ((9).to_bytes(8, "little") + b'{"a": 12}', "found something else"),
        ((31).to_bytes(8, "little") + b'{"a": {"data_offsets": ["x",1]}}'[:31], "found something else"),
    ],
)
def test_a_file_that_is_something_else_is_named(copy: Callable[[str], Path], content: bytes, found: str) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).write_bytes(content)
    message = refusal(folder)
    assert message.startswith(f"{folder / WEIGHTS}: expected a safetensors file")
    assert found in message


def replace(path: Path, kind: str) -> None:
    """Put something else than a plain file in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a device or socket"])
@pytest.mark.parametrize("file", [CONFIG, GENERATION, WEIGHTS, INDEX, "model-00001-of-00002.safetensors"])
def test_what_is_no_plain_file_is_never_opened(
    copy: Callable[[str], Path], unbuilt: None, file: str, kind: str
) -> None:
    folder = copy("sharded")
    path = folder / (shard_names(folder)[0] if file.startswith("model-") else file)
    replace(path, kind)
    assert refusal(folder) == f"{path}: expected a plain file, found {kind}"


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and devices")
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a device or socket"])
@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-1.bin"])
def test_pickled_weights_are_plain_files_too(copy: Callable[[str], Path], unbuilt: None, file: str, kind: str) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).unlink()
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    replace(folder / file, kind)
    assert refusal(folder, allow_pickle=True) == f"{folder / file}: expected a plain file, found {kind}"


def test_a_file_with_more_behind_it_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    with (folder / WEIGHTS).open("ab") as stream:
        stream.write(b"x")
    assert "cut off or damaged" in refusal(folder)


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("model-*.safetensors"))


def test_shards_are_checked_one_by_one(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    assert_serves(load(folder), folder)
    shard = folder / shard_names(folder)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-7])
    assert refusal(folder).startswith(f"{shard}: expected {len(whole)} bytes")
    shard.unlink()
    assert f"{folder / INDEX}: it names 1 file ({shard.name}) not found beside it" in refusal(folder)
    shard.symlink_to("nowhere")
    assert f"({shard.name}) not found beside it" in refusal(folder)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda index: index.pop("weight_map"), "expected a weight_map"),
        (lambda index: index.update(weight_map=[]), "expected a weight_map"),
        (lambda index: index.update(weight_map={}), "expected a weight_map"),
        (lambda index: index["weight_map"].update({"model.norm.weight": 5}), "expected a weight_map"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "../x"}), "1 file (../x) outside of its own"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "/x"}), "1 file (/x) outside of its own"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "x"}), "1 file (x) not found beside it"),
        (
            lambda index: index["weight_map"].update({"a.weight": index["weight_map"]["model.norm.weight"]}),
            "(a.weight)",
        ),
    ],
)
def test_a_wrong_index_is_named(copy: Callable[[str], Path], edit: Callable[[Any], Any], expected: str) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    edit(index)
    (folder / INDEX).write_text(json.dumps(index))
    message = refusal(folder)
    assert message.startswith(f"{folder / INDEX}: ")
    assert expected in message


def test_an_index_of_pickled_files_is_checked_too(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    assert "1 file (pytorch_model-1.bin) not found beside it" in refusal(folder, allow_pickle=True)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", '"x"', "\x00" * 9, "[" * 100_000], ids=range(8))
@pytest.mark.parametrize("file", [CONFIG, GENERATION, INDEX])
def test_a_file_that_is_no_json_object_is_named(copy: Callable[[str], Path], file: str, content: str) -> None:
    folder = copy("sharded")
    (folder / file).write_text(content)
    assert refusal(folder).startswith(f"{folder / file}: expected a JSON object")


def test_a_file_in_another_encoding_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / CONFIG).write_bytes(b"\xff\xfe{}")
    assert f"{folder / CONFIG}: expected a JSON object; it cannot be read: 'utf-8' codec" in refusal(folder)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_a_file_that_may_not_be_read_is_named(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    (folder / WEIGHTS).chmod(0)
    assert f"{folder / WEIGHTS}: expected a safetensors file; it cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "weird"),
        ("model_type", ABSENT),
        ("hidden_act", "weird"),
        ("layer_types", 5),
        ("layer_types", [FULL]),
        ("layer_types", ["weird", "weird"]),
        ("num_attention_heads", 0),
        ("hidden_size", 33),
        ("rms_norm_eps", "x"),
    ],
)
def test_what_transformers_refuses_is_told_in_one_line(copy: Callable[[str], Path], field: str, value: object) -> None:
    folder = copy("llama")
    change(folder / CONFIG, **{field: value})
    assert str(folder) in refusal(folder)


def test_escapes_in_what_is_told_are_no_escapes_any_more(copy: Callable[[str], Path]) -> None:
    folder = copy("llama")
    change(folder / CONFIG, model_type="\x1b[31mred", eos_token_id=2)
    assert "\x1b" not in refusal(folder)


def test_lengths_of_a_saved_model_are_kept(saved: Path) -> None:
    assert load(saved / "llama").max_context == MAX_CONTEXT
