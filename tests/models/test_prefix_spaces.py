"""Engines over tokenizers that put a space before a text: what comes out is in the language, to the first byte."""

from __future__ import annotations

import foreign_tokenizers as foreign
import pytest
import torch
from torch import Tensor

from agentspec import Grammar, LocalEngine, Request, SamplingParams, SpeculativeDecoder

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
GRAMMARS = {
    "choice": (Grammar.choice(["yes", "no", " yes", "  no"]), ["yes", "no", " yes", "  no"]),
    "space": (Grammar.choice([" yes"]), [" yes"]),
    "spaces": (Grammar.regex(" {2}yes"), ["  yes"]),
    "schema": (Grammar.json_schema({"enum": [" yes", "no"]}), ['" yes"', '"no"']),
    "tools": (Grammar.tools([TOOL]), [CALL]),
    "forced": (Grammar.lark('start: " yes" " no"'), [" yes no"]),
}


class Random:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(len, contexts)))
        return torch.randn(len(contexts), max(last), self.vocab_size, generator=generator)


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    ("model", "normalizer", "pre_tokenizer"),
    [
        ("bpe", "none", "Metaspace-first-False"),
        ("bpe", "none", "Metaspace-always-True"),
        ("bpe", "Llama", "none"),
        ("bpe", "T5", "Metaspace-always-True"),
        ("unigram", "NFKC", "Metaspace-always-True"),
        ("bpe-bytes", "none", "ByteLevel-True-True"),
    ],
)
def test_the_text_of_an_answer_is_in_the_language(model: str, normalizer: str, pre_tokenizer: str, name: str) -> None:
    tokenizer = foreign.make(model, normalizer, pre_tokenizer)
    grammar, texts = GRAMMARS[name]
    engine = LocalEngine(SpeculativeDecoder(Random(len(tokenizer))), tokenizer)
    try:
        for seed in range(3):
            request = Request([1], SamplingParams(seed=seed, max_tokens=200), grammar)
            [[answer]] = engine.generate([request])
            assert answer.text in texts
            assert "".join(delta.text for delta in engine.stream(request)) in texts
    finally:
        engine.close()


@pytest.mark.parametrize("grammar", [None, Grammar.tools([TOOL], required=False)], ids=["alone", "beside tools"])
def test_a_free_text_is_decoded_as_the_tokenizer_does(grammar: Grammar | None) -> None:
    tokenizer = foreign.make("bpe", "none", "Metaspace-first-False")
    engine = LocalEngine(SpeculativeDecoder(Random(len(tokenizer))), tokenizer)
    [[answer]] = engine.generate([Request([1], SamplingParams(seed=1, max_tokens=20), grammar)])
    engine.close()
    assert answer.text
    assert answer.text == tokenizer.decode(answer.tokens, skip_special_tokens=True)
