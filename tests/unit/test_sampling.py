"""The distribution a token is drawn from, against a slow reference; and the rng, with pinned seeds and bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec import InvalidRequestError, SamplingParams
from agentspec.grammars.token_mask import PackedMasks
from agentspec.rng import CoupledRng, Role, SequenceRng, sample_seed
from agentspec.sampling import Prefix, warp

LARGEST = 1 - 2.0**-53
"""The largest uniform that a rng can show."""


def probs(scores: SequenceOf[float], params: SamplingParams, legal: SequenceOf[bool] | None = None) -> list[float]:
    """What ``warp`` makes of one position, in float64."""
    logits = torch.tensor([[scores]], dtype=torch.float64)
    (((*masses,),),) = warp(
        logits, [params], None if legal is None else PackedMasks.of(torch.tensor([[legal]]))
    ).tolist()
    return masses


def softmax(scores: SequenceOf[float]) -> list[float]:
    best = max(scores)
    masses = [math.exp(s - best) for s in scores]
    return [mass / sum(masses) for mass in masses]


def reference(scores: SequenceOf[float], params: SamplingParams, legal: SequenceOf[bool] | None = None) -> list[float]:
    """The contract of ``warp`` in plain Python: mask, temperature, top-k, top-p, min-p."""
    kept = [s if ok else -math.inf for s, ok in zip(scores, legal or [True] * len(scores), strict=True)]
    if params.temperature == 0:
        kept = [0.0 if i == kept.index(max(kept)) else -math.inf for i in range(len(kept))]
    else:
        kept = [s / params.temperature for s in kept]
    if params.top_k:
        worst = sorted(kept, reverse=True)[: params.top_k][-1]
        kept = [s if s >= worst else -math.inf for s in kept]
    if params.top_p < 1:
        masses, total = softmax(kept), 0.0
        for mass in sorted(masses, reverse=True):
            if total >= params.top_p:
                break
            total, least = total + mass, mass
        kept = [s if mass >= least else -math.inf for s, mass in zip(kept, masses, strict=True)]
    if params.min_p:
        masses = softmax(kept)
        kept = [s if mass >= params.min_p * max(masses) else -math.inf for s, mass in zip(kept, masses, strict=True)]
    return softmax(kept)


# The distribution


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 1000},
        {"top_p": 0.001},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.01},
        {"min_p": 0.4},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.7},
        {"temperature": 0, "top_k": 2, "top_p": 0.5, "min_p": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["free", "masked"])
def test_warp_is_the_slow_reference(settings: dict[str, Any], masked: bool) -> None:
    generator, params = random.Random(7), SamplingParams(**settings)
    for size in (1, 2, 3, 8, 50):
        scores = [generator.gauss(0, 2) for _ in range(size)]
        legal = [True, *(generator.random() < 0.5 for _ in range(size - 1))] if masked else None
        assert probs(scores, params, legal) == pytest.approx(reference(scores, params, legal), abs=1e-12)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.05, 0), (0.9, 0), (0.999, 0), (0.9, 1500)])
def test_top_p_reaches_past_the_prefilter(top_p: float, top_k: int) -> None:
    """Flat distributions, of which the 512 likeliest tokens do not hold top-p's mass."""
    generator, params = random.Random(8), SamplingParams(top_p=top_p, top_k=top_k)
    scores = [generator.gauss(0, 0.1) for _ in range(2000)]
    assert probs(scores, params) == pytest.approx(reference(scores, params), abs=1e-12)


def test_the_mask_comes_before_top_k() -> None:
    assert probs([5.0, 4.0, 1.0, 0.0], SamplingParams(top_k=1), [False, False, True, True]) == [0, 0, 1, 0]


def test_the_mask_comes_before_top_p_and_min_p() -> None:
    masses, legal = [math.log(m) for m in (0.9, 0.06, 0.04)], [False, True, True]
    assert probs(masses, SamplingParams(top_p=0.55), legal) == [0, 1, 0]
    assert probs(masses, SamplingParams(min_p=0.5), legal) == pytest.approx([0, 0.6, 0.4])


