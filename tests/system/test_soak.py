"""Two thousand requests of all kinds, some cancelled, one round in a hundred failing: everyone gets what is theirs."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scripted import tokenizer
from tiny import llama
from torch import Tensor

from agentspec import (
    Cascade,
    CausalLM,
    Grammar,
    InvalidRequestError,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)

pytestmark = pytest.mark.usefixtures("one_thread")

REQUESTS, FAULTS = 2000, 0.01
KNOWN = tokenizer()
SCHEMA = Grammar.json_schema(
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer"}}, "required": ["a"]}
)


class Faulty(CausalLM):
    """Fails now and then, before or after it has done its work."""

    chance = 0.0
    faults = 0
    rng = random.Random(7)

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        if any(last) and self.rng.random() < self.chance / 2:
            self.faults += 1
            raise RuntimeError("a fault before the pass")
        logits = super().next_logits(contexts, last)
        if any(last) and self.rng.random() < self.chance / 2:
            self.faults += 1
            raise RuntimeError("a fault behind the pass")
        return logits


def leaves_nothing(prefix: list[int], logits: Tensor) -> Tensor:
    return torch.full_like(logits, -torch.inf)


KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "greedy": {"params": {"temperature": 0.0}},
    "stop": {"params": {"stop": ("e", "th")}},
    "samples": {"n": 3},
    "schema": {"grammar": SCHEMA, "params": {"max_tokens": 20}},
    "choice": {"grammar": Grammar.choice(["yes", "no", "maybe so"])},
    "top-p": {"params": {"top_p": 0.7, "logprobs": 1}},
    "penalties": {"params": {"frequency_penalty": 0.5}},
    "plain": {"gamma": 0},
    "impossible": {"params": {"logits_processor": (leaves_nothing,)}},
}


def request_of(kind: str, seed: int) -> Request:
    made = {**KINDS[kind]}
    params = {"max_tokens": 4 + seed % 9, "seed": seed, **made.pop("params", {})}
    prompt = KNOWN.encode("Say: One, two, three. " * (1 + seed % 4) + str(seed % 5))
    return Request(prompt, SamplingParams(**params), acceptance="coupled", **made)


def results(engine: LocalEngine, request: Request) -> Any:
    try:
        [samples] = engine.generate([request])
    except InvalidRequestError:
        return "impossible"
    return [(sample.tokens, sample.text, str(sample.finish_reason)) for sample in samples]


def gathered(deltas: list[Any], n: int) -> Any:
    return [
        (
            tuple(token for d in deltas if d.index == i for token in d.tokens),
            "".join(d.text for d in deltas if d.index == i),
            next(str(d.finish_reason) for d in deltas if d.index == i and d.finish_reason),
        )
        for i in range(n)
    ]


@pytest.mark.soak
def test_a_long_day() -> None:
    target = Faulty(llama(vocab_size=len(KNOWN)), rows=8)
    draft = CausalLM(llama(seed=1, vocab_size=len(KNOWN)), rows=8)
    drafter = Cascade([PromptLookupDrafter(), ModelDrafter(draft)])
    engine = LocalEngine(SpeculativeDecoder(target, drafter, 3), KNOWN)
    known = [(kind, seed) for kind in KINDS for seed in range(8)]
    expected = {named: results(engine, request_of(*named)) for named in known}
    assert sum(value == "impossible" for value in expected.values()) == 8

    target.chance = FAULTS
    outcomes: Counter[str] = Counter()
    wrong: list[Any] = []

    def settle(named: tuple[str, int], found: Any) -> None:
        outcomes["right" if found == expected[named] else "wrong"] += 1
        if found != expected[named]:
            wrong.append((named, found))

    def ask(numbers: range) -> None:
        """Whole, streamed, or streamed and left early."""
        chosen = random.Random(numbers.start)
        for _ in numbers:
            named, way = chosen.choice(known), chosen.random()
            request = request_of(*named)
            try:
                if way < 0.5:
                    settle(named, results(engine, request))
                    continue
                stream = engine.stream(request)
                if way < 0.6:
                    next(stream)
                    stream.close()  # type: ignore[attr-defined]
                    outcomes["left"] += 1
                    continue
                settle(named, gathered(list(stream), request.n))
            except InvalidRequestError:
                settle(named, "impossible")
            except RuntimeError as error:
                outcomes["fault" if "a fault" in str(error) else "other"] += 1

    async def ask_in_tasks(count: int) -> None:
        chosen = random.Random(99)

        async def one(named: tuple[str, int], patience: float | None) -> None:
            request = request_of(*named)
            try:
                async with asyncio.timeout(patience):
                    settle(named, gathered([delta async for delta in engine.astream(request)], request.n))
            except TimeoutError:
                outcomes["left"] += 1
            except InvalidRequestError:
                settle(named, "impossible")
            except RuntimeError as error:
                outcomes["fault" if "a fault" in str(error) else "other"] += 1

        for _ in range(count // 20):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    patience = 0.01 if chosen.random() < 0.1 else None
                    group.create_task(one(chosen.choice(known), patience))

    share = REQUESTS // 10
    threads = [threading.Thread(target=ask, args=(range(i * share, (i + 1) * share),)) for i in range(8)]
    threads.append(threading.Thread(target=lambda: asyncio.run(ask_in_tasks(2 * share))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=500)
    assert not any(thread.is_alive() for thread in threads)

    assert sum(outcomes.values()) == REQUESTS
    assert not wrong, wrong[:3]
    assert outcomes["other"] == 0
    assert target.faults > 0
    assert outcomes["fault"] > 0
    assert outcomes["left"] > 50
    assert outcomes["right"] > REQUESTS / 2
    print(f"\nsoak: {REQUESTS} requests, {target.faults} faults in rounds, {dict(outcomes)}")

    target.chance = 0.0
    assert all(results(engine, request_of(*named)) == expected[named] for named in known[::7])
    for model in (target, draft):
        model.kv.check_integrity()
        assert len(model.kv) <= 8
    scheduler = engine._scheduler
    engine.close()
    assert not scheduler._running
    assert not scheduler._waiting
    assert scheduler._thread is not None
    assert not scheduler._thread.is_alive()
