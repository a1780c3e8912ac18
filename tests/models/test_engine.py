"""The engine: requests join, share rounds, leave, fail and are cancelled without touching each other."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from enumeration import TableModel
from tiny import llama
from torch import Tensor

from agentspec import (
    AgentSpecError,
    Batch,
    Cascade,
    CausalLM,
    ContextOverflowError,
    Draft,
    EngineClosedError,
    Grammar,
    InvalidRequestError,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    RequestFailedError,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.drafters import DraftBudget
from agentspec.rng import sample_seed
from agentspec.stats import PHASES

VOCABULARY = 5


class FaultyModel(TableModel):
    """Raises for a context that holds the forbidden token."""

    forbidden = -1

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        if any(self.forbidden in context for context in contexts) and any(last):
            raise RuntimeError("the GPU is on fire")
        return super().next_logits(contexts, last)


@pytest.fixture
def target() -> FaultyModel:
    return FaultyModel(VOCABULARY, seed=1)


@pytest.fixture
def engine(target: FaultyModel) -> Iterator[LocalEngine]:
    drafter = Cascade([PromptLookupDrafter(), ModelDrafter(TableModel(VOCABULARY, seed=2))])
    engine = LocalEngine(SpeculativeDecoder(target, drafter, gamma=3), end_tokens=[4], max_running=3)
    yield engine
    engine.close()


def requests(count: int, **changes: Any) -> list[Request]:
    return [
        Request([i % 4, 1], SamplingParams(seed=i, max_tokens=5 + i), acceptance="coupled", **changes)
        for i in range(count)
    ]


def test_a_table_without_tokenizer_is_served(engine: LocalEngine) -> None:
    [[completion]] = engine.generate([Request([0, 1], SamplingParams(seed=3, max_tokens=9))])
    assert 1 <= len(completion.tokens) <= 9
    assert completion.text == ""
    assert completion.logprobs is None
    assert completion.finish_reason == ("stop" if completion.tokens[-1] == 4 else "length")


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_together_equals_alone(engine: LocalEngine, acceptance: Any) -> None:
    asked = [Request(r.prompt, r.params, gamma=i % 4, acceptance=acceptance) for i, r in enumerate(requests(12))]
    together = engine.generate(asked)
    for request, [completion] in zip(asked, together, strict=True):
        [[alone]] = engine.generate([request])
        assert completion.tokens == alone.tokens
        assert completion.stats.drafted == alone.stats.drafted
        assert completion.stats.accepted == alone.stats.accepted


def test_both_acceptance_rules_share_an_engine(engine: LocalEngine) -> None:
    mixed = [Request([0], SamplingParams(seed=1), acceptance=rule) for rule in ("rejection", "coupled", None)]
    first, _, default = (samples[0].tokens for samples in engine.generate(mixed))
    assert default == first


def test_coupled_text_is_plain_text(engine: LocalEngine) -> None:
    for fast, plain in zip(engine.generate(requests(8)), engine.generate(requests(8, gamma=0)), strict=True):
        assert fast[0].tokens == plain[0].tokens
        assert plain[0].stats.target_calls == len(plain[0].tokens)


def test_samples_of_a_request_differ_and_each_equals_a_single_call(engine: LocalEngine) -> None:
    params = SamplingParams(seed=11, max_tokens=12)
    [samples] = engine.generate([Request([0], params, n=7, acceptance="coupled")])
    assert [sample.index for sample in samples] == list(range(7))
    assert len({sample.tokens for sample in samples}) > 3
    for sample in samples:
        own = SamplingParams(seed=sample_seed(11, sample.index), max_tokens=12)
        assert engine.generate([Request([0], own, acceptance="coupled")])[0][0].tokens == sample.tokens


def test_unseeded_requests_differ(engine: LocalEngine) -> None:
    drawn = engine.generate([Request([0], SamplingParams(max_tokens=20)) for _ in range(20)])
    assert len({samples[0].tokens for samples in drawn}) > 1


def test_deltas_add_up_to_the_completion(engine: LocalEngine) -> None:
    request = Request([0, 1], SamplingParams(seed=5, max_tokens=30, logprobs=2), n=2)
    deltas = list(engine.stream(request))
    [completions] = engine.generate([request])
    for completion in completions:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert tuple(token for delta in mine for token in delta.tokens) == completion.tokens
        assert tuple(entry for delta in mine for entry in delta.logprobs) == completion.logprobs
        assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == completion.finish_reason
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.tokens)


def test_deltas_may_be_rare_and_then_hold_more(engine: LocalEngine) -> None:
    request = Request([0, 1], SamplingParams(seed=5, max_tokens=30, logprobs=2), n=2)
    often, rarely = list(engine.stream(request)), list(engine.stream(request, every_s=1e9))
    assert len(often) > len(rarely) == 2 * request.n  # the first and the last of each
    for index in range(request.n):
        first, last = (delta for delta in rarely if delta.index == index)
        assert first.tokens
        assert last.finish_reason is not None
        mine = [delta for delta in often if delta.index == index]
        for name in ("tokens", "logprobs"):
            assert getattr(first, name) + getattr(last, name) == sum((getattr(delta, name) for delta in mine), ())


@pytest.mark.parametrize("every_s", [-1, math.nan, None, "often"])
def test_how_often_deltas_come_is_a_number(engine: LocalEngine, every_s: Any) -> None:
    for ask in (engine.stream, engine.astream):
        with pytest.raises(InvalidRequestError, match="every_s must be a number of seconds >= 0"):
            ask(Request([0]), every_s)


async def test_deltas_of_a_task_may_be_rare(engine: LocalEngine) -> None:
    request = Request([0, 1], SamplingParams(seed=5, max_tokens=30))
    rarely = [delta async for delta in engine.astream(request, every_s=1e9)]
    assert len(rarely) == 2
    assert rarely[0].tokens + rarely[1].tokens == engine.generate([request])[0][0].tokens


def test_the_parts_of_a_step_add_up_to_its_time(engine: LocalEngine) -> None:
    for [completion] in engine.generate(requests(9)):
        told = completion.stats.to_dict()
        assert sum(told[phase] for phase in PHASES) == pytest.approx(told["total_s"])
        assert all(told[phase] >= -1e-9 for phase in PHASES)
        assert 0 < told["ttft_s"] <= told["total_s"]
        assert told["new_tokens"] == len(completion.tokens)


def test_requests_deltas_and_completions_are_plain_values(engine: LocalEngine) -> None:
    [request] = requests(1)
    deltas, frozen = [], []
    for delta in engine.stream(request):
        deltas.append(delta)
        frozen.append(pickle.dumps((delta, delta.acceptance_rate)))
    assert [pickle.loads(item) for item in frozen] == [(delta, delta.acceptance_rate) for delta in deltas]
    assert [delta.stats is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    assert deltas[-1].stats is not None
    assert deltas[-1].acceptance_rate == deltas[-1].stats.acceptance_rate
    completion = engine.generate([request])[0][0]
    assert pickle.loads(pickle.dumps((request, completion))) == (request, completion)


def test_closing_a_stream_cancels_its_request_alone(target: FaultyModel) -> None:
    endless = LocalEngine(SpeculativeDecoder(target), max_running=2)
    stream = endless.stream(Request([0], SamplingParams(seed=1, max_tokens=10**6)))
    next(stream)
    mate = endless.generate([Request([1], SamplingParams(seed=2, max_tokens=40))])[0][0]
    stream.close()  # type: ignore[attr-defined]
    after = endless.generate([Request([1], SamplingParams(seed=2, max_tokens=40), n=1)])[0][0]
    assert mate.tokens == after.tokens
    calls = target.calls
    endless.generate([Request([1], SamplingParams(seed=2, max_tokens=40))])
    assert target.calls - calls <= 41  # nobody else is being served any more
    endless.close()


def test_a_failing_round_reaches_its_callers_and_the_engine_goes_on(engine: LocalEngine, target: FaultyModel) -> None:
    before = engine.generate(requests(4))
    target.forbidden = 2
    with pytest.raises(RuntimeError, match="on fire"):
        engine.generate([Request([2], SamplingParams(seed=1))])
    with pytest.raises(RuntimeError, match="on fire"):
        list(engine.stream(Request([2], SamplingParams(seed=1))))
    target.forbidden = -1
    assert [s[0].tokens for s in engine.generate(requests(4))] == [s[0].tokens for s in before]


def test_a_closed_engine_refuses_requests_with_its_own_error() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    engine.generate([Request([0], SamplingParams(max_tokens=2))])
    threads = {thread.name for thread in threading.enumerate()}
    assert "agentspec" in threads
    engine.close()
    engine.close()
    assert engine.is_closed
    with pytest.raises(EngineClosedError):
        engine.generate([Request([0])])


def test_closing_ends_what_is_on_its_way() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    stream = engine.stream(Request([0], SamplingParams(max_tokens=10**6)))
    next(stream)
    engine.close()
    with pytest.raises(EngineClosedError):
        list(stream)


def test_a_forgotten_engine_ends_its_thread() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    engine.generate([Request([0], SamplingParams(max_tokens=2))])
    thread = engine._scheduler._thread
    assert thread is not None
    del engine
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_threads_share_the_engine(engine: LocalEngine) -> None:
    asked = requests(10)
    expected = [samples[0].tokens for samples in engine.generate(asked)]
    found: dict[int, Any] = {}

    def ask(index: int) -> None:
        found[index] = engine.generate([asked[index]])[0][0].tokens

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(asked))] == expected


async def test_tasks_share_the_engine(engine: LocalEngine) -> None:
    async def tokens(request: Request) -> tuple[int, ...]:
        return tuple([token async for delta in engine.astream(request) for token in delta.tokens])

    asked = requests(6)
    expected = [samples[0].tokens for samples in engine.generate(asked)]
    assert await asyncio.gather(*(tokens(request) for request in asked)) == expected


async def test_cancelling_a_task_frees_its_slot() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()), max_running=1)

    async def last(request: Request) -> Any:
        return [delta async for delta in engine.astream(request)][-1]

    doomed = asyncio.create_task(last(Request([0], SamplingParams(max_tokens=10**6))))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(last(Request([1], SamplingParams(max_tokens=3))))
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert (await waiting).finish_reason == "length"
    engine.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": [0, VOCABULARY]}, "outside the vocabulary"),
    ({"prompt": [-1]}, "outside the vocabulary"),
    ({"prompt": [0], "params": {"stop_token_ids": (99,)}}, "outside the vocabulary"),
    ({"prompt": [0], "params": {"stop": ("x",)}}, "need an engine with a tokenizer"),
    ({"prompt": [0], "grammar": Grammar.json_schema({})}, "need an engine with a tokenizer"),
    ({"prompt": [0], "n": 0}, "1 or more"),
    ({"prompt": [0], "gamma": -1}, "0 or more"),
    ({"prompt": [0], "acceptance": "hopeful"}, "must be one of"),
    ({"prompt": [0], "params": {"temperature": -0.1}}, "temperature"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_requests_are_refused_before_any_compute(
    engine: LocalEngine, target: FaultyModel, arguments: dict[str, Any], message: str
) -> None:
    calls = target.calls
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate([Request(**{**arguments, "params": SamplingParams(**arguments.get("params", {}))})])
    assert target.calls == calls
    assert engine.generate(requests(1))


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers() -> None:
    engine = LocalEngine(SpeculativeDecoder(CausalLM(llama())))
    with pytest.raises(ContextOverflowError, match=r"300 tokens.*256"):
        engine.stream(Request([1] * 300))
    [[completion]] = engine.generate([Request([1] * 250, SamplingParams(max_tokens=50, temperature=0))])
    assert len(completion.tokens) == 6  # the context ends before max_tokens
    assert completion.finish_reason == "length"
    engine.close()


def test_decoder_settings_are_checked() -> None:
    with pytest.raises(AgentSpecError, match="gamma"):
        SpeculativeDecoder(TableModel(), gamma=-1)
    with pytest.raises(ValueError, match="acceptance"):
        SpeculativeDecoder(TableModel(), acceptance="hopeful")  # type: ignore[arg-type]


def test_a_prompt_of_one_token_is_enough() -> None:
    engine = LocalEngine(SpeculativeDecoder(CausalLM(llama()), ModelDrafter(CausalLM(llama(seed=1)))))
    [[completion]] = engine.generate([Request([5], SamplingParams(max_tokens=4, seed=1))])
    assert len(completion.tokens) == 4
    engine.close()


@pytest.mark.parametrize("heads", [(97, 90), (90, 97)])
def test_heads_of_different_size_are_reconciled(heads: tuple[int, int]) -> None:
    target, draft = (CausalLM(llama(seed, vocab_size=head)) for seed, head in enumerate(heads))
    engine = LocalEngine(SpeculativeDecoder(target, ModelDrafter(draft), acceptance="coupled"))
    requests = [Request([5, 6], SamplingParams(max_tokens=20, seed=i), gamma=g) for i in range(3) for g in (0, 3)]
    completions = [samples[0] for samples in engine.generate(requests)]
    for plain, fast in zip(completions[::2], completions[1::2], strict=True):
        assert plain.tokens == fast.tokens
        assert fast.stats.drafted["model"] > 0
    engine.close()


def test_a_draft_with_a_shorter_context_costs_speed_alone() -> None:
    target = CausalLM(llama())
    draft = CausalLM(llama(seed=1, max_position_embeddings=32))
    engine = LocalEngine(SpeculativeDecoder(target, ModelDrafter(draft), acceptance="coupled"))
    for length in (20, 30, 60):
        request = Request([1] * length, SamplingParams(max_tokens=24, seed=1))
        plain = Request([1] * length, SamplingParams(max_tokens=24, seed=1), gamma=0)
        [[fast], [slow]] = engine.generate([request, plain])
        assert fast.tokens == slow.tokens
    engine.close()


def test_a_processor_that_ends_its_thread_ends_its_request() -> None:
    def leave(prefix: list[int], logits: Tensor) -> Tensor:
        raise SystemExit

    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    with pytest.raises(RequestFailedError, match="SystemExit"):
        engine.generate([Request([0], SamplingParams(logits_processor=(leave,)))])
    assert engine.generate([Request([0], SamplingParams(max_tokens=2))])
    engine.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Request("hello"), "token ids"),  # type: ignore[arg-type]
        (lambda: Request([1.5]), "token ids"),  # type: ignore[list-item]
        (lambda: Request([0], n=1.5), "1 or more"),  # type: ignore[arg-type]
        (lambda: Request([0], gamma=2.5), "0 or more"),  # type: ignore[arg-type]
        (lambda: SpeculativeDecoder(TableModel(), gamma="many"), "integer, .auto. or a DraftLength"),  # type: ignore[arg-type]
        (lambda: SamplingParams(seed="x"), "seed"),  # type: ignore[arg-type]
        (lambda: SamplingParams(temperature="hot"), "temperature"),  # type: ignore[arg-type]
        (lambda: SamplingParams(max_tokens=3.5), "max_tokens"),  # type: ignore[arg-type]
    ],
)
def test_values_of_the_wrong_type_are_named(make: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make()


def test_a_single_request_in_place_of_a_list_is_named(engine: LocalEngine) -> None:
    with pytest.raises(InvalidRequestError, match="list"):
        engine.generate(Request([0]))  # type: ignore[arg-type]


class BareDrafter:
    """A drafter that knows nothing of this project but the shape of the seam: it proposes zeros."""

    def propose(self, batch: Batch, budget: DraftBudget, cursor: Any) -> Draft:
        return Draft.of_tokens([[0] * n for n in budget.of("BareDrafter")], "BareDrafter", batch.device)


class BareModel:
    """A model with the two names of the seam and no more; it is never called for nothing."""

    vocab_size = 3

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        return torch.stack([torch.arange(3.0).expand(max(last), 3) for _ in contexts if min(last) > 0])


def test_the_seams_are_enough() -> None:
    engine = LocalEngine(SpeculativeDecoder(BareModel(), BareDrafter(), gamma=2))  # type: ignore[arg-type]
    requests = [Request([1], SamplingParams(max_tokens=9, seed=i)) for i in range(100)]
    samples = [completion for [completion] in engine.generate(requests)]
    drafted = sum(sample.stats.drafted_tokens for sample in samples)
    assert {name for sample in samples for name in sample.stats.drafted} == {"BareDrafter"}
    assert 0 < sum(sample.stats.accepted_tokens for sample in samples) < drafted
    engine.close()


class LeavingModel(TableModel):
    """Ends its thread when it has to cache a prompt."""

    max_context, max_rows = 100, 4

    def cached_tokens(self, context: list[int]) -> int:
        return 0

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        if not any(last):
            raise SystemExit
        return super().next_logits(contexts, last)


def test_a_model_that_ends_its_thread_while_it_reads_a_prompt_ends_its_requests() -> None:
    engine = LocalEngine(SpeculativeDecoder(LeavingModel()))
    with pytest.raises(RequestFailedError, match="SystemExit"):
        engine.generate([Request([0, 1]), Request([1, 0])])
    engine.close()
