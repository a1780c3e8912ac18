"""`Matcher`: the grammar state of one sequence, which a grammar engine implements."""

from __future__ import annotations

from typing import Protocol

from agentspec.grammars.token_mask import TokenMask


class Matcher(Protocol):
    """The state of a grammar after some tokens; knows nothing of end tokens. Engines inherit from it."""

    def token_mask(self) -> TokenMask:
        """Return the mask of the tokens that may come next."""
        ...

    def accept_token(self, token: int) -> bool:
        """Move past a token if it is legal, else change nothing; return whether it is."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` accepted tokens."""
        ...

    def is_accepting(self) -> bool:
        """Return whether the text so far is a sentence of the grammar."""
        ...

    # Questions that an engine may answer without a mask.

    def forced(self) -> int | None:
        """Return the only legal token.

        None where there are several or none, or where only a mask would show that there is one.
        """
        return self.token_mask().single_token

    def is_terminated(self) -> bool:
        """Return whether the text so far is a sentence of the grammar that no token can continue."""
        return self.is_accepting() and self.token_mask().is_empty
