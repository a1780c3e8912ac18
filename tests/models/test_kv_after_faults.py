"""A pass that fails half-way leaves K and V that later turns can trust."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY

from agentspec import Cascade, CausalLM, LocalEngine, ModelDrafter, Request, SamplingParams, SpeculativeDecoder
from agentspec.models import kv_cache

pytestmark = pytest.mark.usefixtures("one_thread")
ERRORS: dict[str, Callable[[], Exception]] = {
    "RuntimeError": lambda: RuntimeError("trouble"),
    "MemoryError": lambda: MemoryError("trouble"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("trouble"),
}


class Faulty:
    """Raises before or after the call of a module, with some chance, while it is on."""

    def __init__(self, error: Callable[[], Exception], seed: int) -> None:
        self.chance, self.fired = 0.0, 0
        self._error, self._choose = error, random.Random(seed)

    def __call__(self, *_: Any) -> None:
        if self._choose.random() < self.chance:
            self.fired += 1
            raise self._error()


def hooked(model: CausalLM, fault: Faulty) -> CausalLM:
    """Faults within a pass: between layers, and behind the last."""
    layers = model.model.model.layers if hasattr(model.model, "model") else model.model.transformer.h
    layers[0].register_forward_hook(fault)
    layers[-1].register_forward_pre_hook(fault)
    layers[-1].register_forward_hook(fault)
    return model


@pytest.fixture(params=["llama", "gpt2"])
def parts(request: pytest.FixtureRequest) -> tuple[CausalLM, CausalLM]:
    make = ARCHITECTURES[request.param]
    return CausalLM(make(), rows=4), CausalLM(make(seed=1), rows=4)


@pytest.mark.parametrize("error", ERRORS)
def test_turns_on_a_cached_prefix_equal_uncached_ones(parts: tuple[CausalLM, CausalLM], error: str) -> None:
    target, draft = parts
    fault = Faulty(ERRORS[error], seed=len(error))
    hooked(target, fault)
    hooked(draft, fault)
    engine = LocalEngine(SpeculativeDecoder(target, Cascade([ModelDrafter(draft)]), 3), max_running=4)
    choose = random.Random(1)
    turns: list[list[int]] = [[3, 4, 5]]
    failed = 0
    for turn in range(14):
        prompts = [choose.choice(turns)[:100] + [choose.randrange(3, VOCABULARY)] * (1 + turn % 3) for _ in range(3)]
        requests = [Request(p, SamplingParams(temperature=0, max_tokens=6), acceptance="coupled") for p in prompts]
        fault.chance = 0.05
        for asked in requests:
            try:
                engine.generate([asked])
            except (RuntimeError, MemoryError):
                failed += 1
        fault.chance = 0.0
        for model in parts:
            model.kv.check_integrity()
        for asked, [found] in zip(requests, engine.generate(requests), strict=True):
            fresh = uncached(target, list(asked.prompt), 6)
            assert list(found.tokens) == fresh
            turns.append([*asked.prompt, *found.tokens])
    engine.close()
    assert fault.fired > 5


@torch.no_grad()
def uncached(model: CausalLM, context: list[int], count: int) -> list[int]:
    """Greedy tokens by plain forwards over the whole context."""
    start = len(context)
    for _ in range(count):
        context = [*context, int(model.model(torch.tensor([context]), use_cache=False).logits[0, -1].argmax())]
    return context[start:]


def test_memory_that_runs_out_while_k_and_v_move_is_a_failure_of_its_request(
    parts: tuple[CausalLM, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = parts
    engine = LocalEngine(SpeculativeDecoder(target), max_running=4)
    short = Request([3, 4, 5], SamplingParams(temperature=0, max_tokens=5))
    [[before]] = engine.generate([short])
    plain, left = kv_cache.zeros, 1

    def zeros(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("no more")
        return plain(*arguments)

    target.kv.clear()
    monkeypatch.setattr(kv_cache, "zeros", zeros)
    with pytest.raises(MemoryError):
        engine.generate([Request([3] * 200, SamplingParams(max_tokens=5))])
    monkeypatch.setattr(kv_cache, "zeros", plain)
    [[after]] = engine.generate([short])
    assert after.tokens == before.tokens
    target.kv.check_integrity()
    engine.close()
