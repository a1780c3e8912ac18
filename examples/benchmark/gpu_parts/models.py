"""A large target that computes nearly what a small draft does, at full cost: no weights have to be downloaded.

A small random Llama is widened with zero channels and zero heads and deepened with layers that add nothing. Noise on
every weight then moves the large model's distribution away from the small one's, to the acceptance rate that is wanted.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from agentspec import CausalLM
from agentspec.models.fusion import fuse_modules
from agentspec.models.stack import stack_layers

SPREAD = 3.0
"""Standard deviation of the logits of the random model: a distribution between a flat one and a sure one."""

_ROOM = 2048  # longest context, in tokens
_WRITES = ("o_proj", "down_proj")  # what adds to the residual stream


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and the eps of its norms."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    eps: float = 1e-5

    def config(self, vocabulary: int) -> LlamaConfig:
        """A config without end tokens, so that every text has the length that was asked for."""
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=_ROOM,
            rms_norm_eps=self.eps,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class Scale:
    """A draft, the target it is widened to, and the ids that both know."""

    draft: Shape
    target: Shape
    vocabulary: int


TOY = Scale(Shape(32, 64, 2, 1, 16, 1), Shape(64, 160, 4, 2, 16, 3), vocabulary=160)
CHECKED = Scale(Shape(512, 1024, 4, 2, 128, 4), Shape(1024, 2560, 8, 4, 128, 16), vocabulary=4096)
"""For the checks in float32: large enough for the kernels of real models, small enough to be quick."""
EIGHT_BILLION = Scale(Shape(1024, 3584, 8, 2, 128, 4), Shape(4096, 14336, 32, 8, 128, 32), vocabulary=128_256)
"""The sizes of Llama 3.1 8B, and a draft of 0.3 billion weights."""


def random_model(shape: Shape, vocabulary: int, device: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A random Llama whose every layer matters and whose logits have the spread ``SPREAD``."""
    model = _empty(shape.config(vocabulary), device, dtype)
    rng = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=rng)  # norms of which none is the identity
            else:
                parameter.normal_(0, _deviation(name, parameter.shape[1]), generator=rng)
    return model


class Widened:
    """``small`` in a model of another shape: ``model``, with the noise that was set last.

    Args:
        small: the model whose function is kept.
        shape: at least as large in everything; the same ``head_dim``, and as many query heads per K/V head.

    Raises:
        ValueError: for a shape that ``small`` does not fit into.
    """

    def __init__(self, small: PreTrainedModel, shape: Shape) -> None:
        config: Any = small.config
        sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
        wanted = (shape.hidden, shape.intermediate, shape.heads, shape.kv_heads)
        if any(old > new for old, new in zip((*sizes, config.num_hidden_layers), (*wanted, shape.layers), strict=True)):
            raise ValueError(f"The wide model must be no smaller in anything than {config}, got {shape}.")
        if config.head_dim != shape.head_dim or sizes[2] * shape.kv_heads != sizes[3] * shape.heads:
            raise ValueError(
                f"Expected heads of {config.head_dim} channels and {sizes[2] // sizes[3]} query heads per K/V head, "
                f"or positions and groups would mean something else; got {shape}."
            )
        self._small = dict(small.named_parameters())
        # Zero channels shrink the mean of squares by this share; eps and the norms' weights make up for it.
        self._share = config.hidden_size / shape.hidden
        self._channels = config.hidden_size
        wide = replace(shape, eps=config.rms_norm_eps * self._share).config(config.vocab_size)
        self.model = _empty(wide, str(small.device), small.dtype)
        self.set_noise(0.0)

    @torch.no_grad()
    def set_noise(self, noise: float) -> None:
        """Write all weights anew: with noise 0 the logits are those of the small model, up to rounding.

        ``noise`` is the deviation of what is added to every matrix, in units of that of a random one. What writes in
        the added layers is such noise alone.
        """
        rng = torch.Generator(self.model.device).manual_seed(1)
        for name, parameter in self.model.named_parameters():
            known = self._small.get(name)
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                if known is not None:
                    parameter[: len(known)] = known
                parameter.mul_(math.sqrt(self._share))
                continue
            is_added_reader = known is None and not any(write in name for write in _WRITES)
            strength = 1.0 if is_added_reader else noise
            # The signal stands in the small model's channels only.
            parameter.normal_(0, strength * _deviation(name, min(parameter.shape[1], self._channels)), generator=rng)
            if known is not None:
                parameter[: known.shape[0], : known.shape[1]] += known


def fused(model: PreTrainedModel) -> CausalLM:
    """A copy of ``model`` as ``CausalLM.from_pretrained`` makes it; the model itself stays for transformers."""
    ours = copy.deepcopy(model)
    fuse_modules(ours)
    stack_layers(ours)
    return CausalLM(ours)


@torch.inference_mode()
def overlap(target: PreTrainedModel, draft: PreTrainedModel, contexts: Tensor) -> float:
    """The mean over all positions of ``contexts`` ``[B, T]`` of ``sum min(p, q)``: alpha at temperature 1."""
    p, q = (model(input_ids=contexts, use_cache=False).logits.float().softmax(-1) for model in (target, draft))
    return float(torch.minimum(p, q).sum(-1).mean())


def search_noise(wide: Widened, draft: PreTrainedModel, alpha: float, steps: int = 10) -> tuple[float, float]:
    """Set the noise at which ``overlap`` is nearest to ``alpha``, by bisection; it and that overlap.

    Raises:
        ValueError: for an alpha that is not between 0 and 1.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is an acceptance rate between 0 and 1, got {alpha}.")
    rng = torch.Generator().manual_seed(3)
    contexts = torch.randint(wide.model.config.vocab_size, (4, 64), generator=rng).to(wide.model.device)
    low, high = math.log(1e-4), math.log(1.0)
    tried: dict[float, float] = {}
    for _ in range(steps):
        noise = math.exp((low + high) / 2)
        wide.set_noise(noise)
        tried[noise] = overlap(wide.model, draft, contexts)
        low, high = (math.log(noise), high) if tried[noise] > alpha else (low, math.log(noise))
    best = min(tried, key=lambda noise: abs(tried[noise] - alpha))
    wide.set_noise(best)
    return best, tried[best]


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one token has to read: all but the table of embeddings, of which it reads a row."""
    table = model.get_input_embeddings().weight
    return sum(p.numel() * p.element_size() for p in model.parameters() if p is not table)


def _empty(config: LlamaConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A Llama on the device whose weights are still to be written."""
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    return model


def _deviation(name: str, fan_in: int) -> float:
    """That of a random matrix which keeps the scale of what it reads; embeddings read nothing."""
    if "embed_tokens" in name:
        return 1.0
    return (SPREAD if "lm_head" in name else 1.0) / math.sqrt(fan_in)
