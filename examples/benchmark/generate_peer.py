"""transformers' ``generate`` under the masks that agentspec uses: the peer that says the same text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from agentspec.grammars import Matcher


class Follower:
    """Keeps a matcher level with the ids that ``generate`` has emitted, or tries: drafted ids are taken back."""

    def __init__(self, matcher: Matcher, prompt_length: int) -> None:
        self._matcher, self._prompt_length = matcher, prompt_length
        self._taken: list[int] = []

    def follow(self, input_ids: torch.Tensor) -> Matcher:
        """The matcher behind ``input_ids``; behind the last legal one, where a drafted id is not legal."""
        emitted = input_ids[0, self._prompt_length :].tolist()
        pairs = enumerate(zip(self._taken, emitted, strict=False))
        known = next((i for i, (a, b) in pairs if a != b), min(len(self._taken), len(emitted)))
        if known < len(self._taken):
            self._matcher.rollback(len(self._taken) - known)
            del self._taken[known:]
        for token in emitted[known:]:
            if not self._matcher.accept_token(token):
                break
            self._taken.append(token)
        return self._matcher


class Masks(LogitsProcessor):  # type: ignore[misc]
    """The masks that agentspec uses, for ``generate``."""

    def __init__(self, follower: Follower, end_token: int) -> None:
        self._follower, self._end_token = follower, end_token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = self._follower.follow(input_ids)
        allowed = matcher.token_mask().with_tokens([self._end_token], legal=matcher.is_accepting())
        return scores.masked_fill(~allowed.tensor(), -torch.inf)


class GrammarIsOver(StoppingCriteria):  # type: ignore[misc]
    """Ends ``generate`` where agentspec ends: when nothing may follow."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        matcher = self._follower.follow(input_ids)
        return torch.tensor([matcher.is_terminated()])


def constrained(matcher: Matcher, prompt_length: int, end_token: int) -> dict[str, Any]:
    """Arguments for ``generate`` that keep one text in the language of ``matcher``."""
    follower = Follower(matcher, prompt_length)
    return {
        "logits_processor": LogitsProcessorList([Masks(follower, end_token)]),
        "stopping_criteria": StoppingCriteriaList([GrammarIsOver(follower)]),
    }


class FirstForward:
    """When the first forward pass of a model ended: the prompt is read then. A clock's seconds; None before."""

    def __init__(self) -> None:
        self.ended_at: float | None = None

    def __call__(self, *_: Any) -> None:
        if self.ended_at is None:
            self.ended_at = time.perf_counter()


@contextmanager
def first_forward(model: torch.nn.Module) -> Iterator[FirstForward]:
    """Watch the next forward pass of ``model``."""
    watch = FirstForward()
    handle = model.register_forward_hook(watch)
    try:
        yield watch
    finally:
        handle.remove()
