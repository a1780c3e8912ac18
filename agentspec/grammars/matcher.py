"""The grammar state of one sequence: what a grammar engine implements."""

from __future__ import annotations

from typing import Protocol

from agentspec.grammars.token_mask import TokenMask


class Matcher(Protocol):
    """The state of a grammar after some tokens. End tokens are not its business. Engines inherit from it."""

    def token_mask(self) -> TokenMask:
        """The tokens that may come next."""
        ...

    def accept_token(self, token: int) -> bool:
        """Take one token; False, and no change, where it is not allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` advances."""
        ...

    def is_accepting(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        ...

    # What an engine may know without a mask:

    def forced(self) -> int | None:
        """The token that has to come next; None where there is a choice."""
        return self.token_mask().single_token

    def is_terminated(self) -> bool:
        """Whether the text so far is a whole sentence, and no token may come next."""
        return self.is_accepting() and self.token_mask().is_empty
