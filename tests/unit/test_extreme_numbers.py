"""Numbers at the edges of float32: settings refuse them, and logits of inf or NaN have one meaning on every path."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from agentspec import Batch, InvalidRequestError, PromptLookupDrafter, SamplingParams, Sequence, SpeculativeDecoder
from agentspec.grammars.token_mask import PackedMasks
from agentspec.models.backends.native import compiles, kernels
from agentspec.models.backends.native.sampling import NativeSampling
from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.rng import CoupledRng, Role, SequenceRng
from agentspec.sampling import Prefix, argmax_tokens, log_probs, processed_logits, warp, warped_logits

INF, NAN, GREATEST = math.inf, math.nan, torch.finfo(torch.float32).max
ENGINES = ["torch", pytest.param("native", marks=pytest.mark.skipif(not compiles("auto"), reason="no C++ compiler"))]
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 4},
    {"top_p": 0.3},
    {"top_p": 0.99},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"temperature": 1e-5},
    {"temperature": 1e38},
    {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
]


@pytest.fixture(params=ENGINES)
def arithmetic(request: pytest.FixtureRequest) -> SamplingKernels:
    """Which code filters and draws."""
    return NativeSampling(kernels()) if request.param == "native" else TORCH


def probs(
    scores: SequenceOf[float], mask: SequenceOf[bool] | None = None, by: SamplingKernels = TORCH, **settings: Any
) -> list[float]:
    masks = None if mask is None else PackedMasks.of(torch.tensor([[mask]]))
    (((*found,),),) = warp(torch.tensor([[scores]]), [SamplingParams(**settings)], masks, None, by).tolist()
    return found


# Settings


def shown(value: Any) -> str:
    return "5000 digits" if value == 10**5000 else repr(value)[:12]


PENALTIES = ["presence_penalty", "frequency_penalty"]
INTEGERS = ["top_k", "max_tokens", "logprobs", "min_tokens", "stop_token_ids", "banned_token_ids"]
HUGE = [1e39, -1e39, 1e300, 10**400, Fraction(10**400), Fraction(1, 10**400), 1e-40, 5e-324, INF, -INF, NAN]


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", *PENALTIES])
@pytest.mark.parametrize("value", [*HUGE, 10**5000, Decimal(1), "1", True, 1j], ids=shown)
def test_numbers_that_float32_lacks_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [*HUGE, 0, -1.0, 10**5000], ids=shown)
def test_a_repetition_penalty_is_a_positive_float32(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^repetition_penalty must be a number > 0"):
        SamplingParams(repetition_penalty=value)


@pytest.mark.parametrize("value", [*HUGE, 10**5000, "1", None, True], ids=shown)
def test_a_bias_is_a_float32(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^logit_bias must be numbers by id") as caught:
        SamplingParams(logit_bias={0: 1.0, 5: value})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_integers_that_a_tensor_lacks_are_refused(name: str, digits: int) -> None:
    value: Any = 10**digits
    with pytest.raises(InvalidRequestError, match=f"^{name} must be ") as caught:
        SamplingParams(**{name: (value,) if name.endswith("ids") else value})
    assert len(str(caught.value)) < 500
    for key in (value, "9" * digits):
        with pytest.raises(InvalidRequestError, match=r"^logit_bias must be "):
            SamplingParams(logit_bias={key: 1.0})


def test_numbers_at_the_edge_are_taken() -> None:
    for value in (GREATEST, -GREATEST, 2.0**-126, 0, 0.0, -0.0, 3, Fraction(1, 3), np.float32(0.5), np.int64(2)):
        for name in PENALTIES:
            assert getattr(SamplingParams(**{name: value}), name) == value
        assert SamplingParams(logit_bias={3: value}).logit_bias == {3: value}
    assert SamplingParams(temperature=GREATEST, top_k=2**63 - 1, max_tokens=2**63 - 1).temperature == GREATEST
    assert SamplingParams(temperature=1e-5, min_p=2.0**-126, top_p=2.0**-126).top_p > 0
    assert SamplingParams(seed=10**5000).seed == 10**5000  # taken modulo 2**64


def test_limits_that_are_no_numbers_are_named() -> None:
    for value in ("9", 1.5):
        with pytest.raises(InvalidRequestError, match=r"^max_tokens must be an integer from 1"):
            SamplingParams(max_tokens=value)  # type: ignore[arg-type]


# Distributions


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_logits_of_plus_infinity_share_the_mass(settings: dict[str, Any], arithmetic: SamplingKernels) -> None:
    assert probs([0.0, INF, 1.0, GREATEST, -INF], None, arithmetic, **settings) == [0, 1, 0, 0, 0]
    assert probs([INF, 5.0, INF, GREATEST], None, arithmetic, **settings) == [0.5, 0, 0.5, 0]
    assert probs([INF] * 4, None, arithmetic, **settings) == [0.25] * 4
    assert probs([INF, 1.0, INF], [False, True, True], arithmetic, **settings) == [0, 0, 1]
    assert probs([INF, 1.0, -INF], [False, True, True], arithmetic, **settings) == [0, 1, 0]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_nan_makes_no_distribution_where_it_is_legal_and_is_nothing_elsewhere(
    settings: dict[str, Any], arithmetic: SamplingKernels
) -> None:
    for scores in ([0.0, NAN, 1.0], [INF, NAN, 1.0], [NAN] * 3, [-INF, NAN, -INF]):
        assert all(map(math.isnan, probs(scores, None, arithmetic, **settings))), scores
    assert probs([NAN, 3.0, NAN], [False, True, False], arithmetic, **settings) == [0, 1, 0]
    assert all(map(math.isnan, probs([-INF] * 3, None, arithmetic, **settings)))


def test_at_temperature_0_the_first_infinity_has_it_all() -> None:
    scores = torch.tensor([[[0.0, INF, 1.0, INF, -INF]]])
    assert probs(scores[0, 0].tolist(), temperature=0) == [0, 1, 0, 0, 0]
    assert argmax_tokens(scores) == [[1]]


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 0.999])
def test_no_division_by_a_temperature_overflows(temperature: float, arithmetic: SamplingKernels) -> None:
    assert probs([GREATEST, GREATEST * 0.9, 0.0], None, arithmetic, temperature=temperature) == [1, 0, 0]
    assert probs([-GREATEST, -GREATEST * 0.9, -GREATEST], None, arithmetic, temperature=temperature) == [0, 1, 0]
    assert probs([1e35, 0.9e35, 1e35], None, arithmetic, temperature=temperature, top_k=3) == [0.5, 0, 0.5]


def test_penalties_and_bias_leave_finite_logits_finite() -> None:
    """Else two tokens of very different logits would share the mass, and a token that is forced would be illegal."""
    where = [Prefix([0, 1, 1, 2], 1, 1, frozenset())]
    logits = torch.tensor([[[1e38, GREATEST, -1e38, -INF, INF]]])
    for settings in (
        {"frequency_penalty": GREATEST},
        {"presence_penalty": -GREATEST, "logit_bias": {1: GREATEST, 2: -GREATEST, 3: 5.0, 4: -5.0}},
        {"repetition_penalty": 2.0**-126},
        {"repetition_penalty": GREATEST, "frequency_penalty": -GREATEST},
    ):
        found = processed_logits(logits, [SamplingParams(**settings)], where)[0, 0]
        assert found[:3].isfinite().all(), settings
        assert found[3:].tolist() == [-INF, INF], settings
    only = law_after([0.0, 0.0], [0, 0, 0], frequency_penalty=GREATEST, banned_token_ids=[1])
    assert only == [1, 0]


def law_after(scores: SequenceOf[float], prefix: list[int], **settings: Any) -> list[float]:
    where = [Prefix(prefix, 1, 1, frozenset())]
    return warp(torch.tensor([[scores]]), [SamplingParams(**settings)], None, where)[0, 0].tolist()  # type: ignore[no-any-return]


# Draws


@pytest.mark.parametrize("kind", [SequenceRng, CoupledRng])
@pytest.mark.parametrize("size", [1, 7, 64, 65, 1000])
def test_a_distribution_that_is_none_draws_token_0(
    kind: type[SequenceRng], size: int, arithmetic: SamplingKernels
) -> None:
    probs = torch.stack([torch.full((size,), NAN), torch.zeros(size), torch.zeros(size)])
    probs[2, -1] = 1.0
    for seed in range(5):
        drawn = (
            kind([seed] * 3, [0] * 3, "cpu", arithmetic)
            .draw(probs, Role.TARGET, torch.zeros(3, dtype=torch.long))
            .tolist()
        )
        assert drawn == [0, 0, size - 1]


# Decoding


class Fixed:
    """Gives the same logits after every context."""

    def __init__(self, logits: SequenceOf[float]) -> None:
        self.vocab_size = len(logits)
        self._logits = torch.tensor(logits)

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        return self._logits.expand(len(contexts), max(last), -1).clone()


RULES: list[Literal["rejection", "coupled"]] = ["rejection", "coupled"]


def tokens(
    logits: SequenceOf[float],
    drafts: bool = False,
    rule: Any = "rejection",
    by: SamplingKernels = TORCH,
    **settings: Any,
) -> list[int]:
    """The tokens of one request."""
    decoder = SpeculativeDecoder(Fixed(logits), PromptLookupDrafter() if drafts else None, gamma=3)
    sequence = Sequence([1, 2, 1, 2, 1], SamplingParams(max_tokens=6, **settings), seed=5, acceptance=rule)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence], kernels=by))
    return sequence.tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_gives_plus_infinity_chooses(
    temperature: float, drafts: bool, rule: Any, arithmetic: SamplingKernels
) -> None:
    def choose(prefix: list[int], scores: Tensor) -> Tensor:
        scores[len(prefix) % 3] = INF
        return scores

    found = tokens([0.0] * 5, drafts, rule, arithmetic, temperature=temperature, logits_processor=(choose,), top_k=4)
    assert found == [2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 2}, {"temperature": 0.0, "logprobs": 1}], ids=str)
def test_nan_of_the_target_is_named(
    settings: dict[str, Any], drafts: bool, rule: Any, arithmetic: SamplingKernels
) -> None:
    with pytest.raises(InvalidRequestError, match=r"The target model gave NaN as the logits of 1 of 5 tokens"):
        tokens([0.0, NAN, 1.0, 2.0, -INF], drafts, rule, arithmetic, **settings)
    passed_on = {"logits_processor": (lambda prefix, scores: scores * 1,), **settings}
    with pytest.raises(InvalidRequestError, match="The target model gave NaN"):
        tokens([0.0, NAN, 1.0, 2.0, -INF], drafts, rule, arithmetic, **passed_on)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_of_a_processor_and_a_dead_end_are_told_apart(temperature: float) -> None:
    broken = (lambda prefix, scores: scores * NAN,)
    with pytest.raises(InvalidRequestError, match=r"logits_processor must return .* with NaN"):
        tokens([0.0, 1.0], temperature=temperature, logits_processor=broken)
    with pytest.raises(InvalidRequestError, match="dead end"):
        tokens([0.0, 1.0], temperature=temperature, banned_token_ids=(0, 1))


# Log-probabilities


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("gap", [10.0, 100.0, 120.0, 1e4, 1e30])
def test_log_probabilities_do_not_underflow(gap: float, raw: bool, drafts: bool) -> None:
    settings: dict[str, Any] = {"logit_bias": {1: 2 * gap}} if raw else {"temperature": 2.0}
    params = SamplingParams(max_tokens=4, logprobs=3, raw_logprobs=raw, **settings)
    sequence = Sequence([1, 1, 1, 1], params, seed=0)
    decoder = SpeculativeDecoder(Fixed([gap, 0.0, -INF]), PromptLookupDrafter() if drafts else None, gamma=3)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))
    expected = torch.tensor([gap, 0.0], dtype=torch.float64).div(1.0 if raw else 2.0).log_softmax(-1).tolist()
    for entry in sequence.logprobs:
        assert entry.logprob == pytest.approx(expected[entry.token], rel=1e-6, abs=1e-7)
        assert dict(entry.top) == pytest.approx({0: expected[0], 1: expected[1]}, rel=1e-6, abs=1e-7)
    if raw:
        assert sequence.tokens == [1] * 4  # which the bias makes near certain
    else:
        assert min(dict(entry.top)[1] for entry in sequence.logprobs) < -gap / 2.1


def test_log_probabilities_are_those_of_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(3, 2, 40, generator=generator)
    params = [SamplingParams(temperature=0.7, top_k=9, top_p=0.95), SamplingParams(temperature=0), SamplingParams()]
    mask = torch.rand(3, 2, 40, generator=generator) < 0.6
    found = log_probs(warped_logits(logits, params, PackedMasks.of(mask)))
    assert torch.allclose(found.exp(), warp(logits, params, PackedMasks.of(mask)), atol=1e-6)
    assert (found[~mask] == -INF).all()
    assert set(found[1].unique().tolist()) == {0.0, -INF}  # greedy


def test_raw_log_probabilities_of_infinite_logits() -> None:
    assert log_probs(torch.tensor([INF, 0.0, INF])).tolist() == pytest.approx([-math.log(2), -INF, -math.log(2)])
    assert log_probs(torch.tensor([INF, 0.0, -INF])).tolist() == [0, -INF, -INF]
    assert log_probs(torch.tensor([NAN, 0.0])).isnan().all()
    assert log_probs(torch.zeros(2, dtype=torch.float16)).dtype == torch.float32


# Native filters


@pytest.mark.skipif(not compiles("auto"), reason="no C++ compiler")
@pytest.mark.parametrize("size", [1, 2, 15, 16, 63, 64, 65, 1000])
def test_native_filters_end_whatever_they_are_given(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    native = kernels()
    for fill in ([INF], [INF, -INF], [NAN], [NAN, INF, 0.0], [GREATEST, -GREATEST], [1e-45, 0.0, -1e-45], [-INF, 1.0]):
        at = torch.randint(len(fill), (4, size), generator=generator)
        scores = torch.tensor(fill)[at]
        for k in (1, 2, size, size + 5):
            least = native.least_of_top_k(scores, [float(k)] * 4)
            for row, value in zip(scores, least.tolist(), strict=True):
                known = sorted((s for s in row.tolist() if s > -INF), reverse=True)
                assert value == (known[k - 1] if k <= len(known) else -INF)
        for share in (1e-30, 0.5, 1.0):
            least = native.least_of_top_p(scores, [share] * 4)
            assert not least.isnan().any()
            for row, value in zip(scores, least.tolist(), strict=True):
                assert value <= max((s for s in row.tolist() if not math.isnan(s)), default=-INF)
