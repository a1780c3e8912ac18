"""Check the finished texts of a request against its JSON Schema."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict

from agentspec.engine.request import Delta, Request
from agentspec.grammars.schema_tools.validator import validator
from agentspec.sequence import FinishReason


class Check:
    """Validates the finished texts of a request with ``validate=True``. Construction compiles the schema.

    Raises:
        GrammarError: for an invalid schema.
    """

    def __init__(self, request: Request) -> None:
        grammar = request.grammar if request.validate else None
        self._why_invalid = None if grammar is None else validator(grammar.source)
        self._texts: defaultdict[int, str] = defaultdict(str)

    def __call__(self, delta: Delta) -> Delta:
        """Return the delta; a sample's last one with what is wrong, unless its finish reason says it was cut short."""
        if self._why_invalid is None:
            return delta
        self._texts[delta.index] += delta.text
        if delta.finish_reason is not FinishReason.STOP:
            return delta
        return dataclasses.replace(delta, invalid=self._why_invalid(self._texts[delta.index]))

    async def in_thread(self, delta: Delta) -> Delta:
        """Validate without blocking the event loop: a pattern takes seconds at worst."""
        if self._why_invalid is None or delta.finish_reason is not FinishReason.STOP:
            return self(delta)
        return await asyncio.to_thread(self, delta)