def test_temperature_comes_before_top_p() -> None:
    masses = [math.log(m) for m in (0.6, 0.3, 0.1)]
    assert probs(masses, SamplingParams(top_p=0.7)) == pytest.approx([2 / 3, 1 / 3, 0])
    assert probs(masses, SamplingParams(temperature=0.5, top_p=0.7)) == [1, 0, 0]


def test_top_k_comes_before_top_p() -> None:
    masses = [math.log(m) for m in (0.4, 0.3, 0.2, 0.1)]
    assert probs(masses, SamplingParams(top_p=0.55)) == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert probs(masses, SamplingParams(top_k=2, top_p=0.55)) == [1, 0, 0, 0]


def test_top_p_comes_before_min_p() -> None:
    masses = [math.log(m) for m in (0.5, 0.3, 0.1, 0.1)]
    assert probs(masses, SamplingParams(top_p=0.6, min_p=0.5)) == pytest.approx([0.625, 0.375, 0, 0])


def test_tied_tokens_share_one_fate() -> None:
    scores = [0.0, 2.0, 2.0, 2.0, 1.0]
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.1),
        SamplingParams(min_p=1),
    ):
        assert probs(scores, params) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])


def test_greedy_is_one_hot_on_the_first_best_token() -> None:
    assert probs([1.0, 3.0, 3.0, 2.0], SamplingParams(temperature=0)) == [0, 1, 0, 0]
    assert probs([1.0, 3.0, 3.0, 2.0], SamplingParams(temperature=0), [True, False, True, True]) == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_half_precision_is_promoted_and_double_kept(given: torch.dtype, made: torch.dtype) -> None:
    logits = torch.tensor([[[0.5, 1.0, -2.0]]], dtype=given)
    settings = (SamplingParams(), SamplingParams(temperature=0.7, top_k=2, top_p=0.9, min_p=0.1))
    for params in (*settings, SamplingParams(temperature=0)):
        assert warp(logits, [params]).dtype == made
        assert warp(logits, [params]).sum().item() == pytest.approx(1)


def test_a_position_without_a_distribution_is_nan_all_over() -> None:
    nothing_legal = PackedMasks.of(torch.zeros(1, 1, 3, dtype=torch.bool))
    broken = torch.tensor([[[0.0, math.nan, 1.0]]])
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature)]
        assert warp(torch.zeros(1, 1, 3), params, nothing_legal).isnan().all()
        assert warp(broken, params).isnan().all()


def test_each_row_has_its_own_settings() -> None:
    """A row's distribution is bit for bit the one that it has alone; padding (NaN) and neighbours change nothing."""
    settings = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(top_k=3),
        SamplingParams(temperature=0.5, top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=40, top_p=0.99, min_p=0.01),
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(settings), 3, 64, generator=generator)
    mask = torch.rand(logits.shape, generator=generator) < 0.7
    padded = logits.clone()
    padded[:, 2] = math.nan
    together = warp(padded, settings, PackedMasks.of(mask))
    for row, params in enumerate(settings):
        alone = warp(logits[row : row + 1, :2], [params], PackedMasks.of(mask[row : row + 1, :2]))
        assert torch.equal(together[row, :2], alone[0])


def test_the_logits_are_left_alone() -> None:
    logits = torch.tensor([[[1.0, 2.0, 3.0]]])
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, logit_bias={0: 1.0})
    warp(logits, [params], PackedMasks.of(torch.tensor([[[True, False, True]]])), [Prefix([0], 1, 1, frozenset())])
    assert torch.equal(logits, before)


def test_adjustments_without_prefixes_are_an_error() -> None:
    with pytest.raises(ValueError, match="prefixes"):
        warp(torch.zeros(1, 1, 3), [SamplingParams(presence_penalty=1.0)])


# The settings


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": (-0.1, math.nan, math.inf),
        "top_p": (0.0, -0.5, 1.01, math.nan),
        "top_k": (-1,),
        "min_p": (-0.1, 1.01, math.nan),
        "max_tokens": (0, -3),
        "stop": ("", ("a", ""), (1,)),
        "stop_token_ids": ((-1,),),
        "logprobs": (-1,),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_settings_are_refused_by_name(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=f"^{field} must be"):
            SamplingParams(**{field: value})


