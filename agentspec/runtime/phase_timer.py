"""`PhaseTimer`: seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from agentspec.runtime.device import CAPTURING


class PhaseTimer:
    """A timer of named phases; a phase entered inside another pauses it.

    ::

        timer = PhaseTimer()
        with timer("draft"):
            with timer("mask"):  # "draft" is paused
                ...
        timer.seconds  # {"draft_s": ..., "mask_s": ...}

    The phases add up to the time spent inside the outermost blocks. One thread uses a timer at a time.

    Args:
        phases: keys of ``seconds`` that are there from the start.
    """

    def __init__(self, phases: Sequence[str] = ()) -> None:
        self._seconds = dict.fromkeys(phases, 0.0)
        self._open: list[str] = []  # keys of the phases that were entered, the innermost last
        self._next = ""
        self._since = 0.0

    @classmethod
    def on(cls, device: torch.device, phases: Sequence[str] = ()) -> PhaseTimer:
        """Return a timer of phases whose work runs on a device."""
        return _StreamTimer(device, phases) if device.type == "cuda" else cls(phases)

    def __call__(self, phase: str) -> PhaseTimer:
        """Return the context manager of a phase; enter it at once."""
        self._next = phase + "_s"
        return self

    def __enter__(self) -> None:
        if self._open:
            self._count()
        else:
            self._since = time.perf_counter()
        self._open.append(self._next)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._count()
        self._open.pop()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, ``"<phase>_s"``; up to now where phases are open. A device is waited for."""
        if self._open:
            self._count()
        return dict(self._seconds)

    def _count(self) -> None:
        """Count what has passed of the innermost open phase."""
        phase, now = self._open[-1], time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now


class _StreamTimer(PhaseTimer):
    """A timer by events on a CUDA device's current stream: a phase lasts until the device has done what it launched.

    While the device works, the host's own work counts for the phase that launched the device's, and so does waiting for
    a result. Other work on the stream counts too. Tested with stand-ins for events, unproven on a GPU.
    """

    def __init__(self, device: torch.device, phases: Sequence[str] = ()) -> None:
        super().__init__(phases)
        self._device = device
        self._boundaries: list[tuple[str, Any]] = []  # events, each with the phase that begins there; "" for none

    def __enter__(self) -> None:
        self._open.append(self._next)
        self._record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.pop()
        self._record()

    @property
    def seconds(self) -> dict[str, float]:
        if self._open:
            self._record()
        if self._boundaries:
            with CAPTURING:
                self._boundaries[-1][1].synchronize()
        found = dict(self._seconds)
        for (phase, began), (_, ended) in zip(self._boundaries, self._boundaries[1:], strict=False):
            if phase:
                found[phase] = found.get(phase, 0.0) + began.elapsed_time(ended) / 1000
        return found

    def _record(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._boundaries.append((self._open[-1] if self._open else "", event))
