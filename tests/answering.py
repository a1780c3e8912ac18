"""A model that answers right: what it wants to say follows from the conversation, by rules that a test writes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from scripted import tokenizer
from torch import Tensor

from agentspec import Cascade, LocalEngine, PromptLookupDrafter, SpeculativeDecoder

OPENING = "<|im_start|>assistant\n"
Rule = tuple[str, str | Callable[[re.Match[str]], str]]
"""A pattern of the conversation since the last question or result, and the answer."""


class AnsweringModel:
    """Scores that insist on the answer to the last turn of a conversation in ChatML; it knows what it has read."""

    max_context = 100_000
    max_rows = 64

    def __init__(self, known: Any, rules: Sequence[Rule]) -> None:
        self.vocab_size = len(known)
        self._known, self._rules = known, rules
        self._opening: list[int] = known.encode(OPENING)
        self._end = known.convert_tokens_to_ids("<|im_end|>")
        self._scripts: dict[tuple[int, ...], list[int]] = {}
        self._read: list[list[int]] = []
        self.rows: list[int] = []

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        self._read = [*self._read, *contexts][-self.max_rows :]
        if not any(last):
            return torch.zeros(len(contexts), 0, self.vocab_size)
        self.rows.append(len(contexts))
        out = torch.zeros(len(contexts), max(last), self.vocab_size)
        out[..., self._end] = 25.0  # beyond the script, the end
        for b, (context, count) in enumerate(zip(contexts, last, strict=True)):
            begin, script = self._script(context)
            for k in range(count):
                at = len(context) - count + 1 + k - begin
                if 0 <= at < len(script):
                    out[b, k, script[at]] = 50.0
        return out

    def cached_tokens(self, context: list[int]) -> int:
        return max((_shared(context, read) for read in self._read), default=0)

    def _script(self, context: list[int]) -> tuple[int, list[int]]:
        width = len(self._opening)
        ends = [i for i in range(width, len(context) + 1) if context[i - width : i] == self._opening]
        begin = ends[-1]
        prompt = tuple(context[:begin])
        if prompt not in self._scripts:
            text = self._known.decode(list(prompt))
            last_turn = text.split("<|im_start|>")[-2]
            found = ((re.search(pattern, last_turn, re.DOTALL), answer) for pattern, answer in self._rules)
            match, answer = next((m, a) for m, a in found if m)
            said = answer if isinstance(answer, str) else answer(match)
            self._scripts[prompt] = [*self._known.encode(said), self._end]
        return begin, self._scripts[prompt]


def _shared(one: list[int], other: list[int]) -> int:
    """Length of what both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def call(name: str, arguments: str = "{}") -> str:
    """A tool call in the Hermes form."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def answering(rules: Sequence[Rule], template: str = "qwen", **settings: Any) -> tuple[LocalEngine, AnsweringModel]:
    """An engine over a model that answers by rules; the last rule should match anything."""
    known = tokenizer(template)
    model = AnsweringModel(known, rules)
    end = known.convert_tokens_to_ids("<|im_end|>")
    decoder = SpeculativeDecoder(model, Cascade([PromptLookupDrafter()]), 4)
    return LocalEngine(decoder, known, end_tokens=[end], **settings), model