def test_settings_at_the_bounds_are_taken() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, max_tokens=1, logprobs=0)
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


# The rng


def offsets(rows: int, count: int) -> Tensor:
    """``[rows, count]``: 0 .. count-1 in every row."""
    return torch.arange(count).expand(rows, count)


def test_uniforms_are_reproducible_doubles_in_the_unit_interval() -> None:
    u = SequenceRng(range(1000), [0] * 1000).uniform(Role.ACCEPT, offsets(1000, 100))
    assert u.dtype == torch.float64
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert torch.equal(u, SequenceRng(range(1000), [0] * 1000).uniform(Role.ACCEPT, offsets(1000, 100)))


@pytest.mark.parametrize("kind", [SequenceRng, CoupledRng])
def test_a_rows_numbers_do_not_depend_on_its_neighbours(kind: type[SequenceRng]) -> None:
    seeds, positions = [5, 2**64 - 1, -3, 5, 0], [0, 3, 7, 2, 0]
    probs = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    batch, at = kind(seeds, positions), torch.tensor([0, 2, 1, 4, 0])
    for rows in ([0], [3, 1], [4, 2, 0], [0, 1, 2, 3, 4]):
        alone = kind([seeds[row] for row in rows], [positions[row] for row in rows])
        for part in (alone, batch.select(rows)):
            for role in Role:
                assert torch.equal(part.uniform(role, at[rows]), batch.uniform(role, at)[rows])
                assert torch.equal(part.draw(probs[rows], role, at[rows]), batch.draw(probs, role, at)[rows])


def test_an_offset_counts_from_the_position() -> None:
    for role in Role:
        ahead = SequenceRng([9], [3]).uniform(role, torch.tensor([[0, 1, 2]]))
        there = [SequenceRng([9], [at]).uniform(role, torch.tensor([0])) for at in (3, 4, 5)]
        assert torch.equal(ahead[0], torch.cat(there))


def test_uniforms_look_independent() -> None:
    """Mean, variance, cells and correlations between roles, positions and seeds, at five standard errors."""
    rng, rows, count = SequenceRng(range(20_000), [0] * 20_000), 20_000, 10
    u = torch.stack([rng.uniform(role, offsets(rows, count)) for role in Role])  # [role, seed, position]
    bound = 5 / math.sqrt(rows * count)
    for of_role in u:
        assert abs(of_role.mean() - 1 / 2) < bound * math.sqrt(1 / 12)
        assert abs(of_role.var() - 1 / 12) < bound * math.sqrt(1 / 180)
        cells = torch.histc(of_role.float(), bins=100, min=0, max=1)
        expected = rows * count / 100
        assert ((cells - expected) ** 2 / expected).sum() < 99 + 5 * math.sqrt(2 * 99)

    z = (u - 1 / 2) * math.sqrt(12)
    pairs = {
        "draft, accept": (z[0], z[1]),
        "accept, target": (z[1], z[2]),
        "draft, target": (z[0], z[2]),
        "draft here, accept next": (z[0, :, :-1], z[1, :, 1:]),
        **{f"positions {lag} apart": (z[:, :, :-lag], z[:, :, lag:]) for lag in (1, 2, 3)},
        **{f"seeds {lag} apart": (z[:, :-lag], z[:, lag:]) for lag in (1, 2, 3)},
        "this position, next seed": (z[:, :-1, 1:], z[:, 1:, :-1]),
    }
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean()) < 5 / math.sqrt(a.numel()), name


