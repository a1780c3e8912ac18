"""A setting is taken in the same forms by the constructor, by a call and by ``SamplingParams``, or refused clearly."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentspec import InvalidRequestError, SamplingParams
from langchain_agentspec import AgentSpecLLM, ChatAgentSpec
from langchain_agentspec.settings import ALIASES, canonical, sampling

MODELS: list[Any] = [ChatAgentSpec, AgentSpecLLM]  # nothing is loaded
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "presence_penalty", "n")


def called(chat: Any, **settings: Any) -> dict[str, Any]:
    """The settings of a call."""
    found: dict[str, Any] = chat.settings(canonical(settings))
    sampling(found, ())
    return found


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("name", [*NUMBERS, "frequency_penalty", "logit_bias", "gamma", "model"])
def test_none_is_the_default(cls: Any, name: str) -> None:
    default = cls.model_fields[name].get_default(call_default_factory=True)
    assert getattr(cls(**{name: None}), name) == default
    other: Any = {"model": "m", "logit_bias": {1: 1.0}, "top_p": 0.5, "min_p": 0.5}.get(name, 1)
    assert called(cls(**{name: other}), **{name: None})[name] == other


@pytest.mark.parametrize("name", [*NUMBERS[:-1], "frequency_penalty", "logit_bias", "stop", "logprobs", "min_tokens"])
def test_none_is_the_default_of_sampling_params(name: str) -> None:
    assert SamplingParams(**{name: None}) == SamplingParams()


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False}, {"logprobs": None}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"top_logprobs": 4}, {"logprobs": 4}),
        ({"top_logprobs": 4, "logprobs": 4}, {"logprobs": 4}),
        ({"top_logprobs": None, "logprobs": True}, {"logprobs": 0}),
        ({"top_logprobs": 4, "logprobs": False}, {"logprobs": None}),
        ({"logit_bias": {"5": -1.0, 6: 2}}, {"logit_bias": {5: -1.0, 6: 2.0}}),
        ({"max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_new_tokens": 7, "max_tokens": None}, {"max_tokens": 7}),
        ({"max_new_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"model_name": "m"}, {"model": "m"}),
        ({"request_timeout": 3.5}, {"timeout": 3.5}),
        ({"temperature": 1, "n": 2.0}, {"temperature": 1.0, "n": 2}),
        ({"gamma": "auto", "acceptance": "coupled"}, {"gamma": "auto", "acceptance": "coupled"}),
    ],
    ids=str,
)
def test_a_setting_is_taken_alike_by_the_constructor_and_at_a_call(
    cls: Any, given: dict[str, Any], taken: dict[str, Any]
) -> None:
    built = cls(**given)
    assert {name: getattr(built, name) for name in taken} == taken
    assert {name: called(cls(), **given)[name] for name in taken} == taken


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)])
def test_stop_sequences_are_stop_strings(cls: Any, stop: Any) -> None:
    assert cls(stop_sequences=stop).stop == ["END"]
    assert canonical({"stop_sequences": stop}) == {"stop": stop}


@pytest.mark.parametrize("cls", MODELS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 5, "max_new_tokens": 6}, "given twice"),
        ({"logprobs": 2, "top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"gamma": "some"}, "gamma"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_what_the_constructor_refuses_a_call_refuses_too(cls: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        cls(**given)
    with pytest.raises(InvalidRequestError, match=message):
        called(cls(), **given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("top_logprob", "top_logprobs"),
        ("modelname", "model"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_likely_one(name: str, meant: str) -> None:
    for cls in MODELS:
        with pytest.raises(ValidationError, match=f"Unknown settings.*{name}.*did you mean '{meant}"):
            cls(**{name: 1})
    with pytest.raises(InvalidRequestError, match=f"Unknown settings.*{name}.*did you mean '{meant}"):
        ChatAgentSpec().invoke("Hi", **{name: 1})
    with pytest.raises(InvalidRequestError, match="Unknown settings"):
        ChatAgentSpec().invoke("Hi", xyzzy=1)


def test_tracers_are_told_the_settings_of_the_call() -> None:
    params = ChatAgentSpec(temperature=0.5)._get_ls_params(max_completion_tokens=7, temperature=None)
    assert (params["ls_max_tokens"], params["ls_temperature"]) == (7, 0.5)
    assert ChatAgentSpec()._get_ls_params(stop_sequences=["x"])["ls_stop"] == ["x"]


def test_every_alias_names_a_setting() -> None:
    for own in ALIASES.values():
        assert own in ChatAgentSpec.model_fields
