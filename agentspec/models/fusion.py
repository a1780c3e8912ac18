"""A decoder's modules in fewer operators: what reads the same input is one product, and a norm is one call.

A pass over few tokens takes as long as reading the weights, and then as long as the calls around them: some 40 a layer
in transformers' own definitions, half of them here. Sums differ in their last bits.

A module is replaced only where its own code names nothing but what is computed here (so that a clip, a multiplier or a
scale by position keeps it as it is), and where it gives the same on what a short forward showed it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentspec.models.attention import EAGER, SDPA, current_attention, grouped_sdpa, preferred_attention, set_attention
from agentspec.models.config_fields import longest_context
from agentspec.models.graphs import ROUNDING
from agentspec.models.loading import CACHE_KEYWORDS

_SAMPLE = 5  # tokens of a forward that is compared
_NO_MEMORY = (MemoryError, torch.OutOfMemoryError)

Product = Callable[[Tensor], Tensor]
"""A linear layer: ``[..., in_features]`` to ``[..., out_features]``."""


class Fused(nn.Module):
    """What stands in for a module of transformers."""

    parts: ClassVar[frozenset[str]] = frozenset()
    """The submodules of what it stands in for."""
    optional_parts: ClassVar[frozenset[str]] = frozenset()
    """Submodules that may be there or not."""
    names: ClassVar[frozenset[str]] = frozenset()
    """What its code may name beside them."""

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Whether ``module`` is built and written like what this computes, and nothing was added to it."""
        children = {name for name, child in module.named_children() if child is not None}
        if children - cls.optional_parts != cls.parts or not all(map(is_untouched, module.modules())):
            return False
        forward: Any = getattr(type(module), "forward", None)
        code = getattr(inspect.unwrap(forward), "__code__", None)
        return code is not None and (cls.parts | cls.optional_parts | cls.names).issuperset(named(code))


def is_untouched(module: nn.Module) -> bool:
    """Return whether ``module`` has neither hooks nor a forward of its own."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def named(code: CodeType) -> set[str]:
    """All that ``code`` names, in functions within it as well."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names, *code.co_freevars} - {"__class__"} | {name for each in inner for name in named(each)}


class FusedNorm(Fused):
    """A root mean square norm in one operator."""

    names = frozenset(
        {"weight", "variance_epsilon", "eps", "_norm", "pow", "mean", "rsqrt"}
        | {"torch", "float32", "float", "dtype", "to", "type_as"}
    )

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    @classmethod
    def of(cls, module: Any) -> FusedNorm:
        """Read the norm ``module``. Gemma's, whose weights are added to 1, would lose digits in half precision."""
        offset = (module(torch.ones_like(module.weight)) - module.weight).mean().round()
        if offset and module.weight.dtype != torch.float32:
            raise ValueError(f"weights around 0 lose digits as weights around 1 in {module.weight.dtype}")
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return cls(module.weight + offset if offset else module.weight, eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., dim]`` to ``[..., dim]``."""
        return torch.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class FusedMLP(Fused):
    """A gated feed-forward block with one product for the gate and what it gates."""

    parts = frozenset(("gate_proj", "up_proj", "down_proj", "act_fn"))

    def __init__(self, gate_up_proj: nn.Linear, down_proj: nn.Linear, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn

    @classmethod
    def of(cls, module: Any) -> FusedMLP:
        """Read the block ``module``."""
        return cls(joined(module.gate_proj, module.up_proj), module.down_proj, module.act_fn)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., dim]`` to ``[..., dim]``."""
        return feed_forward(hidden_states, self.gate_up_proj, self.act_fn, self.down_proj)


