"""Work for a thread that ends with it.

On the CPU, torch gives each thread that computes a team of helpers, which stays as long as that thread. Where there are
more of these than cores (the thread that loaded a model has some, and the engine's worker has others), libgomp lets
all of them sleep between two kernels, and waking them made every pass of a small model 1.4 times as long. So what
computes elsewhere than in the worker (loading, measuring, the first mask of a grammar) does it in a thread that takes
its team along when it ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def apart(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, which computes in a thread of its own; its caller waits for the result or the exception."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def compute() -> None:
            try:
                results.append(function(*args, **kwargs))
            except BaseException as error:  # handed on to who waits
                errors.append(error)

        thread = threading.Thread(target=compute, name=f"agentspec {function.__name__}", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()
        return results.pop()

    return wrapped
