"""Hand things over to a device that computes on its own, without waiting for it. On a CPU all of this does nothing."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

CAPTURING = threading.RLock()
"""Held while a thread captures a graph or waits for a device: either spoils the capture of another thread."""


def pinned(host: Tensor, device: torch.device | str) -> Tensor:
    """Return ``host`` in memory that a device can fetch from by itself."""
    return host.pin_memory() if torch.device(device).type == "cuda" else host


def upload(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``host`` to the device without waiting for the copy."""
    return pinned(host, device).to(device, non_blocking=True)


def upload_beside(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy ``host`` to the device while it computes what was launched before; what is launched next waits for it."""
    at = torch.device(device)
    if at.type != "cuda":
        return upload(host, at)
    copies, computed = _copies(at), torch.cuda.current_stream(at)
    with torch.cuda.stream(copies):
        there = upload(host, at)
    computed.wait_stream(copies)
    there.record_stream(computed)  # the memory belongs to the other stream, which could give it away
    return there


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def vector(values: Sequence[Any], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``values`` as a tensor on the device of ``like``, of its dtype unless another is given."""
    return upload(torch.tensor(values, dtype=dtype or like.dtype), like.device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that was launched on it."""
    if device.type == "cuda":
        with CAPTURING:
            torch.cuda.current_stream(device).synchronize()
