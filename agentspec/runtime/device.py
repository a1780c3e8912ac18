"""What the host does beside a device that computes on its own: hand things over without waiting, and tell afterwards
how long the device was at it. On a CPU there is nothing beside, and all of this does nothing."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

CAPTURING = threading.RLock()
"""Held by who captures a graph, and by who waits for a device: either spoils a capture of another thread."""


def pinned(host: Tensor, device: torch.device | str) -> Tensor:
    """``host``, where a device can fetch it by itself."""
    return host.pin_memory() if torch.device(device).type == "cuda" else host


def upload(host: Tensor, device: torch.device | str) -> Tensor:
    """``host`` on the device; nobody waits for the copy."""
    return pinned(host, device).to(device, non_blocking=True)


def upload_beside(host: Tensor, device: torch.device | str) -> Tensor:
    """``host`` on the device, copied while it computes what it was given before; what it is given next waits for it."""
    at = torch.device(device)
    if at.type != "cuda":
        return upload(host, at)
    copies, computed = _copies(at), torch.cuda.current_stream(at)
    with torch.cuda.stream(copies):
        there = upload(host, at)
    computed.wait_stream(copies)
    there.record_stream(computed)  # its memory is that of the other stream, which could give it away
    return there


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def vector(values: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``[len(values)]`` beside ``like``, of its type unless another is named."""
    return upload(torch.tensor(values, dtype=dtype or like.dtype), like.device)


def wait_for(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        with CAPTURING:
            torch.cuda.current_stream(device).synchronize()


class Stopwatch:
    """Measures, on the device's own clock, what is given to it within a ``with`` block.

    A phase that only launches kernels is short for the host, and the next one that needs their results waits for them.
    ``runs_past`` tells which part of that waiting was for the kernels of the block.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[Any, Any] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._began = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.perf_counter()
        if self._events is not None:
            self._events[0].record(torch.cuda.current_stream(self._device))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._events is not None:
            self._events[1].record(torch.cuda.current_stream(self._device))

    def runs_past(self, moment: float) -> float:
        """Seconds that the device was at it after ``moment`` (of ``time.perf_counter``); call it when it is done.

        The device is taken to have been idle when the block began.
        """
        if self._events is None:
            return 0.0
        seconds: float = self._events[0].elapsed_time(self._events[1]) / 1000
        return max(0.0, self._began + seconds - moment)
