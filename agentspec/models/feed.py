"""`Feed`: what a pass reads of one context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feed:
    """What the model still has to read of one context: ``tokens``, from slot ``start`` of KV row ``row`` on."""

    context: int
    row: int
    start: int
    tokens: list[int]
    last: int

    @property
    def unasked(self) -> int:
        """Leading tokens whose logits are not requested."""
        return len(self.tokens) - self.last
