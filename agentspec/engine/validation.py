"""Check the finished texts of a request against its JSON Schema."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict

from agentspec.engine.request import Request
from agentspec.engine.state import Delta
from agentspec.grammars.schema_tools.validator import validator
from agentspec.sequence import FinishReason


class Check:
    """Compares the finished texts of a request with its JSON Schema, where that is asked for.

    Raises:
        GrammarError: for a schema that is none.
    """

    def __init__(self, request: Request) -> None:
        wanted = request.validate and request.grammar is not None
        self._why_invalid = validator(request.grammar.source) if wanted and request.grammar else None
        self._texts: defaultdict[int, str] = defaultdict(str)

    def __call__(self, delta: Delta) -> Delta:
        """The delta; on a sample's last one, with what is wrong. A text cut short says so by its finish reason."""
        if self._why_invalid is None:
            return delta
        self._texts[delta.index] += delta.text
        if delta.finish_reason is not FinishReason.STOP:
            return delta
        return dataclasses.replace(delta, invalid=self._why_invalid(self._texts[delta.index]))

    async def in_thread(self, delta: Delta) -> Delta:
        """The same for an event loop, which no long check may block: a pattern takes seconds at worst."""
        if self._why_invalid is None or delta.finish_reason is not FinishReason.STOP:
            return self(delta)
        return await asyncio.to_thread(self, delta)
