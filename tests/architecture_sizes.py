"""Sizes of tiny models by architecture, and the variants of families that the sweep tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "n_inner": 96,
    "ffn_dim": 96,
    "sliding_window": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "word_embed_proj_dim": 64,
    "attention_chunk_size": 24,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "is_decoder": True,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_attention_heads": 2,
    "encoder_attention_heads": 2,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
}
"""Fields by the names that most families share; each gets those that it declares."""

ABSENT = object()
"""The value of a field that a family is not given."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_LATENT = {"num_key_value_heads": 2, "head_dim": 16}
"""Of families whose K and V are made of a latent vector: every query head has its own."""

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"),
        _LATENT,
    ),
    **dict.fromkeys(("minicpm3", "sarvam_mla", "youtu", "dots3_note", "dots3_note_text"), _LATENT),
    "codegen": {"rotary_dim": 16},
    "gptj": {"rotary_dim": 16},
    "cohere_compass_text": {"rope_parameters": {_FULL: _PLAIN_ROPE, _SLIDING: _PLAIN_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10_000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "diffllama": {"num_key_value_heads": 2},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": ABSENT},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 160, "hidden_size_per_layer_input": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 160},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling2_loop_text": {"unpadded_vocab_size": 160},
    "inkling2_text": {"unpadded_vocab_size": 160},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "moshi": {"audio_vocab_size": 160},
    "prophetnet": {"num_hidden_layers": ABSENT, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [32, 32], "attn_layers": ["local", "local"]},
    "xlnet": {"max_position_embeddings": ABSENT, "d_head": 32},
    "xlstm": {"v_head_dim": ABSENT},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some families need besides, or instead."""


@dataclass(frozen=True)
class Variant:
    """An architecture with other fields, another type of weights, or other options of loading."""

    architecture: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


_LONG = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 512}
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "longrope": _LONG,
}


def _rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **_ROPES[kind]}}


_FIELDS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *map(_rope, _ROPES),
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 2},
        {"num_attention_heads": 4, "num_key_value_heads": 1},
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
        {"head_dim": 64},
        {"head_dim": 16},
        {"head_dim": 20},
        {"vocab_size": 161},
        {"hidden_size": 72, "intermediate_size": 100, "head_dim": 36},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 5},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "relu"},
        {"rms_norm_eps": 1e-2},
        {"sliding_window": 24},
        {"sliding_window": 24, "layer_types": [_SLIDING, _FULL]},
    ],
    "qwen2": [
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "max_window_layers": 1},
        _rope("yarn"),
        {"tie_word_embeddings": True},
    ],
    "qwen3": [
        {"use_sliding_window": True, "max_window_layers": 1},
        {"attention_bias": True},
        _rope("yarn"),
        {"head_dim": 64},
    ],
    "qwen3_moe": [
        {"norm_topk_prob": True},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"num_experts_per_tok": 1},
    ],
    "mistral": [{"sliding_window": None}, {"sliding_window": 1}, {"sliding_window": 70}, {"head_dim": 64}],
    "mixtral": [{"sliding_window": None}, {"num_experts_per_tok": 1}],
    "ministral": [{"layer_types": [_FULL, _SLIDING]}],
    "gemma": [{"tie_word_embeddings": True}, {"hidden_act": "gelu"}],
    "gemma2": [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        {"query_pre_attn_scalar": 64},
        {"layer_types": [_FULL, _FULL]},
        {"layer_types": [_SLIDING, _SLIDING]},
    ],
    "gemma3_text": [
        {"layer_types": [_FULL, _SLIDING]},
        {"use_bidirectional_attention": False},
        {"final_logit_softcapping": 3.0},
    ],
    "gemma3n_text": [{"num_kv_shared_layers": 1, "num_hidden_layers": 4, "layer_types": [_SLIDING, _FULL] * 2}],
    "phi": [{"partial_rotary_factor": 0.25}, {"qk_layernorm": True}, {"num_key_value_heads": 2}],
    "phi3": [{"sliding_window": None}, {**_rope("longrope"), "original_max_position_embeddings": 512}],
    "phimoe": [{"attention_bias": True}, {"lm_head_bias": True}],
    "starcoder2": [{"sliding_window": None}, {"use_bias": False}],
    "stablelm": [
        {"use_parallel_residual": True},
        {"qk_layernorm": True},
        {"use_qkv_bias": True},
        {"partial_rotary_factor": 1.0},
    ],
    "gpt2": [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"reorder_and_upcast_attn": True},
        {"activation_function": "relu"},
        {"tie_word_embeddings": True},
    ],
    "gpt_bigcode": [{"multi_query": False}, {"scale_attn_weights": False}],
    "gpt_neox": [{"use_parallel_residual": False}, {"rotary_pct": 1.0}, {"attention_bias": False}],
    "gptj": [{"rotary_dim": 32}],
    "falcon": [
        {"parallel_attn": False},
        {"multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 1},
        {"alibi": True},
        {"bias": True},
    ],
    "opt": [
        {"do_layer_norm_before": False},
        {"word_embed_proj_dim": 32},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
    ],
    "cohere": [{"use_qk_norm": True}, {"logit_scale": 0.5}, {"attention_bias": True}],
    "cohere2": [{"layer_types": [_FULL, _SLIDING]}, {"layer_types": [_FULL, _FULL]}],
    "olmo": [{"clip_qkv": 0.5}, {"tie_word_embeddings": True}],
    "olmo2": [{"attention_bias": True}],
    "olmoe": [{"clip_qkv": 0.5}, {"norm_topk_prob": True}],
    "granite": [
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        {"attention_bias": True, "mlp_bias": True},
    ],
    "glm": [{"partial_rotary_factor": 1.0}, {"attention_bias": False}],
    "glm4_moe": [{"use_qk_norm": True}, {"first_k_dense_replace": 0}],
    "deepseek_v2": [{"q_lora_rank": None}, {"first_k_dense_replace": 0}, {"topk_method": "group_limited_greedy"}],
    "deepseek_v3": [{"q_lora_rank": None}, {"rope_interleave": False}, {"n_group": 2, "topk_group": 1}],
    "gpt_oss": [{"layer_types": [_FULL, _FULL]}, {"attention_bias": False}],
    "smollm3": [{"no_rope_layers": [0, 1]}, {"no_rope_layers": [0, 0]}],
    "exaone4": [{"layer_types": [_FULL, _SLIDING]}],
    "nemotron": [{"partial_rotary_factor": 1.0}, {"mlp_bias": True}],
    "bert": [{"is_decoder": False}],
    "roberta": [{"is_decoder": False}],
    "dory": [{"n_recurrent_loops": 1}],
}
_OPTIONS: list[dict[str, Any]] = [
    {"fuse": False},
    {"pack": False},
    {"native_kernels": False},
    {"fuse": False, "pack": False, "native_kernels": False},
    {"prefill_chunk": 7},
    {"rows": 1},
]
_DENSE = ("llama", "qwen3", "mistral", "gemma2", "gpt2")  # rounding sends tokens to other experts
_KINDS = (*_DENSE, "mixtral")


def _named(architecture: str, changes: Mapping[str, Any]) -> str:
    return f"{architecture} {', '.join(f'{name}={_word(value)}' for name, value in changes.items())}"


def _word(value: object) -> object:
    return value.get("rope_type", value) if isinstance(value, dict) else value


VARIANTS: dict[str, Variant] = {
    **{_named(kind, fields): Variant(kind, fields) for kind, known in _FIELDS.items() for fields in known},
    **{_named(kind, options): Variant(kind, options=options) for kind in _KINDS for options in _OPTIONS},
    **{_named(kind, {"dtype": "bfloat16"}): Variant(kind, dtype=torch.bfloat16) for kind in _DENSE},
}
"""Variants by a name that says what is another."""
