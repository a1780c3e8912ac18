"""Requests are admitted within bounds, and messages of errors stay short, whatever was given."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from enumeration import TableModel
from scripted import ScriptedModel, tokenizer

from agentspec import (
    AgentSpecError,
    EngineBusyError,
    Grammar,
    GrammarError,
    InvalidRequestError,
    LocalEngine,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.engine.admission import Admission
from agentspec.engine.request import MOST_SAMPLES
from agentspec.errors import LONGEST_SHOWN, cut, shown
from agentspec.params import LONGEST_STOP, MOST_STOPS

LONG = "x" * 160_000


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Verbose:
    def __repr__(self) -> str:
        return LONG


GIVEN: dict[str, Any] = {
    "text": LONG,
    "list": [LONG] * 100,
    "dict": {f"{LONG}{i}": LONG for i in range(9)},
    "nested": [[[[[[LONG] * 9] * 9] * 9] * 9] * 9] * 9,
    "integer": 10**6000,
    "negative": -(10**300),
    "object": Verbose(),
    "unspeakable": Unspeakable(),
    "nan": math.nan,
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_any_value_is_shown_briefly(given: Any) -> None:
    assert 0 < len(shown(given)) <= 1.5 * LONGEST_SHOWN


def test_short_values_are_shown_as_they_are() -> None:
    for value in (None, True, 0.5, -1, "hot", ["a", 1], ("a",), {"a": [1, None]}, {}, [], SamplingParams):
        assert shown(value) == repr(value)
    assert cut("abc") == "abc"
    assert cut(LONG).startswith("xxx")
    assert "160,000 characters" in cut(LONG)


MAKERS: dict[str, Any] = {
    "prompt": lambda x: Request(x),
    "prompt, inside": lambda x: Request([1, x]),
    "n": lambda x: Request([1], n=x),
    "gamma": lambda x: Request([1], gamma=x),
    "acceptance": lambda x: Request([1], acceptance=x),
    "timeout_s": lambda x: Request([1], timeout_s=x if x != 10**6000 else "x"),
    "group": lambda x: Request([1], group=x if not isinstance(x, str) else 1),  # type: ignore[arg-type]
    "priority": lambda x: Request([1], priority=x if isinstance(x, str | list) else "x"),  # type: ignore[arg-type]
    "stop": lambda x: SamplingParams(stop=x),
    "stop, one of many": lambda x: SamplingParams(stop=("a", x)),
    "temperature": lambda x: SamplingParams(temperature=x),
    "seed": lambda x: SamplingParams(seed=x if not isinstance(x, int) else 0.5),  # type: ignore[arg-type]
    "decoder's gamma": lambda x: SpeculativeDecoder(TableModel(), gamma=x),
    "grammar": lambda x: Grammar.of(x if not isinstance(x, str) else 5),
    "choice": lambda x: Grammar.choice([x, ""]),
    "max_waiting": lambda x: LocalEngine(SpeculativeDecoder(TableModel()), max_waiting=x if x != 10**6000 else -x),
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_messages_of_errors_stay_short(make: Any, given: Any) -> None:
    """Where the value is refused; some of them are fine for some settings."""
    try:
        made = make(given)
    except AgentSpecError as error:
        said = str(error)
        assert len(said) < 3 * LONGEST_SHOWN
    else:
        assert made is not None


def test_ids_outside_the_vocabulary_are_shown_briefly() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    for bad in ([10**6000] * 3, [-1] * 100_000, range(3, 100_000)):
        with pytest.raises(InvalidRequestError, match="prompt holds ids outside the vocabulary of 3") as told:
            engine.stream(Request(bad))
        assert len(str(told.value)) < LONGEST_SHOWN


def test_a_schema_that_is_none_is_shown_briefly() -> None:
    from agentspec.grammars.schema_tools.validator import validator

    with pytest.raises(GrammarError) as told:
        validator('{"type": ["' + LONG + '"]}')
    assert len(str(told.value)) < 3 * LONGEST_SHOWN
    why = validator('{"type": "object"}')('["' + LONG + '"]')
    assert why is not None
    assert len(why) < 3 * LONGEST_SHOWN


# Samples


@pytest.mark.parametrize("n", [MOST_SAMPLES + 1, 200_000, 10**6000], ids=["more", "many", "endless"])
def test_too_many_samples_are_refused_with_the_bound(n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{MOST_SAMPLES} at most"):
        Request([1], n=n)


def test_the_most_samples_are_made_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is compiled once and a stop string looked at once, in one thread, whatever the number of samples."""
    known = tokenizer()
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 2, [])), known)
    calls: list[str] = []
    plain = Admission._detokenizers
    monkeypatch.setattr(
        Admission, "_detokenizers", lambda self, params: (calls.append("detokenizer"), plain(self, params))[1]
    )
    monkeypatch.setattr(
        "agentspec.engine.admission.run_apart", lambda work, *_, **__: (calls.append("thread"), work())[1]
    )
    samples = engine._admission(
        Request([1, 2], SamplingParams(stop=("<|end|>",)), Grammar.regex("[a-z]+"), n=MOST_SAMPLES)
    )
    assert len(samples) == len({id(sample.matcher) for sample in samples}) == MOST_SAMPLES
    assert calls == ["detokenizer", "thread"]
    assert len({sample.seed for sample in samples}) == MOST_SAMPLES


