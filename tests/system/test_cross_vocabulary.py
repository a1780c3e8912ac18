"""The embedded model with drafts of another tokenizer: a wrong draft changes nothing, a likely one is often right."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_cross_vocabulary_drafts import OTHER_CORPUS, bpe, plain_ids
from tiny import llama
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from agentspec import CausalLM, LocalEngine, ModelDrafter, Request, SamplingParams, SpeculativeDecoder
from agentspec.models.cross_vocab.mapping import VocabMapping
from agentspec.models.cross_vocab.model import CrossVocabModel


@pytest.mark.embedded
def test_the_embedded_model_with_a_draft_of_another_tokenizer(embedded_model: tuple[CausalLM, Any]) -> None:
    """A wrong draft changes nothing; the model itself, without the longer half of its tokens, is often right."""
    target, tokenizer = embedded_model
    theirs = bpe(OTHER_CORPUS * 3, 350)
    random = CausalLM(llama(2, vocab_size=len(theirs), max_position_embeddings=512))
    wrong = CrossVocabModel(random, VocabMapping(tokenizer, theirs))
    known = CrossVocabModel(target, VocabMapping(tokenizer, fewer_merges(tokenizer, 20_000)))
    text = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    request = Request(plain_ids(tokenizer, text), SamplingParams(temperature=0, max_tokens=32))
    found = {}
    for name, draft in {"none": None, "wrong": wrong, "known": known}.items():
        drafter = None if draft is None else ModelDrafter(draft)
        engine = LocalEngine(SpeculativeDecoder(target, drafter, gamma=3), tokenizer)
        found[name] = engine.generate([request])[0][0]
        engine.close()
    assert found["wrong"].tokens == found["known"].tokens == found["none"].tokens
    assert found["wrong"].stats.drafted["model"] > 0
    assert 0.3 < found["known"].stats.accepted["model"] / found["known"].stats.drafted["model"] < 1


def fewer_merges(tokenizer: Any, count: int) -> Any:
    """The tokenizer without all but its first merges; the ids of what is left stay."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = state["model"]["merges"]
    dropped = {"".join(pair) for pair in merges[count:]} - {"".join(pair) for pair in merges[:count]}
    state["model"]["merges"] = merges[:count]
    state["model"]["vocab"] = {token: i for token, i in state["model"]["vocab"].items() if token not in dropped}
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=tokenizer.eos_token)
