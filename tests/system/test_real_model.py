"""The embedded model itself, float32 on the CPU: speculation changes no id, and constrained calls are always valid."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from effort import effort
from inputs import PROMPTS, ROWS
from scripted import template_text
from tiny import llama

from agentspec import (
    Cascade,
    CausalLM,
    Drafter,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.chat import AnswerParser, ChatFormat
from agentspec.models.backends.native import compiles
from agentspec.sampling import warp

pytestmark = pytest.mark.embedded

NEW_TOKENS = 32


def drafters(vocab_size: int) -> dict[str, Drafter]:
    """Look-up, a draft model that is nearly always wrong, and both in a cascade."""
    wrong = ModelDrafter(CausalLM(llama(vocab_size=vocab_size)))
    return {"lookup": PromptLookupDrafter(), "model": wrong, "cascade": Cascade([PromptLookupDrafter(), wrong])}


@pytest.fixture(scope="module")
def prompts(embedded_model: tuple[CausalLM, Any]) -> list[list[int]]:
    """40 prompts as chat turns, the shortest first."""
    chat = ChatFormat(embedded_model[1])
    return sorted((chat.render([{"role": "user", "content": prompt}]) for prompt in PROMPTS), key=len)


@pytest.fixture
def engine(embedded_model: tuple[CausalLM, Any]) -> Iterator[LocalEngine]:
    target, tokenizer = embedded_model
    engine = LocalEngine(SpeculativeDecoder(target, Cascade([PromptLookupDrafter()]), gamma=4), tokenizer)
    yield engine
    engine.close()


@pytest.mark.whole
def test_greedy_ids_equal_those_of_transformers_generate(
    embedded_model: tuple[CausalLM, Any],
    engine: LocalEngine,
    prompts: list[list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, tokenizer = embedded_model
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    prompts = prompts[:: effort(quick=4, whole=1)]
    ours = [samples[0].tokens for samples in engine.generate([Request(prompt, params) for prompt in prompts])]
    compared = 0
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        generated = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        assert list(tokens) == generated[0, len(prompt) :].tolist()
        compared += len(tokens)
    with capsys.disabled():
        print(
            f"\ngreedy ids equal to those of transformers generate: {compared} on {len(prompts)} prompts, 0 mismatches"
        )
    assert compared > 15 * len(prompts)


@pytest.mark.parametrize("name", ["lookup", "model", "cascade"])
def test_coupled_text_does_not_depend_on_speculation(
    embedded_model: tuple[CausalLM, Any], prompts: list[list[int]], name: str
) -> None:
    target, tokenizer = embedded_model
    engine = LocalEngine(SpeculativeDecoder(target, drafters(target.vocab_size)[name], acceptance="coupled"), tokenizer)
    texts = {}
    for gamma in (0, 1, 4, 8):
        requests = [
            Request(prompt, SamplingParams(temperature=1, seed=seed, max_tokens=24), gamma=gamma)
            for seed, prompt in enumerate(prompts[:4])
        ]
        texts[gamma] = [samples[0].tokens for samples in engine.generate(requests)]
    engine.close()
    assert len(set(texts[0])) == 4
    assert texts[1] == texts[0]
    assert texts[4] == texts[0]
    assert texts[8] == texts[0]


@pytest.mark.whole
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_every_finished_tool_call_validates(
    engine: LocalEngine, embedded_model: tuple[CausalLM, Any], temperature: float
) -> None:
    """A call demanded: what finishes is a call of an offered tool with valid arguments."""
    chat = ChatFormat(embedded_model[1])
    rows = [
        ([{"role": "user", "content": question}], tools)
        for question, tools, _, _ in effort(quick=ROWS[::3], whole=ROWS)
    ]
    requests = [
        Request(
            chat.render(messages, tools),
            SamplingParams(temperature=temperature, seed=seed, max_tokens=120),
            grammar=chat.answer_grammar(tools, required=True),
        )
        for seed, (messages, tools) in enumerate(rows)
    ]
    finished = 0
    for (_, tools), samples in zip(rows, engine.generate(requests), strict=True):
        parser = AnswerParser(chat.form)
        assert parser.push(samples[0].text).text == ""
        _, [call] = parser.finish()
        assert call.is_complete == (samples[0].finish_reason == "stop")
        if call.is_complete:
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            finished += 1
    assert finished >= len(rows) // 2


def test_forced_tokens_save_target_calls(engine: LocalEngine, embedded_model: tuple[CausalLM, Any]) -> None:
    chat = ChatFormat(embedded_model[1])
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    prompt = chat.render([{"role": "user", "content": "What is the weather in Paris?"}], [tool])
    grammar = chat.answer_grammar([tool], required=True)
    params = SamplingParams(temperature=0, max_tokens=64)
    [[plain], [fast]] = engine.generate([Request(prompt, params, grammar, gamma=gamma) for gamma in (0, 4)])
    assert (
        fast.text == plain.text == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    )
    assert plain.stats.target_calls == len(plain.tokens)
    assert fast.stats.target_calls * 3 <= plain.stats.target_calls


def test_the_next_turn_finds_the_last_one_in_the_cache(
    engine: LocalEngine, embedded_model: tuple[CausalLM, Any]
) -> None:
    chat = ChatFormat(embedded_model[1])
    first = [{"role": "user", "content": "Name a colour."}]
    [[answer]] = engine.generate([Request(chat.render(first), SamplingParams(temperature=0, max_tokens=40))])
    second = [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "Another."}]
    prompt = chat.render(second)
    [[again]] = engine.generate([Request(prompt, SamplingParams(temperature=0, max_tokens=4))])
    assert again.stats.cached_tokens >= len(chat.render(first)) + len(answer.tokens) - 1
    assert prompt[: len(chat.render(first)) + len(answer.tokens)] == chat.render(first) + list(answer.tokens)


@pytest.mark.parametrize("template", [None, "qwen", "qwen3"])
def test_the_turn_behind_a_tool_call_finds_all_of_it_in_the_cache(
    engine: LocalEngine, embedded_model: tuple[CausalLM, Any], template: str | None
) -> None:
    """A call is written as the template renders it back, so the next turn reads no token of it again."""
    tokenizer = copy.copy(embedded_model[1])
    if template is not None:
        tokenizer.chat_template = template_text(template)
    chat = ChatFormat(tokenizer)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "", "parameters": parameters}}]
    history: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Paris?"}]
    prompt = chat.render(history, tools)
    grammar = chat.answer_grammar(tools, required=True)
    [[answer]] = engine.generate([Request(prompt, SamplingParams(temperature=0, max_tokens=60), grammar)])
    parser = chat.parser(prompt, tools)
    parser.push(answer.text)
    _, [call] = parser.finish()
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    history.append({**message, "token_ids": chat.own_ids(answer.text, answer.tokens)})
    history.append({"role": "tool", "content": "sunny"})
    [[again]] = engine.generate([Request(chat.render(history, tools), SamplingParams(temperature=0, max_tokens=2))])
    # The last token of an answer is never fed to the model that said it.
    assert again.stats.cached_tokens >= len(prompt) + len(answer.tokens) - 1


@pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")
def test_scores_are_the_same_bit_by_bit_however_many_are_computed(
    embedded_model: tuple[CausalLM, Any], prompts: list[list[int]]
) -> None:
    """Blocks of all widths, alone and beside others: what speculation verifies is what plain decoding computes."""
    target, _ = embedded_model
    context, other = (prompts[-1] * 8)[:300], prompts[0]
    target.kv.clear()
    plain = torch.cat([target.next_logits([context[:end]], [1]).values[0] for end in range(281, 301)])
    for width in (2, 3, 5, 9, 20):
        for beside in ([], [other]):
            target.kv.clear()
            target.next_logits([context[: 300 - width]], [0])
            found = target.next_logits([context, *beside], [width, *[1] * len(beside)]).values[0]
            assert torch.equal(found[:width], plain[-width:]), (width, len(beside))


class Blurred:
    """A draft that is often right and often wrong: the target's own logits, flattened."""

    def __init__(self, target: CausalLM) -> None:
        self._target = target
        self.vocab_size = target.vocab_size

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> torch.Tensor:
        return 0.5 * self._target.next_logits(contexts, last).values


