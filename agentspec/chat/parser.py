"""What an answer is taken apart into, and what every parser of answers does."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]
"""A chat message in OpenAI's form, the arguments of its calls being dicts."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made.

    Args:
        name: of the tool.
        arguments: JSON text; of a call cut short, all the text it got to.
        is_complete: whether it was written to its end.
        id: where the model writes one.
        invalid: why the arguments do not satisfy the tool's schema, where that was checked; None where they do.
    """

    name: str
    arguments: str
    is_complete: bool = True
    id: str | None = None
    invalid: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether it is whole and nothing is wrong with it."""
        return self.is_complete and self.invalid is None


@dataclass(frozen=True)
class Piece:
    """What is new in an answer and surely what it seems to be."""

    text: str = ""
    reasoning: str = ""


class Parser(Protocol):
    """Takes an answer apart."""

    def push(self, text: str) -> Piece:
        """Take more text."""
        ...

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """Return the rest of the answer, and its calls."""
        ...


class Trimmed:
    """Text in pieces, without certain characters at its two ends."""

    def __init__(self, characters: str | None = None) -> None:
        self._characters = characters
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        """Take more text; return what is surely inside."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip(self._characters)
        shown = text.rstrip(self._characters)
        self._begun, self._held = self._begun or bool(shown), text[len(shown) :]
        return shown


def end_of_value(text: str, at: int) -> int | None:
    """Return where the JSON value that begins at ``at`` ends; None where it is cut short."""
    try:
        return json.JSONDecoder().raw_decode(text, at)[1]
    except json.JSONDecodeError:
        return None
