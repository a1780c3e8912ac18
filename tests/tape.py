"""A recorder of passes for machines without CUDA: what a graph would do, operator by operator.

As with a graph, everything but the numbers in tensors is what it was when it was recorded: shapes, Python numbers, and
which tensors were read from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Tape(TorchDispatchMode):
    """Keeps the operators that run while it is on; ``replay`` runs them again, into the same results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a number was read from the device, which cannot be captured")
        found = func(*args, **(kwargs or {}))
        self.steps.append((func, args, kwargs or {}, found))
        return found

    def replay(self, result: Tensor) -> None:
        made: dict[int, Tensor] = {}

        def current(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        for func, args, kwargs, recorded in self.steps:
            args, kwargs = tree_map_only(Tensor, current, (args, kwargs))
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(found), strict=True):
                if isinstance(old, Tensor):
                    made[id(old)] = new
        result.copy_(current(result))


class TapeRecorder:
    """Counts what it recorded."""

    def __init__(self) -> None:
        self.recorded = 0
        self.forgotten = 0

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        tape = Tape()
        with tape:
            result = function()
        self.recorded += 1
        return lambda: tape.replay(result), result

    def forget(self) -> None:
        self.forgotten += 1
