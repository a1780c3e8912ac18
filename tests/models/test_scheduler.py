"""The next round: slots are shared, long prompts stall no round, and a row never depends on the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from enumeration import TableModel
from tiny import llama
from torch import Tensor

from agentspec import (
    Cascade,
    CausalLM,
    InvalidRequestError,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.engine.metrics import Meter
from agentspec.engine.scheduler import Scheduler
from agentspec.engine.state import RequestState
from agentspec.sequence import Sequence


class Watched(TableModel):
    """Remembers which contexts shared each pass, and how many prompt tokens were read between two of them."""

    max_context, max_rows = 10_000, 8

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rounds: list[list[int]] = []
        self.read: list[int] = []
        self._known: list[list[int]] = []

    def cached_tokens(self, context: list[int]) -> int:
        return max((_shared(context, known) for known in self._known), default=0)

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        self.read.append(sum(len(c) - self.cached_tokens(c) for c in contexts))
        self._known = [*self._known, *map(list, contexts)][-64:]
        if not any(last):
            return torch.zeros(len(contexts), 0, self.vocab_size)
        self.rounds.append([context[0] for context in contexts])
        return super().next_logits(contexts, last)


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def request_of(*sequences: Sequence, priority: int = 0) -> tuple[RequestState, list[Any]]:
    told: list[Any] = []
    return RequestState(sequences, told.append, Meter(), priority=priority), told


def sample(first: int, tokens: int = 50, prompt: int = 2) -> Sequence:
    return Sequence([first] * prompt, SamplingParams(max_tokens=tokens), seed=first)


def steps(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.step()


def queue(scheduler: Scheduler, *requests: RequestState) -> None:
    """Without the worker thread: the test turns the loop itself."""
    for request in requests:
        scheduler._waiting.extend(request.sequences)


@pytest.fixture
def model() -> Watched:
    return Watched(5, 1)


def test_no_request_waits_while_another_runs_twice_its_share(model: Watched) -> None:
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=8)
    many, _ = request_of(*(sample(0) for _ in range(20)))
    queue(scheduler, many)
    steps(scheduler, 3)
    assert model.rounds[-1] == [0] * 8
    others = [request_of(sample(first, 10))[0] for first in (1, 2, 3)]
    queue(scheduler, *others)
    steps(scheduler, 2)
    assert sorted(model.rounds[-1]) == [0] * 5 + [1, 2, 3]
    steps(scheduler, 20)
    assert model.rounds[-1] == [0] * 8  # who is done leaves its place
    while scheduler._waiting or scheduler._running:
        scheduler.step()
    assert all(state.sequence.length == 50 for state in many.sequences)


def test_a_request_within_its_share_keeps_its_slots(model: Watched) -> None:
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=4)
    pairs = [request_of(sample(first, 8), sample(first, 8))[0] for first in (0, 1, 2)]
    queue(scheduler, *pairs[:2])
    steps(scheduler, 2)
    queue(scheduler, pairs[2])
    steps(scheduler, 3)
    # Three requests for four places: two are one more than a third has, and less than twice the share.
    assert sorted(model.rounds[-1]) == [0, 0, 1, 1]
    steps(scheduler, 10)
    assert 2 in model.rounds[-1]


def test_slots_go_to_the_request_that_has_fewest_and_to_priority_first(model: Watched) -> None:
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=4)
    queue(scheduler, request_of(*(sample(0) for _ in range(9)))[0], request_of(sample(1), sample(1))[0])
    steps(scheduler, 2)
    assert sorted(model.rounds[-1]) == [0, 0, 1, 1]
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=2)
    queue(scheduler, request_of(sample(0), sample(0))[0], request_of(sample(1), priority=1)[0])
    steps(scheduler, 1)
    assert sorted(model.rounds[-1]) == [0, 1]


def test_a_long_prompt_stalls_no_round(model: Watched) -> None:
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=4, prefill_tokens=32)
    queue(scheduler, request_of(sample(0, 200))[0])
    steps(scheduler, 3)
    long, told = request_of(sample(1, 5, prompt=400))
    queue(scheduler, long)
    model.read.clear()
    rounds = len(model.rounds)
    steps(scheduler, 20)
    assert max(model.read) <= 33  # what is read between two rounds, and a round's own token
    assert len(model.rounds) == rounds + 20  # a round for the others every time
    assert told
    assert told[-1].stats.cached_tokens == 0


def test_samples_of_a_prompt_read_it_once(model: Watched) -> None:
    scheduler = Scheduler(SpeculativeDecoder(model), max_running=8)
    request, told = request_of(*(sample(1, 3, prompt=100) for _ in range(8)))
    queue(scheduler, request)
    while scheduler._waiting or scheduler._running:
        scheduler.step()
    assert sum(model.read) < 99 + 8 * 4
    assert sorted(delta.stats.cached_tokens for delta in told if delta.stats) == [0] + [99] * 7


def test_a_sequence_that_returned_to_the_queue_has_the_same_text() -> None:
    def play(company: int) -> list[tuple[int, ...]]:
        target, draft = TableModel(5, 1), TableModel(5, 2)
        decoder = SpeculativeDecoder(target, Cascade([PromptLookupDrafter(), ModelDrafter(draft)]), 3)
        scheduler = Scheduler(decoder, max_running=4)
        watched = [Sequence([0, 1], SamplingParams(max_tokens=40), seed=i, acceptance="coupled") for i in range(4)]
        queue(scheduler, request_of(*watched)[0])
        steps(scheduler, 2)
        for first in range(company):
            queue(scheduler, request_of(sample(first % 4, 6))[0])
            steps(scheduler, 1)
        while scheduler._waiting or scheduler._running:
            scheduler.step()
        return [tuple(sequence.tokens) for sequence in watched]

    assert play(0) == play(12)


def test_rows_in_any_company_equal_the_rows_alone() -> None:
    """With a KV cache, evicted and resumed among others: each has the text that it has alone."""
    target = CausalLM(llama(), rows=4)
    drafter = Cascade([PromptLookupDrafter(), ModelDrafter(CausalLM(llama(seed=1), rows=4))])
    engine = LocalEngine(SpeculativeDecoder(target, drafter, 3), max_running=4)
    requests = [
        Request([3 + i % 5] * (1 + 7 * i), SamplingParams(seed=i, max_tokens=12 + i), n=1 + i % 4, acceptance="coupled")
        for i in range(10)
    ]
    together = engine.generate(requests)
    compared = 0
    for request, samples in zip(requests, together, strict=True):
        [alone] = engine.generate([request])
        for one, other in zip(samples, alone, strict=True):
            assert one.tokens == other.tokens
            # Siblings draft for each other, and how far they are depends on the company.
            assert request.n > 1 or one.stats.drafted == other.stats.drafted
            compared += 1
    assert compared == sum(request.n for request in requests)
    engine.close()


def test_more_samples_than_places_come_in_waves() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()), max_running=2)
    [samples] = engine.generate([Request([0], SamplingParams(seed=1, max_tokens=5), n=9)])
    assert [sample.index for sample in samples] == list(range(9))
    engine.close()


def test_a_request_from_the_worker_itself_is_refused() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))

    def asks(prefix: list[int], logits: Tensor) -> Tensor:
        engine.generate([Request([0])])
        return logits

    with pytest.raises(InvalidRequestError, match="own worker thread"):
        engine.generate([Request([0], SamplingParams(logits_processor=(asks,)))])
    assert engine.generate([Request([0], SamplingParams(max_tokens=2))])
    engine.close()


@pytest.fixture
def threads() -> Iterator[None]:
    before = threading.active_count()
    yield
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.02)
    assert threading.active_count() <= before


@pytest.mark.usefixtures("threads")
def test_a_closed_engine_leaves_no_thread() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    engine.generate([Request([0], SamplingParams(max_tokens=2))])
    engine.close()
