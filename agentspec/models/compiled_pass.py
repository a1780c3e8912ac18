"""A pass that our own kernels compute from ids to logits, without Python or torch in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentspec.models.backends.native import kernels
from agentspec.models.compiled import Layer
from agentspec.models.config_fields import longest_context
from agentspec.models.direct import Direct
from agentspec.models.fusion import is_untouched
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.logits import RowLogits
from agentspec.models.packing import PanelLinear
from agentspec.models.panels import FORMATS
from agentspec.runtime.tokens import NO_TOKEN

if TYPE_CHECKING:
    from agentspec.models.feed import Feed

_STEP = 1024  # slots whose angles are computed at once: always the same, and so the same numbers
_INTEGERS = ctypes.POINTER(ctypes.c_int64)


class _Around(ctypes.Structure):
    """As in layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embeddings", "cosines", "sines", "norm", "bias", "head")),
        *((name, ctypes.c_int64) for name in ("format", "outputs", "known")),
        ("eps", ctypes.c_double),
    )


class CompiledPass:
    """The whole of ``model``, whose layers are a compiled stack with nothing around it but what ``Direct`` computes."""

    def __init__(self, model: Any, direct: Direct) -> None:
        inner, head = model.model, model.lm_head
        self._direct = direct
        self._links = list(_links(model))
        self._stack, self._layers = inner.layers[0], inner.layers[0].compiled
        self._dim: int = inner.embed_tokens.embedding_dim
        self._angles = _Angles(inner.rotary_emb, longest_context(model))
        self._around_layers = inner.embed_tokens, inner.norm, head
        # Which the addresses need, also where a parameter is given other numbers.
        self._held = [None if weight is None else weight.detach() for weight in _weights(*self._around_layers)]
        self._places = list(map(_place, self._held))
        embeddings, norm, packed, bias = (place and place[0] for place in self._places)
        self._around = _Around(
            embeddings=embeddings,
            norm=norm,
            head=packed,
            bias=bias,
            format=list(FORMATS).index(head.layout),
            outputs=head.out_features,
            eps=inner.norm.eps,
        )
        self._compute = kernels().function(
            "pass",
            *(ctypes.POINTER(_Around), ctypes.POINTER(Layer), ctypes.c_int64, _INTEGERS, ctypes.c_int64),
            *(ctypes.c_int64, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS),
            *(ctypes.c_void_p, _INTEGERS, ctypes.c_float, ctypes.c_int),
        )

    @classmethod
    def of(cls, model: Any, direct: Direct | None) -> CompiledPass | None:
        """Return the pass of ``model``; None where part of it is nothing that the kernels compute."""
        if direct is None or not isinstance(model.lm_head, PanelLinear):
            return None
        inner, embeddings, head = model.model, model.model.embed_tokens, model.lm_head
        weights = [w for w in _weights(embeddings, inner.norm, head) if w is not None and w is not head.packed]
        fits = (
            getattr(inner.layers[0], "compiled", None) is not None
            and type(embeddings) is nn.Embedding
            and embeddings.max_norm is None
            and all(weight.is_contiguous() and weight.dtype == torch.float32 and weight.is_cpu for weight in weights)
            and _Angles(inner.rotary_emb, longest_context(model)).are_fixed()
        )
        return cls(model, direct) if fits else None

    def __call__(
        self, feeds: Sequence[Feed], cache: RaggedKV, window: int | None, vocab_size: int
    ) -> list[RowLogits] | None:
        """Return the logits after the last ``feed.last`` tokens of each feed; write their K and V.

        None where the cache does not know the layers yet, or a part has hooks.

        Args:
            feeds: of different rows.
            cache: with room for them.
            window: slots that a position sees; None for all.
            vocab_size: ids that are scored.
        """
        layers = self._layers.over(cache)
        if layers is None or not self._direct.is_whole or not all(is_untouched(part) for *_, part in self._links):
            return None
        _check_within(feeds, cache, self._around_layers[0].num_embeddings)
        counts, asked = [len(feed.tokens) for feed in feeds], [feed.last for feed in feeds]
        live = max(feed.start + count for feed, count in zip(feeds, counts, strict=True))
        self._around.cosines, self._around.sines = self._angles.reaching(live)
        slots = [feed.start + k for feed, count in zip(feeds, counts, strict=True) for k in range(count)]
        sizes = self._layers.sizes(len(feeds), max(counts), live, cache, window=window or 0)
        with torch.inference_mode(False):  # for callers, an ordinary tensor
            logits = torch.empty(sum(asked), self._around.outputs, dtype=torch.float32, device="cpu")
        self._around.known, best = vocab_size, _integers([NO_TOKEN] * sum(asked))
        self._compute(
            *(self._around, layers, len(layers), sizes, self._dim, self._layers.inner),
            *(_integers([token for feed in feeds for token in feed.tokens]), _integers([feed.row for feed in feeds])),
            *(_integers([0, *accumulate(counts)]), _integers(slots), _integers(asked)),
            *(logits.data_ptr(), best),
            *(self._layers.heads.scaling, torch.get_num_threads()),
        )
        ends, argmax = list(accumulate(asked)), list(best)
        parts = torch.split(logits[:, :vocab_size], asked)
        return [RowLogits(part, argmax[end - count : end]) for part, end, count in zip(parts, ends, asked, strict=True)]

    def is_current(self) -> bool:
        """Whether the parts of the model are the same, the layers (see ``Stack``) too, and weights where they were."""
        return (
            all(parts.get(name) is part for parts, name, part in self._links)
            and self._stack.compiled is self._layers
            and list(map(_place, _weights(*self._around_layers))) == self._places
        )


