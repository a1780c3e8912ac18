"""Short-lived compute threads, locks of objects that one thread at a time may use, and stacks of threads.

On the CPU, torch gives each thread that computes a team of helpers, which lives as long as that thread. The thread that
loaded a model has a team, and the engine's worker has another. With more of them than cores, libgomp lets all of them
sleep between two kernels; waking them made every pass of a small model 1.4 times as long. Work outside of the worker
(loading, measuring, the first mask of a grammar) therefore runs in a thread of its own, whose team ends with it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from agentspec.runtime.thread_budget import BUDGET

P = ParamSpec("P")
T = TypeVar("T")

_FRAMES = 12  # shown of a stack


class OverdueError(Exception):
    """Work did not end in time; it goes on in its thread.

    Args:
        thread: still at work.
    """

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(thread.name)
        self.thread = thread


def apart(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function compute in a thread of its own; its caller waits for the result or the exception."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        return run_apart(lambda: function(*args, **kwargs), function.__name__)

    return wrapped


def run_apart(work: Callable[[], T], name: str, timeout_s: float | None = None, *, on_idle_cores: bool = False) -> T:
    """Compute in a thread of its own; return the result, or raise the exception.

    Args:
        work: function to call.
        name: of the thread.
        timeout_s: seconds to wait; None for no bound.
        on_idle_cores: whether ``BUDGET`` sets the number of threads; only for results that do not depend on it.

    Raises:
        OverdueError: without a result by then. A thread cannot be ended: this one goes on.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def compute() -> None:
        try:
            if on_idle_cores:
                BUDGET.apply()
            results.append(work())
        except BaseException as error:  # raised in the caller
            errors.append(error)

    thread = threading.Thread(target=compute, name=f"agentspec {name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise OverdueError(thread)
    if errors:
        raise errors.pop()
    return results.pop()


def stack_of(thread: threading.Thread | None) -> str:
    """Return the stack of a thread as the last lines of a traceback; state it if the thread has ended."""
    frame = sys._current_frames().get(thread.ident) if thread is not None and thread.ident is not None else None
    return "  (the thread has ended)" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()


_locks: WeakKeyDictionary[object, threading.RLock] = WeakKeyDictionary()


def lock_of(owned: object) -> threading.RLock:
    """Return the lock of an object that one thread at a time may use. The object itself can still be copied."""
    lock = _locks.get(owned)
    return _locks.setdefault(owned, threading.RLock()) if lock is None else lock


def exclusive(attribute: str | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a method run in one thread at a time.

    Args:
        attribute: name of the attribute of ``self`` that one thread at a time may use; None for ``self``.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def alone(*args: P.args, **kwargs: P.kwargs) -> T:
            with lock_of(args[0] if attribute is None else getattr(args[0], attribute)):
                return method(*args, **kwargs)

        return alone

    return decorate


def in_forked_child(forget: Callable[[], None]) -> None:
    """Register a function for every forked child: it drops threads and locks of the parent."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
        os.register_at_fork(after_in_child=forget)


def _forget_locks() -> None:
    """Drop all locks: their holders, other threads of the parent, do not exist in the child."""
    global _locks
    _locks = WeakKeyDictionary()


in_forked_child(_forget_locks)
