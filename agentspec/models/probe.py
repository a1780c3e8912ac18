"""Compare a new model's logits from its cache with those of plain forwards, before its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentspec.errors import ModelLoadError
from agentspec.models.attention import EAGER, LayerMasks, narrow_window, preferred_attention, readings, set_attention
from agentspec.models.checkpoint import one_line
from agentspec.models.forward import Forward
from agentspec.models.graphs import ROUNDING
from agentspec.models.kv_cache import RaggedKV
from agentspec.models.logits import Logits

_WINDOW = 5
_LENGTH = 19


@dataclass(frozen=True)
class Probe:
    """A model, what computes its passes, and their cache; ``ask`` is its ``next_logits``."""

    model: PreTrainedModel
    forward: Forward
    kv: RaggedKV
    ask: Callable[[Sequence[list[int]], Sequence[int]], Logits]

    def run(self, max_context: int) -> None:
        """Refuse a model whose logits from ragged cached blocks differ from those of plain uncached forwards.

        Where the config names a window that the model's family does not know, the masks without it count if only they
        give the model's own logits. Leaves the cache filled and the module on the attention that it will keep.
        """
        refusals: list[ModelLoadError] = []
        for masks in readings(self.model):
            self.kv.clear()
            self.forward.read_masks(masks)
            try:
                return self._compare(min(_LENGTH, max_context), masks)
            except ModelLoadError as error:
                refusals.append(error)
        raise refusals[0]

    def _compare(self, length: int, masks: LayerMasks | None) -> None:
        kind = type(self.model).__name__
        try:
            pairs = self._scores(length, masks)
        except (ModelLoadError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{kind} could not finish a short forward from a ragged cache: {one_line(error)}"
            ) from error
        if not all(theirs.isfinite().all() for _, theirs in pairs):
            raise ModelLoadError(
                f"{kind}: its own logits are not finite; expected numbers. Its weights hold NaN or infinity, or values "
                f"beyond {self.model.dtype}: fetch the checkpoint again, or choose another dtype"
            )
        off = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
        tolerance = ROUNDING.get(self.model.dtype, 5e-2)
        if not off <= tolerance:  # also refuses NaN
            raise ModelLoadError(
                f"{kind}: cached logits differ from uncached ones by {off:.1e} of the largest logit, expected at most "
                f"{tolerance:.0e}; its attention cannot be addressed by position, choose another model"
            )

    def _scores(self, length: int, masks: LayerMasks | None) -> list[tuple[Tensor, Tensor]]:
        """Scores of the same positions, cached and uncached ``[F, V]``.

        The reference runs with the module's own masks and eager attention (of a fused module, which was compared with
        that as it was made, with its own). Windows are narrowed meanwhile, so that a few tokens reach beyond them.
        """
        rng = torch.Generator().manual_seed(0)
        left, right = torch.randint(self.forward.vocab_size, (2, length), generator=rng).tolist()
        with narrow_window(self.model, _WINDOW):
            self.forward.read_masks(masks)
            attention = preferred_attention(self.model)
            set_attention(self.model, EAGER)
            expected = [self._uncached(left), self._uncached(right)]
            set_attention(self.model, attention)
            self.ask([left[:2], right[: length // 2]], [0, 0])
            # A draft that will be rejected, then blocks of different length at different positions.
            self.ask([[*left[:3], *right[:4]], right[: length // 2 + 1]], [1, 1])
            found = self.ask([left, right[:-1]], [length - 3, 3]).values
        self.forward.read_masks(masks)
        return [(found[0], expected[0][3:]), (found[1, :3], expected[1][-4:-1])]

    @torch.inference_mode()
    def _uncached(self, context: list[int]) -> Tensor:
        """All logits of one context by a plain forward ``[len(context), V]``."""
        output = self.model(input_ids=torch.tensor([context], device=self.model.device), use_cache=False)
        logits: Tensor = output.logits[0, :, : self.forward.vocab_size].float()
        return logits