def _weights(embeddings: Any, norm: Any, head: Any) -> tuple[Tensor | None, ...]:
    """Those around the layers, the head's bias last."""
    return embeddings.weight, norm.weight, head.packed, head.bias


def _links(model: Any) -> Iterator[tuple[dict[str, nn.Module | None], str, nn.Module]]:
    """Where the parts of a model stand, their names there, and the parts: what ``Module`` looks up as attributes."""
    inner = model.model
    for whole, names in (
        (model, ("model", "lm_head")),
        (inner, ("embed_tokens", "layers", "norm", "rotary_emb")),
        (inner.layers, ("0",)),
    ):
        for name in names:
            yield whole._modules, name, whole._modules[name]


def _place(weight: Tensor | None) -> tuple[int, torch.dtype] | None:
    return None if weight is None else (weight.data_ptr(), weight.dtype)


def _check_within(feeds: Sequence[Feed], cache: RaggedKV, ids: int) -> None:
    """Raise ``IndexError`` for feeds that would be read or written outside of the embeddings or the cache."""
    for feed in feeds:
        end, tokens = feed.start + len(feed.tokens), feed.tokens or [0]
        is_inside = 0 <= feed.row < len(cache.rows) and feed.start >= 0 and end <= cache.capacity
        if not is_inside or not 0 <= feed.last <= len(feed.tokens) or min(tokens) < 0 or max(tokens) >= ids:
            raise IndexError(
                f"Expected ids below {ids} in slots below {cache.capacity} of rows below {len(cache.rows)}; got "
                f"{len(feed.tokens)} ids of {min(tokens)} to {max(tokens)}, {feed.last} of them asked for, from slot "
                f"{feed.start} of row {feed.row} on."
            )


def _integers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


class _Angles:
    """Cosines and sines of rotary positions, from the first on.

    Args:
        rotary: transformers' module.
        positions: how many there are.
    """

    def __init__(self, rotary: nn.Module, positions: int) -> None:
        self._rotary = rotary
        self._positions = positions
        self._cosines, self._sines = (part[:0] for part in self._at(_positions(0, 1)))

    @torch.no_grad()
    def are_fixed(self) -> bool:
        """Whether the angles of a position are the same whatever other positions are asked for."""
        some, last = _positions(0, min(8, self._positions)), _positions(self._positions - 1, self._positions)
        alone, beside = self._at(some), self._at(torch.cat([some, last]))
        return all(torch.allclose(a, b[:-1], atol=1e-6) for a, b in zip(alone, beside, strict=True))

    def reaching(self, slots: int) -> tuple[int, int]:
        """Return the addresses of both, for at least so many slots. Raise ``IndexError`` beyond the last position."""
        if slots > self._positions:
            raise IndexError(f"The model has {self._positions} positions; got {slots} slots.")
        while len(self._cosines) < slots:
            begin = len(self._cosines)
            cosines, sines = self._at(_positions(begin, min(begin + _STEP, self._positions)))
            self._cosines, self._sines = torch.cat([self._cosines, cosines]), torch.cat([self._sines, sines])
        return self._cosines.data_ptr(), self._sines.data_ptr()

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[F, dim]`` each, float32."""
        like = torch.zeros(1, dtype=torch.float32, device="cpu")
        cosines, sines = self._rotary(like, positions[None])
        return cosines[0].contiguous(), sines[0].contiguous()


def _positions(begin: int, end: int) -> Tensor:
    return torch.arange(begin, end, device="cpu")