@pytest.mark.parametrize("settings", [{"temperature": 1.2, "top_k": 4}, {"temperature": 0.9, "top_p": 0.6, "top_k": 8}])
def test_drawn_texts_have_the_distribution_of_the_model(
    embedded_model: tuple[CausalLM, Any], settings: dict[str, Any]
) -> None:
    """Chi-square over all pairs of tokens, 320 samples, the distribution computed token by token without a drafter."""
    target, tokenizer = embedded_model
    params = SamplingParams(**settings, max_tokens=2)
    prompt = tokenizer.encode("My favourite animal is the")
    engine = LocalEngine(SpeculativeDecoder(target, ModelDrafter(Blurred(target)), gamma=2), tokenizer, end_tokens=())
    [samples] = engine.generate([Request(prompt, dataclasses.replace(params, seed=5), n=320)])
    engine.close()
    assert 0.2 < sum(s.stats.accepted_tokens for s in samples) / sum(s.stats.drafted_tokens for s in samples) < 0.95
    first = warp(target.next_logits([prompt], [1]).values, [params])[0, 0]
    probs = {}
    for one in first.nonzero().flatten().tolist():
        second = warp(target.next_logits([[*prompt, one]], [1]).values, [params])[0, 0]
        probs |= {(one, two): float(first[one] * second[two]) for two in second.nonzero().flatten().tolist()}
    found = Counter(sample.tokens for sample in samples)
    assert found.keys() <= probs.keys()
    common = [pair for pair, p in probs.items() if p * len(samples) >= 5]
    cells = [(found[pair], probs[pair] * len(samples)) for pair in common]
    rest = sum(found.values()) - sum(count for count, _ in cells), len(samples) - sum(mean for _, mean in cells)
    statistic = sum((count - mean) ** 2 / mean for count, mean in [*cells, rest] if mean > 1e-9)
    degrees = len(cells)
    assert degrees >= 4
    # The 99.99 % point by Wilson and Hilferty.
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
