"""Captured passes: what the host would launch kernel by kernel, recorded once and replayed as one launch.

A block of a few tokens keeps a GPU busy for less time than it takes Python to launch its kernels. A graph replays them
without Python, but only for the very shapes and addresses it was captured with. So a pass is a function of one table of
integers at a fixed address (``forward.py``), shapes are rounded up to a few, and one that comes again is captured.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from agentspec.errors import check_option
from agentspec.models.switches import SWITCHES, Switch
from agentspec.runtime.device import CAPTURING, pinned, upload, wait_for

MOST_GRAPHS = 64
"""Graphs that are kept; one more, and all are captured anew."""

_TRIES = 2  # what other users of the device do can spoil a capture
_WIDTHS = (1, 2, 4, 8, 16, 32)
_LEAST_LIVE = 256

ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference between two ways to compute the same logits, as a share of the largest."""


class Recorder(Protocol):
    """Records what a function does on a device."""

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Return a function that does it again, and the tensor that holds its result each time."""
        ...

    def forget(self) -> None:
        """None of what was recorded will be replayed again."""
        ...


class CudaRecorder:
    """Captures CUDA graphs, on a stream of its own and into one pool of memory: no two are ever replayed at once.

    Libraries keep workspaces by stream, which graphs of one pool share. So graphs go all together or not at all, and
    what comes after them has a new pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Run it once, so that libraries allocate what they keep, then capture it."""
        with CAPTURING, torch.cuda.device(self._device):
            usual = torch.cuda.current_stream()
            self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                self._stream.wait_stream(usual)
                with torch.cuda.stream(self._stream):
                    function()
                usual.wait_stream(self._stream)
                # Other threads may use the device meanwhile: only this one's calls are the capture's.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    result = function()
            finally:
                torch.cuda.set_stream(usual)  # which a capture that fails leaves to others
        return graph.replay, result

    def forget(self) -> None:
        """Wait for the last replay, and begin a new pool."""
        wait_for(self._device)
        self._pool = None


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
        self._generation: Hashable = None
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: set[Hashable] = set()
        self._failed = 0
        self.replays = 0
        """Passes that were replayed so far."""

    @property
    def is_on(self) -> bool:
        """Whether passes are captured."""
        return self._recorder is not None

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self,
        compute: Callable[[Tensor], Tensor],
        table: Tensor,
        device: torch.device,
        shape: Hashable,
        layout: Hashable,
    ) -> Tensor:
        """Return ``compute(table)`` on the device, replayed where a graph of this shape was captured.

        Args:
            compute: reads and writes, beside its table, only tensors that stay where they are until ``layout`` changes.
            table: on the host.
            device: where the pass runs.
            shape: all that ``compute`` depends on beside numbers in tensors.
            layout: another one means that tensors have moved, and what was captured is worth nothing.
        """
        generation = layout, threading.get_ident()  # libraries have workspaces by thread as well
        if generation != self._generation:
            self._forget()
            self._generation = generation
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.table.copy_(pinned(table, device), non_blocking=True)
            graph.replay()
            self.replays += 1
            return graph.result.clone()  # the next replay writes over it
        fixed = upload(table, device)
        found = compute(fixed)
        if self._recorder is not None and shape in self._seen:  # once is no reason to capture
            self._capture(compute, fixed, shape, found.clone())
        self._seen.add(shape)
        return found

    def _capture(self, compute: Callable[[Tensor], Tensor], table: Tensor, shape: Hashable, expected: Tensor) -> None:
        """Capture a pass that has just been computed; a graph that computes something else is none."""
        assert self._recorder is not None
        try:
            if len(self._graphs) >= self._most:
                self._forget()
            replay, result = self._recorder(lambda: compute(table))
            replay()
            if not _is_close(result, expected):
                raise RuntimeError("the captured pass computes something else")
        except Exception as error:  # whatever a driver, a library or a model's code raises when it is captured
            self._failed += 1
            if self._failed < _TRIES:
                return
            self._forget()
            self._recorder = None
            warnings.warn(
                "Passes cannot be captured, and are launched kernel by kernel (cuda_graphs=False does so without a "
                f"warning); results are the same: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._graphs[shape] = _Graph(table, replay, result)

    def _forget(self) -> None:
        self._seen.clear()
        if self._graphs and self._recorder is not None:
            self._graphs.clear()
            self._recorder.forget()


def _is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether logits differ by rounding alone."""
    off = (found - expected).abs().max() <= ROUNDING.get(found.dtype, 1e-4) * expected.abs().max()
    return bool(off)  # NaN is not close


def recorder_for(cuda_graphs: Switch, device: torch.device) -> Recorder | None:
    """Return what captures passes on a device; None for nothing.

    One warning where graphs are demanded and there is no CUDA.

    Raises:
        ModelLoadError: for another value.
    """
    check_option("cuda_graphs", cuda_graphs, SWITCHES)
    if device.type == "cuda":
        return CudaRecorder(device) if cuda_graphs else None
    if cuda_graphs is True:
        warnings.warn(
            f"cuda_graphs=True captures passes on CUDA; on this {device.type} there is none to capture, and "
            "results are the same.",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def round_width(width: int) -> int:
    """Return the width that a block is padded to."""
    return next((w for w in _WIDTHS if w >= width), width)


def round_live(live: int, capacity: int) -> int:
    """Return the slots that attention reads for ``live`` ones: 256, 384, 512, 768, ...; never more than there are."""
    rounded = _LEAST_LIVE
    while rounded < live:
        rounded = rounded * 3 // 2 if rounded & (rounded - 1) == 0 else rounded * 4 // 3
    return min(rounded, capacity)
