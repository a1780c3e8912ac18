"""A model that says one script after the other, a turn at a time, in any template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scripted import tokenizer
from torch import Tensor

from agentspec import Cascade, LocalEngine, PromptLookupDrafter, SpeculativeDecoder


class TurnsModel:
    """Scores that insist on the script of a turn; the turn is the number of results in the prompt.

    Args:
        known: the tokenizer.
        scripts: of the turns.
        ends: the special token that ends each.
        opening: stands before an answer.
        result: stands before a tool's result or a question, and in no answer.
    """

    max_context = 100_000
    max_rows = 8

    def __init__(self, known: Any, scripts: Sequence[str], ends: Sequence[str], opening: str, result: str) -> None:
        self.vocab_size = len(known)
        self._known, self._opening, self._result = known, opening, result
        self.scripts = [
            [*known.encode(script, add_special_tokens=False), known.convert_tokens_to_ids(end)]
            for script, end in zip(scripts, ends, strict=True)
        ]
        self.contexts: list[list[int]] = []

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        out = torch.zeros(len(contexts), max(last), self.vocab_size)
        for b, (context, count) in enumerate(zip(contexts, last, strict=True)):
            self.contexts.append(list(context))
            begin, script = self._script(context)
            for k in range(count):
                at = len(context) - count + 1 + k - begin
                if 0 <= at < len(script):
                    out[b, k, script[at]] = 50.0
        return out

    def _script(self, context: list[int]) -> tuple[int, list[int]]:
        opening, result = (self._known.encode(mark, add_special_tokens=False) for mark in (self._opening, self._result))
        results = _places(context, result)
        begin = next((i for i in _places(context, opening) if not results or i > results[-1]), len(context))
        return begin + len(opening), self.scripts[min(len(results), len(self.scripts) - 1)]


def _places(context: list[int], mark: list[int]) -> list[int]:
    return [i for i in range(len(context)) if context[i : i + len(mark)] == mark]


MARKS = {
    "qwen": ("<|im_start|>assistant\n", "<tool_response>\n"),
    "qwen3": ("<|im_start|>assistant\n", "<tool_response>\n"),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|start_header_id|>ipython"),
    "harmony": ("<|start|>assistant", "<|start|>functions"),
}
ENDS = {"llama3": "<|eot_id|>", "harmony": "<|return|>"}


def speaking(template: str, scripts: Sequence[str], ends: Sequence[str] = ()) -> tuple[LocalEngine, TurnsModel]:
    """An engine over a model that says these scripts, turn by turn."""
    known = tokenizer(template)
    end = ENDS.get(template, "<|im_end|>")
    model = TurnsModel(known, scripts, ends or [end] * len(scripts), *MARKS[template])
    decoder = SpeculativeDecoder(model, Cascade([PromptLookupDrafter()]), 4)
    return LocalEngine(decoder, known, end_tokens=[known.convert_tokens_to_ids(end)]), model