# The queue


class Closed(TableModel):
    """A caller is refused later; here no caller may get that far."""

    def next_logits(self, *arguments: Any) -> Any:
        raise AssertionError("nothing was to be computed")


@pytest.mark.parametrize("ask", ["generate", "stream", "astream"])
async def test_the_error_of_a_full_queue_counts_the_waiting_samples(ask: str) -> None:
    engine = LocalEngine(SpeculativeDecoder(Closed()), max_waiting=5)

    async def request() -> None:
        if ask == "generate":
            engine.generate([Request([0], n=2)] * 3)
        elif ask == "stream":
            engine.stream(Request([0], n=6))
        else:
            async for _ in engine.astream(Request([0], n=6)):
                pass

    with pytest.raises(EngineBusyError, match=r"0 samples wait.*6 more.*bound of 5.*max_waiting"):
        await request()
    assert sum(engine.metrics().requests.values()) == 0
    engine.close()


def test_requests_that_wait_count_and_those_that_left_do_not() -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()), max_running=1, max_waiting=4)
    scheduler = engine._scheduler
    scheduler._waiting += [object()] * 3  # type: ignore[list-item]
    with pytest.raises(EngineBusyError, match=r"3 samples wait.*2 more"):
        engine.generate([Request([0], SamplingParams(max_tokens=1), n=2)])
    scheduler._waiting.clear()
    assert engine.generate([Request([0], SamplingParams(max_tokens=1), n=4)])
    engine.close()


@pytest.mark.parametrize("bound", [0, -1, "many", 1.5, None])
def test_the_bound_is_a_number(bound: Any) -> None:
    with pytest.raises(InvalidRequestError, match="max_waiting"):
        LocalEngine(SpeculativeDecoder(TableModel()), max_waiting=bound)


# Settings


@pytest.mark.parametrize(
    "stop", [("a",) * (MOST_STOPS + 1), ("a" * (LONGEST_STOP + 1),), ("", "a")], ids=["many", "long", "empty"]
)
def test_stop_strings_are_bounded(stop: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequestError, match=rf"stop must be non-empty strings, {MOST_STOPS} at most of"):
        SamplingParams(stop=stop)
    assert SamplingParams(stop=("a" * LONGEST_STOP,) * MOST_STOPS)


@pytest.mark.parametrize("name", ["stop_token_ids", "banned_token_ids"])
def test_ids_are_no_more_than_the_vocabulary(name: str) -> None:
    engine = LocalEngine(SpeculativeDecoder(TableModel()))
    with pytest.raises(InvalidRequestError, match=rf"{name} holds 100,000 ids, more than the 3 "):
        engine.stream(Request([0], SamplingParams(**{name: (0,) * 100_000})))
    with pytest.raises(InvalidRequestError, match="logit_bias holds 100,000 ids"):
        engine.stream(Request([0], SamplingParams(logit_bias=dict.fromkeys(range(100_000), 1.0))))
    engine.close()


@pytest.mark.parametrize("priority", ["high", None, math.nan, [1]])
def test_a_priority_that_cannot_be_compared_never_reaches_the_worker(priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority"):
        Request([0], priority=priority)


def test_a_timeout_may_be_as_long_as_any() -> None:
    known = tokenizer()
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 2, known.encode("ab"))), known)
    for timeout in (math.inf, 1e30, 10**12):
        params = SamplingParams(max_tokens=2, temperature=0)
        [[found]] = engine.generate([Request([1, 2], params, Grammar.regex("[a-z]+"), timeout_s=timeout)])
        assert found.tokens
    engine.close()


def test_the_old_name_of_a_request_group_works_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="group"):
        request = Request([1], family="a")
    assert request == Request([1], group="a")
    assert dataclasses.replace(request, n=2).group == "a"
