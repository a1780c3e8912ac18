"""Self-consistency: votes are counted as they should be, samples are what single calls are, and who is done is done."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from answering import AnsweringModel, answering, call
from langchain.agents import create_agent
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from scripted import tokenizer
from torch import Tensor

from agentspec import Cascade, InvalidRequestError, LocalEngine, PromptLookupDrafter, SpeculativeDecoder
from agentspec.errors import NoAnswerError
from agentspec.rng import sample_seed
from agentspec.voting import Ballot, canonical, is_decided, leads, tally, winner
from langchain_agentspec import (
    ChatAgentSpec,
    ConsistencyResult,
    SelfConsistency,
    SelfConsistencyMiddleware,
    aexpand,
    best_of,
    expand,
)

# Votes


def ballots(*keys: str | None, **others: Any) -> list[Ballot]:
    return [Ballot(index, key, **{k: v[index] for k, v in others.items()}) for index, key in enumerate(keys)]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": 1, "b": [2]}, {"b": [2.0], "a": 1.0}, True),
        (" yes\n", "yes", True),
        ("1", 1, False),
        ([1, 2], [2, 1], False),
        ({"a": None}, {}, False),
        (True, 1, False),
    ],
)
def test_equal_answers_have_equal_forms(one: Any, other: Any, equal: bool) -> None:
    assert (canonical(one) == canonical(other)) == equal


def test_the_most_votes_win_and_no_answer_is_no_vote() -> None:
    assert winner(ballots("a", "b", None, "b", None, None)) == "b"
    assert tally(ballots("a", "b", None, "b")) == {"a": 1, "b": 2}
    assert winner(ballots(None, None)) is None
    assert winner(ballots("a", "b", "b", weight=[0.9, 0.3, 0.3]), weighted=True) == "a"


def test_ties_go_to_the_first_or_to_the_likeliest() -> None:
    tied = ballots("a", "b", "b", "a", logprob=[-3.0, -2.0, -1.0, None])
    assert winner(tied) == "a"
    assert winner(tied, tie="logprob") == "b"
    assert winner(list(reversed(tied))) == "a"  # the order in which samples end does not matter


def test_a_decided_majority_cannot_change() -> None:
    """By all ways in which the vote may go on."""
    for done in itertools.product("ab", repeat=4):
        for total in range(4, 8):
            decided = is_decided(ballots(*done), total, stop="unanimous_window", min_samples=99)
            ends = [winner(ballots(*done, *rest)) for rest in itertools.product("abc", repeat=total - len(done))]
            assert not decided or len(set(ends)) == 1


def test_the_probability_to_lead_is_that_of_the_beta_posterior() -> None:
    generator = random.Random(0)
    for leader, second in ((0, 0), (3, 0), (2, 2), (5, 1), (7, 4)):
        drawn = [generator.betavariate(leader + 1, second + 1) > 0.5 for _ in range(20_000)]
        assert leads(leader, second) == pytest.approx(sum(drawn) / len(drawn), abs=0.02)


def test_when_to_stop() -> None:
    assert not is_decided(ballots("a", "a", "a", "a"), 20, stop="none")
    assert not is_decided(ballots("a", "a"), 20, stop="unanimous_window")
    assert is_decided(ballots("a", "a", "a"), 20, stop="unanimous_window")
    assert not is_decided(ballots("a", "a", "b"), 20, stop="unanimous_window")
    assert not is_decided(ballots("a", "a", "a"), 20, stop="adaptive")  # 0.9375
    assert is_decided(ballots("a", "a", "a", "a"), 20, stop="adaptive")
    assert not is_decided(ballots("a", "a", "a", "b", "b"), 20, stop="adaptive")


# Samples


class Lottery(AnsweringModel):
    """Answers with one word, drawn by weights."""

    def __init__(self, known: Any, weights: dict[str, float]) -> None:
        super().__init__(known, [(r"", "")])
        self._weights = {known.encode(word)[0]: weight for word, weight in weights.items()}
        self.contexts: list[list[int]] = []

    def next_logits(self, contexts: Any, last: Any) -> Tensor:
        out = super().next_logits(contexts, last)
        for b, (context, count) in enumerate(zip(contexts, last, strict=True) if any(last) else ()):
            begin = self._script(context)[0]
            for k in range(count):
                if len(context) - count + 1 + k == begin:
                    out[b, k] = -math.inf
                    for token, weight in self._weights.items():
                        out[b, k, token] = math.log(weight)
        return out


@pytest.fixture
def chat() -> Iterator[ChatAgentSpec]:
    known = tokenizer("qwen")
    model = Lottery(known, {"a": 0.5, "b": 0.3, "c": 0.2})
    end = known.convert_tokens_to_ids("<|im_end|>")
    engine = LocalEngine(
        SpeculativeDecoder(model, Cascade([PromptLookupDrafter()]), 4), known, end_tokens=[end], max_running=64
    )
    yield ChatAgentSpec(engine=engine, temperature=1.0, max_tokens=6)
    engine.close()


def words(result: ConsistencyResult) -> list[str]:
    return [sampled.answer for sampled in result.samples]


async def test_every_sample_is_the_single_call_with_its_seed(chat: ChatAgentSpec) -> None:
    result = await SelfConsistency(chat, 12, seed=5, return_all=True).ainvoke("Number?")
    singles = [chat.invoke("Number?", seed=sample_seed(5, i), acceptance="coupled").text for i in range(12)]
    assert words(result) == singles
    assert len(set(singles)) > 1
    again = SelfConsistency(chat, 12, seed=5, return_all=True).invoke("Number?")
    assert words(again) == singles
    assert result.votes == {canonical(word): count for word, count in Counter(singles).items()}
    assert result.answer == winner(ballots(*singles))
    assert result.share == pytest.approx(max(result.votes.values()) / 12)
    assert result.latency_s > 0
    assert result.tokens == 24


def test_the_winning_message_is_the_output(chat: ChatAgentSpec) -> None:
    answer = SelfConsistency(chat, 9, seed=1).invoke("Number?")
    assert answer.text in ("a", "b", "c")
    assert SelfConsistency(chat, 9, seed=1).batch(["Number?", "Number?"])[1].text == answer.text


def test_chains_are_asked_as_a_whole(chat: ChatAgentSpec) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{what}?")]) | chat | StrOutputParser()
    vote = SelfConsistency(chain, 12, seed=5, return_all=True)
    assert sorted(set(words(vote.invoke({"what": "Number"})))) != ["a"]
    assert (ChatPromptTemplate.from_template("{q}") | SelfConsistency(chat, 3, seed=2)).invoke({"q": "?"}).text


def test_a_cache_of_answers_is_left_aside(chat: ChatAgentSpec) -> None:
    set_llm_cache(InMemoryCache())
    try:
        chat.invoke("Number?")
        result = SelfConsistency(chat, 12, seed=5, return_all=True).invoke("Number?")
    finally:
        set_llm_cache(None)
    assert len(set(words(result))) > 1


async def test_what_is_decided_is_not_waited_for(chat: ChatAgentSpec) -> None:
    long = chat.model_copy(update={"max_tokens": 100_000})
    slow = iter(range(100))

    async def one_of_many(ask: Any, config: Any) -> Any:
        return "same" if next(slow) < 4 else await long.ainvoke("Number?", stop=["never"])

    vote = SelfConsistency(chat, 40, stop="unanimous_window", min_samples=4, return_all=True)
    result = await asyncio.wait_for(vote.vote(one_of_many), 30)
    assert result.stopped_early
    assert len(result.samples) < 40
    assert result.answer == "same"


def test_early_stopping_saves_samples_and_changes_no_certain_majority(chat: ChatAgentSpec) -> None:
    for seed in range(6):
        whole = SelfConsistency(chat, 9, seed=seed, return_all=True).invoke("Number?")
        early = SelfConsistency(chat, 9, seed=seed, stop="unanimous_window", min_samples=99, return_all=True).invoke(
            "Number?"
        )
        assert early.answer == whole.answer


def test_an_extractor_that_raises_takes_one_vote_and_no_more(chat: ChatAgentSpec) -> None:
    def no_ones(message: Any) -> str:
        if message.text == "a":
            raise ValueError("not that")
        return str(message.text)

    result = SelfConsistency(chat, 16, seed=5, extract=no_ones, return_all=True).invoke("Number?")
    assert result.answer == winner(ballots(*(sampled.answer for sampled in result.samples)))
    assert result.answer != "a"
    failed = [sampled for sampled in result.samples if sampled.error]
    assert failed
    assert all("not that" in str(sampled.error) for sampled in failed)
    assert sum(result.votes.values()) == 16 - len(failed)
    with pytest.raises(NoAnswerError, match="None of 4 samples"):
        SelfConsistency(chat, 4, extract=lambda message: None).invoke("Number?")


def test_weights_and_functions_decide_too(chat: ChatAgentSpec) -> None:
    weighted = SelfConsistency(chat, 12, seed=5, aggregate="weighted", return_all=True).invoke("Number?")
    assert all(0 < sampled.weight < 1 for sampled in weighted.samples)
    assert sum(weighted.votes.values()) == pytest.approx(sum(sampled.weight for sampled in weighted.samples))
    chosen = SelfConsistency(chat, 12, seed=5, aggregate=min, return_all=True).invoke("Number?")
    assert chosen.answer == min(words(chosen))
    assert chosen.output.text == chosen.answer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be"),
        ({"aggregate": "loudest"}, "aggregate must be"),
        ({"stop": "soon"}, "stop must be"),
        ({"stop": "adaptive", "aggregate": "weighted"}, "stop must be"),
        ({"tie": "coin"}, "tie must be"),
        ({"threshold": 0.2}, "threshold must be"),
    ],
)
def test_wrong_settings_are_refused_by_name(chat: ChatAgentSpec, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SelfConsistency(chat, **settings)


def test_samples_at_temperature_0_are_an_error_that_explains(chat: ChatAgentSpec) -> None:
    cold = chat.model_copy(update={"temperature": 0.0})
    with pytest.raises(InvalidRequestError, match="same text"):
        SelfConsistency(cold, 3).invoke("Number?")
    assert SelfConsistency(cold, 1).invoke("Number?").text == "a"


async def test_cancelling_a_vote_cancels_its_samples(chat: ChatAgentSpec) -> None:
    long = chat.model_copy(update={"max_tokens": 100_000, "n": 1})
    task = asyncio.create_task(SelfConsistency(long.bind(stop=["never"]), 8).ainvoke("Number?"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def get_time(zone: str, reason: str = "") -> str:
    """The time."""
    return "noon"


async def test_an_agents_steps_are_voted_on() -> None:
    engine, _ = answering([(r"noon", "It is noon."), (r"time", call("get_time", '{"zone": "UTC"}'))])
    model = ChatAgentSpec(engine=engine, temperature=0.3, max_tokens=80)
    middleware = SelfConsistencyMiddleware(3, ignore_args=["reason"])
    agent: Any = create_agent(model, tools=[get_time], middleware=[middleware])
    question = {"messages": [("user", "What time is it?")]}
    for messages in (agent.invoke(question)["messages"], (await agent.ainvoke(question))["messages"]):
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert messages[-1].text == "It is noon."
    engine.close()


# More than voting


def test_the_best_of_several_is_that_of_the_highest_score(chat: ChatAgentSpec) -> None:
    best = best_of(chat, 16, lambda message: {"a": 1, "b": 2, "c": 3}[message.text], seed=5)
    assert best.invoke("Number?").text == "c"
    with pytest.raises(InvalidRequestError, match="k must be"):
        best_of(chat, 0, len)


async def test_many_inputs_are_continued_at_once(chat: ChatAgentSpec) -> None:
    prefixes = [f"Number {i}?" for i in range(4)]
    found = expand(chat, prefixes, 3, seed=5)
    assert [len(row) for row in found] == [3] * 4
    for prefix, row in zip(prefixes, found, strict=True):
        for i, message in enumerate(row):
            alone = chat.invoke(prefix, seed=sample_seed(5, i), acceptance="coupled")
            assert message.text == alone.text
    assert [[m.text for m in row] for row in await aexpand(chat, prefixes, 3, seed=5)] == [
        [m.text for m in row] for row in found
    ]
    engine = chat.engine
    assert engine is not None
    assert max(engine.decoder.target.model.rows) >= 6  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="k must be"):
        expand(chat, prefixes, 0)
