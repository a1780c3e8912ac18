"""Steps of a search, thin: the batch does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig

from agentspec import InvalidRequestError
from agentspec.errors import shown
from langchain_agentspec.consistency import SelfConsistency, in_own_loop
from langchain_agentspec.samples import Sample, within


def best_of(model: Runnable[Any, Any], k: int, score: Callable[[Any], float], **settings: Any) -> SelfConsistency:
    """Return a runnable that draws ``k`` outputs at once and returns the one of the highest score.

    Args:
        model: a chat model, or a chain with one in it.
        k: samples.
        score: of an output; where it raises, the sample does not count.
        settings: further ones of ``SelfConsistency``.

    Raises:
        InvalidRequestError: for ``k`` below 1.
    """
    return SelfConsistency(model, k, extract=score, aggregate=max, **settings)


def expand(
    model: Runnable[Any, Any],
    prefixes: Sequence[Any],
    k: int,
    *,
    seed: int | None = None,
    config: RunnableConfig | None = None,
) -> list[list[Any]]:
    """``k`` continuations of each of several inputs, all at once: the step of a tree search.

    Continuation i of every input has ``sample_seed(seed, i)``. An error of one is raised once all are done.

    Args:
        model: a chat model, or a chain with one in it.
        prefixes: its inputs.
        k: continuations of each.
        seed: of all; None for the model's own.
        config: of the calls.

    Raises:
        InvalidRequestError: for ``k`` below 1.
    """
    made: list[list[Any]] = in_own_loop(lambda: aexpand(model, prefixes, k, seed=seed, config=config))
    return made


async def aexpand(
    model: Runnable[Any, Any],
    prefixes: Sequence[Any],
    k: int,
    *,
    seed: int | None = None,
    config: RunnableConfig | None = None,
) -> list[list[Any]]:
    """``expand`` for an event loop."""
    if not isinstance(k, int) or k < 1:
        raise InvalidRequestError(f"k must be a number of continuations, 1 or more, got {shown(k)}.")
    asked = []
    for prefix in prefixes:
        first = Sample(0, k, seed)
        samples = [Sample(i, k, seed, first.group) for i in range(k)]
        asked.append([within(sample, model.ainvoke(prefix, config)) for sample in samples])
    tasks = [task for row in asked for task in row]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [[task.result() for task in row] for row in asked]
