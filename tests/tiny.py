"""Tiny random transformers models: real architectures, a few thousand weights, no download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 97
MAX_CONTEXT = 256
WINDOW = 12
"""Sliding window of the tiny models that have one."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT,
    # Larger than the usual 0.02, so that attention matters to the scores.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


def build(architecture: str, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A seeded random model of ``architecture`` ("Llama": ``LlamaConfig``, ``LlamaForCausalLM``), float32."""
    kind = getattr(transformers, f"{architecture}TextConfig", None) or getattr(transformers, f"{architecture}Config")
    config = kind(**sizes)
    head = getattr(transformers, f"{architecture}ForCausalLM", None) or getattr(
        transformers, f"{architecture}LMHeadModel"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return head(config).eval()


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Grouped queries, every layer full attention."""
    return build("Llama", seed, **(SIZES | changes))


def qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Head dimension apart from the hidden size, norms on queries and keys."""
    return build("Qwen3", seed, **(SIZES | {"head_dim": 16} | changes))


def qwen3_mixed(seed: int = 0) -> PreTrainedModel:
    """Full and sliding layers in one model, masks by kind."""
    return qwen3(seed, use_sliding_window=True, sliding_window=WINDOW, **_MIXED)


def mistral(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A sliding window in every layer, without layer types."""
    return build("Mistral", seed, **(SIZES | {"sliding_window": WINDOW} | changes))


def gpt2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Learned positions, one K/V head per query head."""
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_CONTEXT,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return build("GPT2", seed, **(sizes | changes))


def gemma2(seed: int = 0) -> PreTrainedModel:
    """Mixed layers, softcapping in attention and at the end: eager attention."""
    sizes = SIZES | _MIXED | {"head_dim": 16, "sliding_window": WINDOW}
    # By name: transformers 5.17 would take sdpa here, which leaves the softcap out.
    return build("Gemma2", seed, **sizes, attn_implementation="eager")


def gemma3(seed: int = 0) -> PreTrainedModel:
    """Mixed layers with rotary frequencies of their own."""
    return build("Gemma3", seed, **(SIZES | _MIXED | {"head_dim": 16, "sliding_window": WINDOW}))


def phi3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Fused projections."""
    return build("Phi3", seed, **(SIZES | changes))


def olmo2(seed: int = 0) -> PreTrainedModel:
    """Norms behind the blocks."""
    return build("Olmo2", seed, **SIZES)


def granite(seed: int = 0) -> PreTrainedModel:
    """Multipliers on embeddings, attention, residuals and logits."""
    return build("Granite", seed, **SIZES)


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    maker.__name__: maker for maker in (llama, qwen3, qwen3_mixed, mistral, gpt2, gemma2, gemma3, phi3, olmo2, granite)
}