class Rigged(SequenceRng):
    """Every uniform is the same."""

    def __init__(self, rows: int, u: float) -> None:
        super().__init__([0] * rows, [0] * rows)
        self._u = u

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        return torch.full(offsets.shape, self._u, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_token_without_mass_is_never_drawn(dtype: torch.dtype) -> None:
    probs = torch.rand(200, 1001, generator=torch.Generator().manual_seed(0)).to(dtype)
    probs[:, ::2] = 0  # the first and the last token too
    probs[:, 700:] *= torch.rand(200, 1) < 0.5  # and long tails
    probs = probs / probs.sum(-1, keepdim=True)
    where, rows = torch.zeros(200, dtype=torch.long), torch.arange(200)
    positive = probs > 0
    for u in (0.0, 2.0**-53, 0.25, 0.5, LARGEST):
        drawn = Rigged(200, u).draw(probs, Role.TARGET, where)
        assert bool(positive[rows, drawn].all())
        if u == 0:
            assert torch.equal(drawn, positive.long().argmax(-1))
        if u == LARGEST:
            assert torch.equal(drawn, 1000 - positive.flip(-1).long().argmax(-1))
    coupled = CoupledRng(range(200), [0] * 200).draw(probs, Role.TARGET, where)
    assert bool(positive[rows, coupled].all())


@pytest.mark.parametrize("kind", [SequenceRng, CoupledRng])
@pytest.mark.parametrize("mass", [1.0, 0.125], ids=["a distribution", "a residual, not normalised"])
def test_draws_follow_the_distribution(kind: type[SequenceRng], mass: float) -> None:
    masses, rows = torch.tensor([0.4, 0.0, 0.25, 0.05, 0.3]), 50_000
    drawn = kind(range(rows), [2] * rows).draw(
        (masses * mass).expand(rows, 5), Role.TARGET, torch.zeros(rows, dtype=torch.long)
    )
    error = drawn.bincount(minlength=5) / rows - masses
    assert bool((error.abs() <= 5 * (masses * (1 - masses) / rows).sqrt()).all())


def test_coupled_draws_of_neighbouring_positions_are_independent() -> None:
    rows, law_ = 50_000, torch.tensor([0.5, 0.5])
    drawn = CoupledRng(range(rows), [0] * rows).draw(law_.expand(rows, 3, 2), Role.TARGET, offsets(rows, 3))
    cells = (drawn * torch.tensor([1, 2, 4])).sum(-1).bincount(minlength=8) / rows
    assert bool(((cells - 1 / 8).abs() < 5 * math.sqrt(1 / 8 * 7 / 8 / rows)).all())


def test_draft_and_target_share_their_noise() -> None:
    """One distribution gives one token in both roles; near ones agree nearly as often as any coupling can."""
    rows = 20_000
    rng, where = CoupledRng(range(rows), [0] * rows), torch.zeros(rows, dtype=torch.long)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.35, 0.25])
    of_p = rng.draw(p.expand(rows, 3), Role.TARGET, where)
    assert torch.equal(of_p, rng.draw(p.expand(rows, 3), Role.DRAFT, where))
    agreement = (of_p == rng.draw(q.expand(rows, 3), Role.DRAFT, where)).double().mean().item()
    distance = 0.1  # total variation of p and q
    slack = 5 * math.sqrt(0.25 / rows)
    assert (1 - distance) / (1 + distance) - slack < agreement < 1 - distance + slack


def test_coupled_draws_of_a_block_are_those_of_its_positions() -> None:
    probs = torch.rand(6, 4, 5, generator=torch.Generator().manual_seed(0))
    rng = CoupledRng(range(6), [3, 1, 4, 1, 5, 9])
    block = rng.draw(probs, Role.TARGET, offsets(6, 4))
    for k in range(4):
        assert torch.equal(block[:, k], rng.draw(probs[:, k], Role.DRAFT, torch.full((6,), k)))


def test_sample_seeds_are_distinct_and_the_first_is_the_requests_own() -> None:
    seeds = [0, 1, 2, 2**63, 2**64 - 1]
    assert [sample_seed(seed, 0) for seed in seeds] == seeds
    derived = [sample_seed(seed, index) for seed in seeds for index in range(200)]
    assert len(set(derived)) == len(derived)
    assert all(0 <= seed < 2**64 for seed in derived)


def test_the_hash_is_split_mix_64() -> None:
    """The first outputs of the published generator for seed 0."""
    assert [sample_seed(0, index) for index in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
