"""Texts of the embedded model under a grammar, by either engine: neither masks nor speculation change an id."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from test_matchers import ENGINES, GRAMMARS, SHOP

from agentspec import (
    Cascade,
    CausalLM,
    Grammar,
    LocalEngine,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)


@pytest.fixture(scope="module")
def engine(embedded_model: tuple[CausalLM, Any]) -> Iterator[LocalEngine]:
    target, tokenizer = embedded_model
    made = LocalEngine(SpeculativeDecoder(target, Cascade([PromptLookupDrafter()])), tokenizer)
    yield made
    made.close()


@pytest.mark.embedded
@pytest.mark.parametrize("name", ENGINES)
def test_best_tokens_without_masks_are_those_of_masked_distributions(engine: LocalEngine, name: Any) -> None:
    """Greedy rounds make no masks, unless log-probabilities are asked for; then whole distributions are made."""
    prompts = [
        "A shop order in JSON:\n",
        'Like {"item": "sofa", "count": 3}:\n',
        "Once upon a time",
        "count: 12, item:",
    ]
    told = {}
    for logprobs in (None, 0):
        settings = SamplingParams(temperature=0, max_tokens=40, logprobs=logprobs)
        requests = [
            Request(engine.tokenizer.encode(prompt), settings, grammar, grammar_engine=name, gamma=gamma)
            for prompt in prompts
            for grammar in (Grammar.json_schema(SHOP), GRAMMARS["choice"])
            for gamma in (0, 5)
        ]
        told[logprobs] = [sample.tokens for [sample] in engine.generate(requests)]
    assert told[None] == told[0]
    assert told[None][::2] == told[None][1::2]  # with speculation and without


@pytest.mark.embedded
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_id(engine: LocalEngine, name: Any, temperature: float) -> None:
    prompt = engine.tokenizer.encode('A shop order in JSON, like {"item": "sofa", "count": 3}:\n')
    texts = {}
    for gamma in (0, 5):
        requests = [
            Request(
                prompt,
                SamplingParams(temperature=temperature, seed=seed, max_tokens=48),
                grammar=Grammar.json_schema(SHOP),
                grammar_engine=name,
                gamma=gamma,
                acceptance="coupled",
            )
            for seed in range(3)
        ]
        texts[gamma] = [samples[0] for samples in engine.generate(requests)]
    assert [sample.tokens for sample in texts[5]] == [sample.tokens for sample in texts[0]]
    assert sum(s.stats.target_calls for s in texts[5]) < sum(s.stats.target_calls for s in texts[0])
    for sample in texts[5]:
        if sample.finish_reason == "stop":
            jsonschema.validate(json.loads(sample.text), SHOP)
