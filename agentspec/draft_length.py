"""How many tokens to draft: the gamma of each row of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from agentspec.errors import InvalidRequestError
from agentspec.sequence import Batch


class DraftLength(Protocol):
    """Chooses gamma from what is known before anything is drawn."""

    def __call__(self, batch: Batch) -> list[int]:
        """Gamma of each row; 0 decodes it plainly."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same gamma for every row, but for rows whose request names its own. Never past the row's last token.

    Raises:
        InvalidRequestError: for a negative gamma.
    """

    gamma: int

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise InvalidRequestError(f"gamma is the number of tokens to draft, 0 or more; got {self.gamma}.")

    def __call__(self, batch: Batch) -> list[int]:
        """Gamma of each row. The last token a row may emit is the target's own, so it is not drafted."""
        return [min(self.gamma if s.gamma is None else s.gamma, s.remaining - 1) for s in batch.sequences]
