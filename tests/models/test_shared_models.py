"""Engines that share a model, a draft, a drafter or a decoder say what each says alone."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tiny import llama

from agentspec import (
    Cascade,
    CausalLM,
    LocalEngine,
    ModelDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
    SuffixDrafter,
)
from agentspec.runtime.threads import lock_of

pytestmark = pytest.mark.usefixtures("one_thread")
Decoders = list[SpeculativeDecoder]


def _one_target() -> Decoders:
    target = CausalLM(llama(), rows=4)
    return [SpeculativeDecoder(target) for _ in range(3)]


def _two_objects_over_one_module() -> Decoders:
    module = llama()
    return [SpeculativeDecoder(CausalLM(module, rows=4)) for _ in range(3)]


def _one_draft() -> Decoders:
    draft = CausalLM(llama(seed=1), rows=4)
    return [SpeculativeDecoder(CausalLM(llama(), rows=4), ModelDrafter(draft), 3) for _ in range(2)]


def _target_of_one_is_draft_of_another() -> Decoders:
    one, other = CausalLM(llama(), rows=4), CausalLM(llama(seed=1), rows=4)
    return [SpeculativeDecoder(one, ModelDrafter(other), 3), SpeculativeDecoder(other, ModelDrafter(one), 3)]


def _target_is_its_own_draft() -> Decoders:
    target = CausalLM(llama(), rows=4)
    return [SpeculativeDecoder(target, ModelDrafter(target), 3) for _ in range(2)]


def _one_drafter() -> Decoders:
    drafter = SuffixDrafter(scope="engine", memory=2000)
    target = CausalLM(llama(), rows=4)
    return [SpeculativeDecoder(target, Cascade([drafter]), 4) for _ in range(3)]


def _one_decoder() -> Decoders:
    target, draft = CausalLM(llama(), rows=4), CausalLM(llama(seed=1), rows=4)
    return [SpeculativeDecoder(target, Cascade([SuffixDrafter(), ModelDrafter(draft)]), 3)] * 3


SHARED: dict[str, Callable[[], Decoders]] = {
    made.__name__.strip("_"): made
    for made in (
        _one_target,
        _two_objects_over_one_module,
        _one_draft,
        _target_of_one_is_draft_of_another,
        _target_is_its_own_draft,
        _one_drafter,
        _one_decoder,
    )
}


def request(index: int) -> Request:
    return Request(
        [3 + index % 5] * (1 + index % 17),
        SamplingParams(temperature=index % 2, seed=index, max_tokens=6 + index % 5),
        acceptance="coupled",
    )


@pytest.mark.parametrize("name", SHARED)
def test_engines_that_share_say_what_each_says_alone(name: str) -> None:
    decoders = SHARED[name]()
    engines = [LocalEngine(decoder) for decoder in decoders]
    asked = [request(index) for index in range(14)]
    expected = [[engine.generate([each])[0][0].tokens for each in asked] for engine in engines]
    wrong: list[Any] = []

    def ask(which: int, first: int) -> None:
        for index in [*range(first, len(asked)), *range(first)]:
            try:
                [[found]] = engines[which].generate([asked[index]])
                if found.tokens != expected[which][index]:
                    wrong.append((which, index))
            except Exception as error:
                wrong.append((which, index, error))

    threads = [
        threading.Thread(target=ask, args=(which, first)) for which in range(len(engines)) for first in (0, 5, 10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for engine in engines:
        engine.close()
    for decoder in decoders:
        decoder.target.kv.check_integrity()  # type: ignore[attr-defined]


def test_a_pass_of_one_engine_waits_for_the_pass_of_another() -> None:
    """Not by luck: who computes holds the module's lock."""
    target = CausalLM(llama(), rows=2)
    inside, most, lock = 0, 0, threading.Lock()

    def enter(*_: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)

    def leave(*_: Any) -> None:
        nonlocal inside
        with lock:
            inside -= 1

    target.model.register_forward_pre_hook(enter)
    target.model.register_forward_hook(leave)
    engines = [LocalEngine(SpeculativeDecoder(target)) for _ in range(3)]
    threads = [
        threading.Thread(target=engine.generate, args=([request(index) for index in range(6)],)) for engine in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with lock_of(target.model):
        waits = threading.Thread(target=target.next_logits, args=([[3, 4]], [1]))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
    waits.join(30)
    assert not waits.is_alive()
    for engine in engines:
        engine.close()


def test_locks_do_not_keep_models_alive() -> None:
    model = CausalLM(llama())
    module = weakref.ref(model.model)
    model.next_logits([[3]], [1])
    del model
    gc.collect()
    assert module() is None
