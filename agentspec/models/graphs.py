"""Captured passes: what the host would launch kernel by kernel, recorded once and replayed as one launch.

A block of a few tokens keeps a GPU busy for less time than it takes Python to launch its kernels. A graph replays them
without Python, but only for the very shapes and addresses it was captured with. So a pass is a function of one table of
integers at a fixed address (``forward.py``), shapes are rounded up to a few, and one that comes again is captured.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentspec.device import pinned, upload

Compile = bool | Literal["auto"]
"""Whether passes are captured: where it can be done (``"auto"``), or as told."""

MOST_GRAPHS = 64
"""Graphs that are kept; the one used longest ago gives way."""

_WIDTHS = (1, 2, 4, 8, 16, 32)
_LEAST_LIVE = 256


class Recorder(Protocol):
    """Records what a function does on a device."""

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """A function that does it again, and the tensor that holds its result each time."""
        ...


class CudaRecorder:
    """Captures CUDA graphs; all share one pool of memory, since no two are ever replayed at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Run it once to let libraries allocate what they keep, then capture it."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one's calls are the capture's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


@dataclass
class _Graph:
    table: Tensor
    replay: Callable[[], object]
    result: Tensor


class Graphs:
    """The captured graphs of one model's passes.

    Args:
        recorder: captures; None where nothing is to be captured, and every pass is computed as it comes.
        most: graphs that are kept.
    """

    def __init__(self, recorder: Recorder | None, most: int = MOST_GRAPHS) -> None:
        self._recorder = recorder
        self._most = most
        self._layout: Hashable = None
        self._graphs: OrderedDict[Hashable, _Graph | None] = OrderedDict()  # None: seen once
        self.replays = 0
        """Passes that were replayed so far."""

    @property
    def is_on(self) -> bool:
        """Whether passes are captured."""
        return self._recorder is not None

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def run(
        self,
        compute: Callable[[Tensor], Tensor],
        table: Tensor,
        device: torch.device,
        shape: Hashable,
        layout: Hashable,
    ) -> Tensor:
        """``compute(table)`` on the device, replayed where a graph of this shape was captured.

        Args:
            compute: reads and writes, beside its table, only tensors that stay where they are until ``layout`` changes.
            table: on the host.
            shape: all that ``compute`` depends on beside numbers in tensors.
            layout: another one means that tensors have moved, and what was captured is worth nothing.
        """
        if layout != self._layout:
            self._graphs.clear()
            self._layout = layout
        if self._recorder is None:
            return compute(upload(table, device))
        if shape not in self._graphs:  # once is no reason to capture
            self._graphs[shape] = None
            self._evict()
            return compute(upload(table, device))
        graph = self._graphs[shape] or self._capture(compute, table, device, shape)
        if graph is None:
            return compute(upload(table, device))
        self._graphs.move_to_end(shape)
        graph.table.copy_(pinned(table, device), non_blocking=True)
        graph.replay()
        self.replays += 1
        return graph.result.clone()  # the next replay writes over it

    def _capture(
        self, compute: Callable[[Tensor], Tensor], table: Tensor, device: torch.device, shape: Hashable
    ) -> _Graph | None:
        assert self._recorder is not None
        fixed = upload(table, device)
        try:
            replay, result = self._recorder(lambda: compute(fixed))
        except Exception as error:  # whatever a driver, a library or a model's code raises when it is captured
            warnings.warn(
                f"Passes cannot be captured, and are launched kernel by kernel (compile=False does so without a "
                f"warning); results are the same: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._recorder = None
            self._graphs.clear()
            return None
        self._graphs[shape] = graph = _Graph(fixed, replay, result)
        return graph

    def _evict(self) -> None:
        while len(self._graphs) > self._most:
            self._graphs.popitem(last=False)


def recorder_for(compile: Compile, device: torch.device) -> Recorder | None:
    """What captures passes on a device, as told by ``compile``; None for nothing.

    One warning where it is wanted and cannot be done.

    Raises:
        ValueError: for another value.
    """
    if compile not in (True, False, "auto"):
        raise ValueError(f"compile must be 'auto', True or False, got {compile!r}")
    if device.type == "cuda":
        return CudaRecorder() if compile else None
    if compile is True:
        warnings.warn(
            f"compile=True captures CUDA graphs, and this model is on {device.type}: passes are launched kernel by "
            "kernel, with the same results. (torch.compile is not used: on CPUs it lost to weights packed for oneDNN.)",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def round_width(width: int) -> int:
    """The width that a block is padded to."""
    return next((w for w in _WIDTHS if w >= width), width)


def round_live(live: int, capacity: int) -> int:
    """The slots that attention reads for ``live`` ones: 256, 384, 512, 768, 1024, ...; never more than there are."""
    rounded = _LEAST_LIVE
    while rounded < live:
        rounded = rounded * 3 // 2 if rounded & (rounded - 1) == 0 else rounded * 4 // 3
    return min(rounded, capacity)