def feed_forward(block: Tensor, gate_up: Product, activate: Callable[[Tensor], Tensor], down: Product) -> Tensor:
    """Compute a gated feed-forward block: ``[..., dim]`` to ``[..., dim]``."""
    gate, up = gate_up(block).chunk(2, dim=-1)
    return down(activate(gate) * up)


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the heads of attention. ``norm_weight`` is None for queries and keys without norms."""

    query_heads: int
    kv_heads: int
    dim: int
    scaling: float
    layer: int
    is_causal: bool
    norm_weight: Tensor | None  # [query_heads + kv_heads, 1, dim]
    norm_eps: float
    attention: Callable[..., tuple[Tensor, None]] = grouped_sdpa


class FusedAttention(Fused):
    """Attention with one product for queries, keys and values, whose queries and keys are rotated at once."""

    parts = frozenset(("q_proj", "k_proj", "v_proj", "o_proj"))
    optional_parts = frozenset(("q_norm", "k_norm"))
    names = frozenset(
        {"shape", "view", "transpose", "reshape", "contiguous", "head_dim", "apply_rotary_pos_emb"}
        | {"update", "layer_idx", "scaling", "sliding_window", "training", "attention_dropout"}
        | {"config", "getattr", "_attn_implementation", "ALL_ATTENTION_FUNCTIONS", "get_interface"}
        | {"eager_attention_forward"}
    )

    def __init__(self, qkv_proj: nn.Linear, o_proj: nn.Linear, heads: Heads) -> None:
        super().__init__()
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.norm_weight = None if heads.norm_weight is None else nn.Parameter(heads.norm_weight, requires_grad=False)
        self.heads = replace(heads, norm_weight=self.norm_weight)

    @classmethod
    def of(cls, module: Any) -> FusedAttention:
        """Read the attention ``module``."""
        query_heads, kv_heads = (layer.out_features // module.head_dim for layer in (module.q_proj, module.k_proj))
        weight, eps = None, 0.0
        if hasattr(module, "q_norm"):
            norms = module.q_norm, module.k_norm
            if not all(isinstance(norm, FusedNorm) for norm in norms):
                raise TypeError("expected fused norms of queries and keys")
            if norms[0].eps != norms[1].eps:
                raise ValueError("expected one eps for the norms of queries and keys")
            weight = torch.cat(
                [norm.weight.expand(n, -1) for norm, n in zip(norms, (query_heads, kv_heads), strict=True)]
            )
            weight, eps = weight[:, None], norms[0].eps
        is_causal = getattr(module, "is_causal", True)
        attention = SDPA.get(module.config._attn_implementation, grouped_sdpa)
        heads = Heads(
            query_heads,
            kv_heads,
            module.head_dim,
            module.scaling,
            module.layer_idx,
            is_causal,
            weight,
            eps,
            attention,
        )
        return cls(joined(module.q_proj, module.k_proj, module.v_proj), module.o_proj, heads)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """``[B, F, dim]``, and no weights. Of ``options`` the cache alone counts."""
        cosines, sines = (part[:, None] for part in position_embeddings)
        attended = attend(
            hidden_states, self.qkv_proj, self.o_proj, self.heads, cosines, sines, attention_mask, cache_of(options)
        )
        return attended, None


def attend(
    hidden_states: Tensor,  # [B, F, dim]
    qkv: Product,
    out: Product,
    heads: Heads,
    cosines: Tensor,  # [B, 1, F, heads.dim]
    sines: Tensor,
    mask: Tensor | None,  # [B, 1, F, live]
    cache: Any,
) -> Tensor:
    """Attention over ``cache`` (None: over the block alone) with rotary positions: ``[B, F, dim]``."""
    batch, width, _ = hidden_states.shape
    rotating = heads.query_heads + heads.kv_heads
    states = qkv(hidden_states).view(batch, width, -1, heads.dim).transpose(1, 2)
    rotated, value = states[:, :rotating], states[:, rotating:]
    if heads.norm_weight is not None:
        rotated = torch.rms_norm(rotated, (heads.dim,), None, heads.norm_eps) * heads.norm_weight
    left, right = rotated.chunk(2, dim=-1)
    rotated = torch.addcmul(rotated * cosines, torch.cat((-right, left), dim=-1), sines)
    query, key = rotated[:, : heads.query_heads], rotated[:, heads.query_heads :]
    if cache is not None:
        key, value = cache.update(key, value, heads.layer)
    mixed, _ = heads.attention(heads, query, key, value, mask, scaling=heads.scaling)
    return out(mixed.reshape(batch, width, -1))


_Kind = type[FusedNorm] | type[FusedMLP] | type[FusedAttention]
"""What stands in for one module; ``of`` makes it, and raises where that cannot be done."""


def cache_of(options: dict[str, Any]) -> Any:
    """Return the cache among the keywords of a forward; None without one."""
    return next((options[keyword] for keyword in CACHE_KEYWORDS if options.get(keyword) is not None), None)


def joined(*linears: nn.Linear) -> nn.Linear:
    """One layer whose output is those of ``linears``, side by side. Raises ``TypeError`` for layers of other kinds."""
    if any(type(linear) is not nn.Linear for linear in linears):
        raise TypeError(f"expected plain linear layers, got {', '.join(type(linear).__name__ for linear in linears)}")
    has_bias = any(linear.bias is not None for linear in linears)
    outputs = sum(linear.out_features for linear in linears)
    one = nn.Linear(linears[0].in_features, outputs, bias=has_bias, device="meta")
    one.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False)
    if has_bias:
        biases: list[Tensor] = [
            one.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in linears
        ]
        one.bias = nn.Parameter(torch.cat(biases).detach(), requires_grad=False)
    return one


def fused_modules(model: nn.Module) -> int:
    """How many modules are fused."""
    return sum(isinstance(module, Fused) for module in model.modules())


@torch.no_grad()
def fuse_modules(model: PreTrainedModel) -> int:
    """Replace what can be replaced in ``model``, and put it into evaluation mode; how many modules were replaced.

    Whatever is written or computed otherwise stays as it is. Unshared weights are freed one by one.
    """
    kinds: list[_Kind] = [FusedNorm, FusedMLP]
    if preferred_attention(model) in SDPA:
        kinds.append(FusedAttention)  # last: norms of queries and keys are parts of it
    fitting = [(kind, name) for kind in kinds for name, module in model.named_modules() if kind.fits(module)]
    before = current_attention(model)
    set_attention(model.eval(), EAGER)  # the plain definition
    shown = record_calls(model, [name for _, name in fitting])
    set_attention(model, before or EAGER)
    count = 0
    for kind, name in fitting:
        fused = _fused(kind, model.get_submodule(name), shown.pop(name))
        if fused is not None:
            model.set_submodule(name, fused)
            count += 1
    return count


class Call(NamedTuple):
    """What a module was called with, and what it gave."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    result: Any

    def is_answered_by(self, module: Callable[..., Any]) -> bool:
        """Whether ``module`` gives the same, but for rounding; one that fails does not."""
        expected = self.result
        try:
            found = module(*self.arguments, **self.options)
            if isinstance(expected, tuple):
                found, expected = found[0], expected[0]
            tolerance = ROUNDING.get(expected.dtype, 1e-4) * expected.abs().max()
            is_alike = found.shape == expected.shape and found.dtype == expected.dtype
            return bool(is_alike and (found - expected).abs().max() <= tolerance)
        except _NO_MEMORY:
            raise
        except Exception:
            return False


