"""One of several samples of a question: what the models below should know of it, by context, through any chain."""

from __future__ import annotations

import asyncio
import contextvars
import uuid
from collections.abc import Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentspec import InvalidRequestError
from agentspec.rng import sample_seed

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """A sample that is being drawn.

    Args:
        index: of the sample.
        count: how many there are.
        seed: of all of them; None for the model's own.
        group: requests of one group look at each other's text for drafts.
        wants_logprobs: whether messages should say how likely their tokens were.
    """

    index: int
    count: int
    seed: int | None = None
    group: str = field(default_factory=lambda: uuid.uuid4().hex)
    wants_logprobs: bool = False

    def settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a call within this sample: its own seed, and a text that no sibling changes.

        Raises:
            InvalidRequestError: for several samples at temperature 0, which would all be the same.
        """
        if self.count > 1 and settings["temperature"] == 0:
            raise InvalidRequestError(
                f"{self.count} samples at temperature 0 are {self.count} times the same text; expected more than 0."
            )
        changed: dict[str, Any] = {}
        seed = settings["seed"] if self.seed is None else self.seed
        if seed is not None:
            changed = {"seed": sample_seed(seed, self.index), "acceptance": "coupled"}
        if self.wants_logprobs and settings["logprobs"] is None:
            changed["logprobs"] = 0
        return {**settings, **changed}


current_sample: ContextVar[Sample | None] = ContextVar("agentspec_sample", default=None)


def within(sample: Sample, asking: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task in whose context the sample is the current one."""
    context = contextvars.copy_context()
    context.run(current_sample.set, sample)
    return asyncio.get_running_loop().create_task(asking, context=context)
