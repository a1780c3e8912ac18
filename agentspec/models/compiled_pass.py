"""A pass that our own kernels compute from ids to scores, without Python or torch in between."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentspec.kernels import kernels
from agentspec.models.compiled import CompiledLayers, Layer
from agentspec.models.direct import Direct
from agentspec.models.fusion import is_untouched
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.loading import longest_context
from agentspec.models.packing import PanelLinear
from agentspec.models.panels import FORMATS

if TYPE_CHECKING:
    from agentspec.models.forward import Feed

_STEP = 1024  # slots whose angles are computed at once: always the same, and so the same numbers
_INTEGERS = ctypes.POINTER(ctypes.c_int64)


class _Around(ctypes.Structure):
    """As in layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embeddings", "cosines", "sines", "norm", "bias", "head")),
        *((name, ctypes.c_int64) for name in ("format", "outputs")),
        ("eps", ctypes.c_double),
    )


class CompiledPass:
    """The whole of ``model``, whose layers are a compiled stack with nothing around it but what ``Direct`` computes."""

    def __init__(self, model: Any, direct: Direct) -> None:
        inner, head = model.model, model.lm_head
        self._model, self._direct, self._parts = model, direct, _parts(model)
        self._stack = inner.layers[0]
        self._layers: CompiledLayers = self._stack.compiled
        self._embeddings, self._norm, self._dim = inner.embed_tokens.weight, inner.norm.weight, model.config.hidden_size
        self._angles = _Angles(inner.rotary_emb, longest_context(model))
        self._around = _Around(
            embeddings=self._embeddings.data_ptr(),
            norm=self._norm.data_ptr(),
            bias=None if head.bias is None else head.bias.data_ptr(),
            head=head.packed.data_ptr(),
            format=list(FORMATS).index(head.layout),
            outputs=head.out_features,
            eps=inner.norm.eps,
        )
        self._compute = kernels().function(
            "pass",
            *(ctypes.POINTER(_Around), ctypes.POINTER(Layer), ctypes.c_int64, _INTEGERS, ctypes.c_int64),
            *(ctypes.c_int64, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS, _INTEGERS),
            *(ctypes.c_void_p, ctypes.c_float, ctypes.c_int),
        )

    @classmethod
    def of(cls, model: Any, direct: Direct | None) -> CompiledPass | None:
        """The pass of ``model``; None where part of it is nothing that the kernels compute."""
        if direct is None:
            return None
        inner, head = model.model, model.lm_head
        embeddings, norm, layers = inner.embed_tokens, inner.norm, inner.layers[0].compiled
        weights = embeddings.weight, norm.weight, *([] if head.bias is None else [head.bias])
        fits = (
            layers is not None
            and type(embeddings) is nn.Embedding
            and embeddings.max_norm is None
            and isinstance(head, PanelLinear)
            and all(weight.is_contiguous() and weight.dtype == torch.float32 and weight.is_cpu for weight in weights)
            and _Angles(inner.rotary_emb, longest_context(model)).are_fixed()
        )
        return cls(model, direct) if fits else None

    def __call__(self, feeds: Sequence[Feed], cache: RaggedKV, window: int | None) -> list[Tensor] | None:
        """The scores after the last ``feed.last`` tokens of each feed, ``[last, V]``; their K and V are written.

        None where the cache does not know the layers yet, or somebody changed the model.

        Args:
            feeds: of different rows.
            cache: with room for them.
            window: slots that a position sees; None for all.
        """
        layers = self._layers.over(cache)
        if layers is None or not self._is_current():
            return None
        counts, asked = [len(feed.tokens) for feed in feeds], [feed.last for feed in feeds]
        live = max(feed.start + count for feed, count in zip(feeds, counts, strict=True))
        self._around.cosines, self._around.sines = self._angles.reaching(live)
        slots = [feed.start + k for feed, count in zip(feeds, counts, strict=True) for k in range(count)]
        sizes = self._layers.sizes(len(feeds), max(counts), live, cache, window=window or 0)
        with torch.inference_mode(False):  # for callers, an ordinary tensor
            scores = torch.empty(sum(asked), self._around.outputs)
        self._compute(
            *(self._around, layers, len(layers), sizes, self._dim, self._layers.inner),
            *(_integers([token for feed in feeds for token in feed.tokens]), _integers([feed.row for feed in feeds])),
            *(_integers([0, *accumulate(counts)]), _integers(slots), _integers(asked), scores.data_ptr()),
            *(self._layers.heads.scaling, torch.get_num_threads()),
        )
        return list(torch.split(scores, asked))

    def _is_current(self) -> bool:
        """Whether nobody has moved the weights, exchanged a part or hooked into one since."""
        parts = _parts(self._model)
        are_the_same = all(map(operator.is_, parts, self._parts)) and self._stack.compiled is self._layers
        return are_the_same and self._direct.is_whole and all(map(is_untouched, parts))


def _parts(model: Any) -> tuple[nn.Module, ...]:
    """What is around the layers."""
    inner = model.model
    return inner.embed_tokens, inner.layers[0], inner.norm, inner.rotary_emb, model.lm_head


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
        self._cosines, self._sines = (part[:0] for part in self._at(torch.arange(1)))

    @torch.no_grad()
    def are_fixed(self) -> bool:
        """Whether the angles of a position are the same whatever other positions are asked for."""
        some = torch.arange(min(8, self._positions))
        alone, beside = self._at(some), self._at(torch.cat([some, torch.tensor([self._positions - 1])]))
        return all(torch.allclose(a, b[:-1], atol=1e-6) for a, b in zip(alone, beside, strict=True))

    def reaching(self, slots: int) -> tuple[int, int]:
        """The addresses of both, for at least so many slots."""
        while len(self._cosines) < slots:
            begin = len(self._cosines)
            cosines, sines = self._at(torch.arange(begin, min(begin + _STEP, self._positions)))
            self._cosines, self._sines = torch.cat([self._cosines, cosines]), torch.cat([self._sines, sines])
        return self._cosines.data_ptr(), self._sines.data_ptr()

    def _at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``[F, dim]`` each, float32."""
        cosines, sines = self._rotary(torch.zeros(1), positions[None])
        return cosines[0].contiguous(), sines[0].contiguous()