def record_calls(model: PreTrainedModel, names: Iterable[str]) -> dict[str, list[Call]]:
    """Record the calls of submodules in two forwards: at the first and at the last positions that ``model`` reaches.

    None of a model whose forward fails.
    """
    calls: dict[str, list[Call]] = {name: [] for name in names}

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        calls[name].append(Call(arguments, options, result))

    hooks = [model.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True) for name in calls]
    rng = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    length = min(_SAMPLE, longest_context(model))
    ids = torch.randint(embeddings.weight.shape[0], (1, length), generator=rng).to(model.device)
    try:
        for start in (0, longest_context(model) - length):
            positions = torch.arange(start, start + length, device=model.device)
            model(input_ids=ids, position_ids=positions[None], use_cache=False)
    except _NO_MEMORY:
        raise
    except Exception:  # whoever loads the model finds that out, and says so
        calls = {name: [] for name in calls}
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _fused(kind: _Kind, module: nn.Module, calls: list[Call]) -> Fused | None:
    """Return ``module`` in its fused form; None where that gives anything else, or cannot be made."""
    try:
        fused = kind.of(module).eval()
    except _NO_MEMORY:
        raise
    except Exception:  # built otherwise than it looks: it stays as it is
        return None
    return fused if calls and all(call.is_answered_by(fused) for call in calls) else None
