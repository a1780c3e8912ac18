"""`BudgetedMatcher`: a matcher of a language that begins with reasoning, which bounds the reasoning's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentspec.grammars.grammar import ThinkingBudget
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.token_mask import TokenMask

WAITING, THINKING, OVER = range(3)


@dataclass(frozen=True)
class _State:
    """The phase of a text, its tokens of reasoning, and how many closing tokens are written."""

    phase: int
    length: int = 0
    closed: int = 0


class BudgetedMatcher(Matcher):
    """A matcher in which only the closing tokens are legal once the budget is spent.

    Args:
        matcher: of the language; owned by this one.
        budget: the most tokens of reasoning, and the texts around it.
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
        self._window = max(len(mark.encode()) for mark in budget.ends)  # in tokens: each has a byte or more
        self._tokens: list[int] = []
        self._states = [_State(WAITING if budget.opener else THINKING)]  # the last one after all tokens

    def token_mask(self) -> TokenMask:
        """Return the mask of the language; once the budget is spent, that of the next closing token."""
        mask = self._matcher.token_mask()
        token = self._due(mask)
        return mask if token is None else TokenMask.empty(mask.size).with_tokens([token], legal=token in mask)

    def forced(self) -> int | None:
        """Return the only legal token; a mask is made only where the budget is spent."""
        return self.token_mask().single_token if self._is_spent() else self._matcher.forced()

    def accept_token(self, token: int) -> bool:
        """Move past a token if it is legal, else change nothing; return whether it is."""
        due = self._due(self._matcher.token_mask()) if self._is_spent() else None
        if (due is not None and token != due) or not self._matcher.accept_token(token):
            return False
        self._tokens.append(token)
        self._states.append(self._state_after(self._states[-1], closes=due is not None))
        return True

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        self._matcher.rollback(count)
        if count:
            del self._tokens[-count:], self._states[-count:]

    def is_accepting(self) -> bool:
        """Return whether the text so far is a sentence of the grammar whose reasoning has ended in time."""
        return not self._is_spent() and self._matcher.is_accepting()

    def is_terminated(self) -> bool:
        """Return whether the text so far is such a sentence that no token can continue."""
        return not self._is_spent() and self._matcher.is_terminated()

    def _is_spent(self) -> bool:
        """Return whether the budget is spent and the reasoning has not ended."""
        state = self._states[-1]
        return state.phase == THINKING and state.length >= self._budget.tokens

    def _due(self, mask: TokenMask) -> int | None:
        """Return the closing token that is forced.

        Inside a character none can begin: the character is completed first, and ``None`` leaves that to the language.
        """
        closed = self._states[-1].closed
        if not self._is_spent() or (closed == 0 and self._closing[0] not in mask):
            return None
        return self._closing[closed]

    def _state_after(self, state: _State, *, closes: bool) -> _State:
        if state.phase == WAITING:
            text, opener = self._decode(self._tokens).lstrip("\n"), self._budget.opener
            return _State(THINKING if text.startswith(opener) else WAITING if opener.startswith(text) else OVER)
        if state.phase == THINKING:
            recent = self._decode(self._tokens[-self._window :])
            closed = state.closed + closes
            if closed < len(self._closing) and not any(end in recent for end in self._budget.ends):
                return _State(THINKING, state.length + 1, closed)
        return _State(OVER)
