"""Penalties, bias, bans, min_tokens and processors act on p and q at every position: the distribution is plain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from effort import effort
from enumeration import AutomatonMatcher, TableModel, emitted_distribution, largest_error, plain_distribution
from torch import Tensor

from agentspec import (
    Batch,
    Cascade,
    Drafter,
    InvalidRequestError,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
)
from agentspec.sampling import Prefix, warp

TARGET, DRAFT = TableModel(seed=1), TableModel(seed=2)
DRAFTERS: dict[str, Drafter | None] = {
    "none": None,
    "model": ModelDrafter(DRAFT),
    "self": ModelDrafter(TARGET),
    "lookup": PromptLookupDrafter(min_ngram=1),
    "cascade": Cascade([PromptLookupDrafter(), ModelDrafter(DRAFT)]),
}


def no_repeats(prefix: list[int], logits: Tensor) -> Tensor:
    """Makes the last token unlikely."""
    return logits.index_add(0, torch.tensor(prefix[-1:]), logits.new_tensor([-3.0]))


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.8, "temperature": 0.7},
    "bias": {"logit_bias": {0: 1.5, 1: -0.7}},
    "banned": {"banned_token_ids": (1,), "top_k": 2},
    "min_tokens": {"min_tokens": 2},
    "processor": {"logits_processor": (no_repeats,), "top_p": 0.9},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {0: 0.5},
        "min_tokens": 1,
        "logits_processor": (no_repeats,),
        "min_p": 0.1,
    },
}


def grammar() -> AutomatonMatcher:
    return AutomatonMatcher({0: {0: 1, 1: 0, 2: 0}, 1: {2: 2, 0: 0}, 2: {0: 2, 2: 3}}, {2, 3})


@pytest.mark.whole
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_distribution_is_that_of_plain_decoding(name: str, setting: str) -> None:
    params = SamplingParams(**SETTINGS[setting])
    tasks = [(None, frozenset([2])), (grammar, frozenset[int]())]
    one = tasks[(list(SETTINGS).index(setting) + list(DRAFTERS).index(name)) % 2]
    for matcher, end_tokens in effort(quick=[one], whole=tasks):
        decoder = SpeculativeDecoder(TARGET, DRAFTERS[name], gamma=2)
        probs = emitted_distribution(decoder.round, [0, 1, 0], 3, params, matcher, end_tokens)
        expected = plain_distribution(TARGET, [0, 1, 0], 3, params, matcher, end_tokens)
        assert largest_error(probs, expected) < 1e-12
        unadjusted = plain_distribution(TARGET, [0, 1, 0], 3, SamplingParams(), matcher, end_tokens)
        assert largest_error(expected, unadjusted) > 1e-3 or (matcher and setting in ("min_tokens", "banned"))


def test_min_tokens_holds_and_banned_ids_never_come() -> None:
    probs = plain_distribution(
        TARGET, [0], 4, SamplingParams(min_tokens=3, banned_token_ids=(1,)), None, frozenset([2])
    )
    assert all(2 not in text[:3] and 1 not in text for text in probs)


def scores_after(prefix: list[int], prompt_length: int, **settings: Any) -> Tensor:
    """Log-distribution of one position with scores 1, -1, 2."""
    where = Prefix(prefix, prompt_length, 1, frozenset())
    return warp(torch.tensor([[[1.0, -1.0, 2.0]]]), [SamplingParams(**settings)], None, [where])[0, 0].log()


def same_up_to_a_constant(found: Tensor, expected: list[float]) -> bool:
    shift = found - torch.tensor(expected)
    return torch.allclose(shift, shift[:1].expand(3), atol=1e-6)


def test_each_adjustment_by_hand() -> None:
    assert same_up_to_a_constant(scores_after([0, 1], 1, repetition_penalty=2.0), [0.5, -2.0, 2.0])
    assert same_up_to_a_constant(scores_after([0, 1, 1], 1, presence_penalty=0.5), [1.0, -1.5, 2.0])
    assert same_up_to_a_constant(scores_after([0, 1, 1], 1, frequency_penalty=0.5), [1.0, -2.0, 2.0])
    assert same_up_to_a_constant(scores_after([0], 1, logit_bias={2: -3.0}), [1.0, -1.0, -1.0])


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_a_processor_sees_every_prefix_once_per_position(gamma: int) -> None:
    seen: list[tuple[int, ...]] = []

    def spy(prefix: list[int], logits: Tensor) -> Tensor:
        seen.append(tuple(prefix))
        return logits

    sequence = Sequence([0, 1, 0, 1, 0], SamplingParams(logits_processor=(spy,), max_tokens=99, seed=1), seed=1)
    SpeculativeDecoder(TARGET, PromptLookupDrafter(), gamma=gamma).round(Batch([sequence]))
    block = seen[-1]
    assert seen == [block[: 5 + k] for k in range(len(block) - 4)]
    assert len(seen) == gamma + 1


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine(SpeculativeDecoder(TARGET, ModelDrafter(DRAFT)), end_tokens=[2])
    yield engine
    engine.close()


def test_an_impossible_request_ends_alone(engine: LocalEngine) -> None:
    late = 3

    def fails(prefix: list[int], logits: Tensor) -> Tensor:
        return logits[:-1] if len(prefix) > late else logits

    good = Request([0], SamplingParams(seed=1, max_tokens=12, min_tokens=12))
    [[alone]] = engine.generate([good])
    stream = engine.stream(good)
    first = next(stream)
    with pytest.raises(InvalidRequestError, match="logits_processor must return"):
        engine.generate([Request([0], SamplingParams(logits_processor=(fails,), min_tokens=9, max_tokens=9))])
    rest = list(stream)
    assert (*first.tokens, *(token for delta in rest for token in delta.tokens)) == alone.tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"logits_processor": (lambda prefix, logits: logits * float("nan"),)}, "NaN"),
        ({"logits_processor": (lambda prefix, logits: None,)}, "NoneType"),
        ({"banned_token_ids": (0, 1, 2)}, "leave none"),
        ({"banned_token_ids": (9,)}, "outside the vocabulary"),
        ({"logit_bias": {9: 1.0}}, "outside the vocabulary"),
    ],
)
def test_what_leaves_no_distribution_says_so(engine: LocalEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate([Request([0], SamplingParams(**settings))])


@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"logit_bias": {1: float("nan")}},
        {"logits_processor": ("no function",)},
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_raw_logprobs_are_the_models_own(engine: LocalEngine) -> None:
    for raw in (False, True):
        params = SamplingParams(temperature=0.5, seed=3, max_tokens=6, logprobs=3, raw_logprobs=raw, min_tokens=6)
        [[completion]] = engine.generate([Request([0], params)])
        context = [0]
        assert completion.logprobs is not None
        for entry in completion.logprobs:
            scores = TARGET.logits(context)
            if not raw:
                scores = scores.clone()
                scores[2] = -torch.inf
                scores = scores / 0.5
            expected = scores.log_softmax(-1)
            assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-6)
            assert entry.top[0][0] == int(expected.argmax())
            context.append(entry.token)


def dead_end() -> AutomatonMatcher:
    return AutomatonMatcher({0: {0: 0, 1: 1}, 1: {2: 2}, 2: {}}, set())


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize(
    "settings", [{"banned_token_ids": (1, 2)}, {"logit_bias": {1: -1e9}}, {"logit_bias": {1: -1e9}, "temperature": 0.0}]
)
def test_positions_that_are_never_reached_need_no_distribution(acceptance: Any, settings: dict[str, Any]) -> None:
    """The look-up drafts into a dead end of the grammar, which the target never enters."""
    for drafter in (None, PromptLookupDrafter(min_ngram=1), Cascade([PromptLookupDrafter(min_ngram=1)])):
        params = SamplingParams(max_tokens=12, **settings)
        sequence = Sequence([0, 1, 2, 0, 1, 2, 0], params, seed=1, matcher=dead_end(), acceptance=acceptance)
        while sequence.finish_reason is None:
            SpeculativeDecoder(TARGET, drafter, gamma=4).round(Batch([sequence]))
        assert sequence.tokens == [0] * 12


def play_to_the_end(sequence: Sequence, decoder: SpeculativeDecoder) -> None:
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_dead_end_that_is_reached_is_an_error(name: str, acceptance: Any) -> None:
    params = SamplingParams(logit_bias={0: -1e9})
    sequence = Sequence([0], params, seed=1, matcher=dead_end(), acceptance=acceptance)
    with pytest.raises(InvalidRequestError, match="dead end"):
        play_to_the_end(sequence, SpeculativeDecoder(TARGET, DRAFTERS[name], gamma=2))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_grammar_that_ends_before_min_tokens_ends_the_text(name: str) -> None:
    """The draft runs past the end, where the end token is banned: nothing is ever drawn there."""
    target, draft = TableModel(4, seed=1), TableModel(4, seed=2)
    drafter = {"model": ModelDrafter(draft), "self": ModelDrafter(target)}.get(name, DRAFTERS[name])
    if name == "cascade":
        drafter = Cascade()
    matcher = AutomatonMatcher({0: {0: 1}, 1: {2: 2}}, {2}, 4)
    sequence = Sequence([1], SamplingParams(min_tokens=4), seed=1, matcher=matcher, end_tokens={3})
    play_to_the_end(sequence, SpeculativeDecoder(target, drafter, gamma=3))
    assert sequence.tokens == [0, 2]


@pytest.mark.parametrize("arguments", [{"gamma": -1}, {"limit": 0}])
def test_a_sequence_without_room_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="limit >= 1 and gamma >= 0"):
        Sequence([0], **arguments)


def test_a_temperature_beyond_float32_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="greedy"):
        SamplingParams(temperature=1e-40)
