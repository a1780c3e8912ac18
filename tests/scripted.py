"""A model that says what a test wants it to say, over a small tokenizer: boundaries fall where the test puts them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from inputs import PROMPTS, ROWS, written_call
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentspec import Batch, Draft, Drafter
from agentspec.drafters import DraftBudget
from agentspec.grammars import GrammarCursor

QUESTION = "What time is it?"
Says = Callable[..., Any]
"""Makes a chat model that wants to answer the question in certain words."""

END = "<|end|>"
SPECIAL = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[ARGS]",
)
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = [
    'The weather in Zürich is sunny. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} and so on.',
    "Let me think about it, step by step.\n\nThe answer is yes. One, two, three, four, five, six, seven.\n",
    '{"name": "now", "parameters": {}} {"ok": true, "items": ["a", "b"], "count": 12, "note": null}',
]


def template_text(name: str) -> str:
    """A chat template that is kept beside the tests."""
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text()


@functools.cache
def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 2,000 tokens, digits apart, with ChatML's marks: the embedded model's, but small. Do not change
    it: tests share it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"],
        show_progress=False,
    )
    calls = [written_call(name, arguments) for _, _, name, arguments in ROWS]
    tools = [json.dumps(offered, ensure_ascii=False) for _, offered, _, _ in ROWS]
    backend.train_from_iterator([*PROMPTS, *calls, *tools, *CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
        chat_template=template_text("chatml"),
    )


def tokenizer(template: str = "", *, tags_are_tokens: bool = True) -> Any:
    """Byte-level BPE of some 400 tokens; ``<think>`` and its like are tokens of their own, or spelled out."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    special = [END, *SPECIAL, *MISTRAL, *(HARMONY if template == "harmony" else ())]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    end = "<|return|>" if template == "harmony" else END
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[0], eos_token=end, clean_up_tokenization_spaces=False
    )
    if tags_are_tokens:
        made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    if template:
        made.chat_template = template_text(template)
    return made


class ScriptedModel:
    """Scores depend on the last token, and favour one token at every position.

    Args:
        vocab_size: V.
        start: length of the prompt.
        script: what it wants to say behind it.
        favour: added to the logits of the script; large to insist, small to be drawn from.
    """

    def __init__(self, vocab_size: int, start: int, script: Sequence[int], favour: float = 50.0, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self._start, self._script, self._favour = start, list(script), favour
        generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(vocab_size, vocab_size, generator=generator)

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        out = torch.zeros(len(contexts), max(last), self.vocab_size)
        for b, (context, count) in enumerate(zip(contexts, last, strict=True)):
            for k in range(count):
                length = len(context) - count + 1 + k
                out[b, k] = self._table[context[length - 1]]
                at = length - self._start
                if 0 <= at < len(self._script):
                    out[b, k, self._script[at]] += self._favour
        return out


class Oracle(Drafter):
    """Drafts the tokens that plain decoding gave, ``first`` of them in the first round; from some index on, others.

    A drafter may propose anything that is a function of the context; here it is one of the position.
    """

    name = "oracle"

    def __init__(self, start: int, tokens: Sequence[int], first: int, wrong_from: int | None = None) -> None:
        self._start, self._tokens, self._first = start, list(tokens), first
        self._wrong_from = wrong_from

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        proposed = []
        for row, count in enumerate(budget.of(self.name)):
            at = len(cursor.context(row)) - self._start
            count = min(self._first if at == 0 else count, count)
            tokens = self._tokens[at : at + count]
            # Beyond the end of the text, whatever: nothing there may be emitted.
            tokens += [(at + i) % 7 for i in range(len(tokens), count)]
            if self._wrong_from is not None:
                tokens = [(t + 1) % 256 if i >= self._wrong_from else t for i, t in enumerate(tokens)]
            proposed.append(tokens)
        return Draft.of_tokens(proposed, self.name, batch.device)
