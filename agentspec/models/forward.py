"""One pass of a transformers module over blocks of tokens in KV rows, as a function of one table of integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentspec.models.attention import LONG, LayerMasks
from agentspec.models.compiled_pass import CompiledPass
from agentspec.models.direct import direct
from agentspec.models.feed import Feed
from agentspec.models.graphs import Graphs, Recorder, round_live, round_width
from agentspec.models.kv_cache import Block, RaggedKV
from agentspec.models.logits import RowLogits
from agentspec.runtime.device import upload

SHORT_FEED = 32
"""Tokens up to which the feeds of several rows go padded through one forward; longer ones run row by row."""

_LIVE_STEP = 64
"""Live slots of long contexts on a CPU are a multiple of it."""

_ROW, _START, _END, _IDS = range(4)  # columns of a table: KV row, first slot, slot after the last, then the ids


class Forward:
    """Passes of ``model`` that write and read the rows of ``kv``; ``keywords`` as ``forward_keywords`` tells them.

    Scores are those of the first ``vocab_size`` ids.
    """

    def __init__(self, model: PreTrainedModel, kv: RaggedKV, keywords: tuple[str, bool], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._cache_keyword, self._skips_logits = keywords
        self._model = model
        self._device, self._dtype = model.device, model.dtype  # each of which goes through the modules when asked
        self._kv = kv
        self._masks = LayerMasks.of(model)
        self._direct = direct(model)
        self._compiled = CompiledPass.of(model, self._direct)
        self.graphs = Graphs(None)

    def __getstate__(self) -> dict[str, Any]:
        """All but what knows the places of weights: a copy makes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy from its state."""
        self.__dict__ |= state
        self._compiled = CompiledPass.of(self._model, self._direct)

    @property
    def is_compiled(self) -> bool:
        """Whether our own kernels compute all of a pass."""
        return self._compiled is not None and len(self._masks.windows) == 1

    def read_masks(self, masks: LayerMasks | None = None) -> None:
        """Use these masks from now on; None: of the kinds and windows of layers that the module's config has now."""
        self._masks = LayerMasks.of(self._model) if masks is None else masks

    def capture_with(self, recorder: Recorder | None) -> None:
        """Capture passes from now on; None for no longer."""
        self.graphs = Graphs(recorder)

    def __call__(self, feeds: Sequence[Feed]) -> list[RowLogits]:
        """Return the logits after the last ``feed.last`` tokens of feeds of ascending rows, ``[last, V]``, float32."""
        found, windows = None, self._masks.windows
        if self._compiled is not None and not self._compiled.is_current():
            self._compiled = CompiledPass.of(self._model, self._direct)
        if self._compiled is not None and len(windows) == 1:
            [window] = windows.values()
            found = self._compiled(feeds, self._kv, window, self.vocab_size)
        if found is None:
            found = [RowLogits(logits[:, : self.vocab_size].float()) for logits in self._padded(feeds)]
        for feed in feeds:
            self._kv.record(feed.row, feed.tokens)
        return found

    def _padded(self, feeds: Sequence[Feed]) -> list[Tensor]:
        """Return the logits in one block, in which shorter feeds are padded on the right."""
        width = max(len(feed.tokens) for feed in feeds)
        keep = width - min((feed.unasked for feed in feeds if feed.last), default=width - 1)
        rows = [feed.row for feed in feeds]
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        needed = max(feed.start for feed in feeds) + width
        live = self._live(needed)
        first, start = rows[0] if is_run else None, feeds[0].start if len(rows) == 1 else None
        counts = tuple(len(feed.tokens) for feed in feeds)
        is_ragged = self._device.type == "cpu" and min(counts) < width
        block = Block(len(rows), width, live, first, start, live - needed, counts if is_ragged else None)
        if self.graphs.is_on and width <= SHORT_FEED:
            block = self._rounded(block)
            logits = self.graphs.run(
                lambda table: self._compute(block, block.width, table),
                _table(feeds, block.width),
                self._device,
                block,
                self._kv.layout,
            )
        else:
            logits = self._compute(block, keep, upload(_table(feeds, width), self._device))
        first = logits.shape[1] - block.width  # column of a feed's first token
        return [
            scores[first + feed.unasked : first + len(feed.tokens)] for feed, scores in zip(feeds, logits, strict=True)
        ]

    def _live(self, needed: int) -> int:
        """Slots that attention reads: on a CPU, of long contexts, in steps, for its kernels are made for a shape."""
        if needed < LONG or self._device.type != "cpu":
            return needed
        return min(-needed // _LIVE_STEP * -_LIVE_STEP, self._kv.capacity)

    def _rounded(self, block: Block) -> Block:
        width = round_width(block.width)
        live = round_live(block.live - block.width + width, self._kv.capacity)
        return replace(block, width=width, live=live, start=None, spare=0, counts=None)

    def _compute(self, block: Block, keep: int, table: Tensor) -> Tensor:
        """Compute the pass, ``[B, keep, V]``. Of the numbers that differ from call to call it reads only the table."""
        slots = table[:, _START, None] + torch.arange(block.width, device=table.device)  # [B, width]
        ids, masks = table[:, _IDS:], self._masks.build(slots, block.live, self._dtype)
        # Padding repeats its row's last position: one further on may not exist.
        positions = torch.minimum(slots, table[:, _END, None] - 1)
        with self._kv.writing(block, table[:, _ROW], slots):
            if self._direct is not None and self._direct.is_whole and isinstance(masks, Tensor):
                return self._direct(ids, positions, masks, self._kv, keep)
            output = self._model(
                input_ids=ids,
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                **{self._cache_keyword: self._kv},
                **({"logits_to_keep": keep} if self._skips_logits else {}),
            )
        logits: Tensor = output.logits[:, -keep:]
        return logits


def _table(feeds: Sequence[Feed], width: int) -> Tensor:
    """``[B, 3 + width]`` on the host: KV row, first slot, slot after the last, and the padded ids."""
    rows = [
        [feed.row, feed.start, feed.start + len(feed.tokens), *feed.tokens, *[0] * (width - len(feed.tokens))]
        for feed in feeds
    ]
    return torch.tensor(rows)
