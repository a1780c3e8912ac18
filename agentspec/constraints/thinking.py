"""A thinking budget: any matcher of a language that begins with a thought, made to end the thought in time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from agentspec.grammar import ThinkingBudget
from agentspec.sequence import Matcher

WAITING, THINKING, OVER = range(3)


class BudgetedMatcher:
    """Counts the tokens of the thought; once they are used up, the closing tokens are the only legal ones.

    Args:
        matcher: of the language; owned by this one.
        budget: what ends the thought, and when.
        closing: the tokens of ``budget.closing``.
        decode: ids to text, special tokens included.
    """

    def __init__(
        self, matcher: Matcher, budget: ThinkingBudget, closing: list[int], decode: Callable[[list[int]], str]
    ) -> None:
        self._matcher = matcher
        self._budget = budget
        self._closing = closing
        self._decode = decode
        self._window = max(len(mark.encode()) for mark in budget.ends)  # a token has a byte or more
        self._tokens: list[int] = []
        # Behind each token: the phase, and how many tokens of the thought there are.
        self._states = [(WAITING if budget.opener else THINKING, 0)]

    def allowed(self) -> Tensor:
        """``[V]`` bool: as the language has it, but nothing else than the closing tokens behind the budget."""
        mask = self._matcher.allowed()
        phase, length = self._states[-1]
        if phase != THINKING or length < self._budget.tokens:
            return mask
        token = self._closing[length - self._budget.tokens]
        only = torch.zeros_like(mask)
        only[token] = mask[token]
        return only

    def advance(self, token: int) -> bool:
        """Take one token; False, and no change, where it is not allowed."""
        phase, length = self._states[-1]
        beyond = length - self._budget.tokens
        if phase == THINKING and beyond >= 0 and token != self._closing[beyond]:
            return False
        if not self._matcher.advance(token):
            return False
        self._tokens.append(token)
        self._states.append(self._state_after(phase, length))
        return True

    def rewind(self, count: int) -> None:
        """Undo the last ``count`` advances."""
        self._matcher.rewind(count)
        if count:
            del self._tokens[-count:], self._states[-count:]

    def is_complete(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        return self._matcher.is_complete()

    def _state_after(self, phase: int, length: int) -> tuple[int, int]:
        if phase == WAITING:
            text, opener = self._decode(self._tokens), self._budget.opener
            return (THINKING if text.startswith(opener) else WAITING if opener.startswith(text) else OVER), 0
        if phase == THINKING:
            recent = self._decode(self._tokens[-self._window :])
            is_closed = length + 1 == self._budget.tokens + len(self._closing)
            if not is_closed and not any(end in recent for end in self._budget.ends):
                return THINKING, length + 1
        return OVER, 0
