"""Gamma from measurement: the chooser against the best that can be chosen, where costs and acceptance are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import effort
from enumeration import (
    DRAFTERS,
    TASKS,
    AutomatonMatcher,
    TableModel,
    drafters,
    largest_error,
    table_models,
)

import agentspec.models.pass_cost
from agentspec import (
    Batch,
    Draft,
    Drafter,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
)
from agentspec.acceptance_rates import AcceptanceRates
from agentspec.draft_length import Auto, best_width
from agentspec.drafters import DraftBudget, DraftRow, NoDrafter
from agentspec.grammars import GrammarCursor
from agentspec.models import as_language_model
from agentspec.models.pass_cost import PassCost, measured
from agentspec.report.gain import call_gain
from agentspec.report.schema import Step
from agentspec.report.views.terminal import describe_gain
from agentspec.runtime.cache import DiskCache
from agentspec.sequence import RequestGroup

pytestmark = pytest.mark.usefixtures("one_thread")

FLAT = {(rows, width): 1.0 for rows in (1, 8) for width in (1, 17)}
STEEP = {(rows, width): float(rows * width) for rows in (1, 8) for width in (1, 17)}
BUMPY = {(1, 1): 40, (1, 2): 67, (1, 5): 57, (1, 9): 95, (1, 17): 110} | {
    (8, 1): 73, (8, 2): 91, (8, 5): 137, (8, 9): 210, (8, 17): 360
}  # fmt: skip


class Known(PassCost):
    """Costs that are known and that nothing changes."""

    def learn(self, rows: int, width: int, seconds: float) -> None:
        """Nothing."""


class Frozen(Auto):
    """What it knows stays as it is, so that a round is a function of its batch."""

    def learn(self, *_: Any) -> None:
        """Nothing."""


class Guesser(Drafter):
    """Knows the greedy text and proposes it, except where a hash decides otherwise: tokens are right at ``rate``."""

    name = "guesser"

    def __init__(self, target: TableModel, rate: float, length: int = 16) -> None:
        self.target, self.rate, self.length = target, rate, length

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        most = budget.of(self.name)
        tokens = [self._guessed(s.context, min(n, self.length)) for s, n in zip(batch.sequences, most, strict=True)]
        return Draft.of_tokens(tokens, self.name, batch.device)

    def _guessed(self, context: list[int], count: int) -> list[int]:
        context = list(context)
        start = len(context)
        for _ in range(count):
            right = int(self.target.logits(context).argmax())
            is_right = (hash((len(context), *context[-6:])) % 10_000) / 10_000 < self.rate
            context.append(right if is_right else (right + 1) % self.target.vocab_size)
        return context[start:]


class Clock:
    """A target that knows how long its passes would have taken."""

    def __init__(self, target: TableModel, cost: PassCost) -> None:
        self.target, self.cost, self.seconds = target, cost, 0.0
        self.vocab_size = target.vocab_size

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> torch.Tensor:
        self.seconds += self.cost(len(contexts), max(last))
        return self.target.next_logits(contexts, last)


def tokens_per_second(cost: PassCost, rate: float, rows: int, gamma: Any, tokens: int = 240) -> float:
    target = TableModel(5, seed=3, order=4)
    clock = Clock(target, cost)
    decoder = SpeculativeDecoder(clock, Guesser(target, rate), gamma)
    settings = SamplingParams(max_tokens=tokens, temperature=0)
    sequences = [Sequence([row, 1], settings, seed=row) for row in range(rows)]
    while any(s.finish_reason is None for s in sequences):
        decoder.round(Batch([s for s in sequences if s.finish_reason is None]))
    return rows * tokens / clock.seconds


@pytest.mark.whole
@pytest.mark.parametrize("cost", [FLAT, STEEP, BUMPY], ids=["flat", "steep", "bumpy"])
@pytest.mark.parametrize("rows", effort(quick=[4], whole=[1, 4]))
@pytest.mark.parametrize("rate", effort(quick=[0.0, 0.6, 1.0], whole=[0.0, 0.3, 0.6, 0.9, 1.0]))
def test_the_chosen_gamma_is_nearly_the_best_of_all(cost: dict[tuple[int, int], float], rows: int, rate: float) -> None:
    known = Known(cost)
    chosen = tokens_per_second(known, rate, rows, Auto(known))
    best = max(tokens_per_second(known, rate, rows, gamma) for gamma in (0, 2, 4, 8, 16))
    plain = tokens_per_second(known, rate, rows, 0)
    assert chosen > 0.9 * best
    assert chosen > 0.97 * plain


def test_a_width_is_chosen_for_all_rows_at_once() -> None:
    cost = Known(BUMPY)
    sure = [0.95**k for k in range(1, 17)]
    assert best_width([sure], cost) > 4
    assert best_width([sure] * 8, cost) > 4
    assert best_width([sure, *[[]] * 7], cost) == 0  # one row's gain does not pay for eight rows' width
    assert best_width([[0.05] * 3], cost) == 0
    assert best_width([[0.05] * 3], cost, least=2) == 3  # which costs less than two
    assert best_width([[]], cost) == 0
    assert best_width([[0.9, 0.0]], lambda rows, width: 1.0) == 1  # the shortest of equals


def test_a_dip_in_the_cost_is_used() -> None:
    """Two tokens cost more than five: with two to draft that may both be right it is none, or as many as there are."""
    assert best_width([[0.6]], Known(BUMPY)) == 0
    assert best_width([[0.6, 0.5, 0.4, 0.35]], Known(BUMPY)) == 4


# The distribution


def frozen(cost: dict[tuple[int, int], float], **drafts: dict[tuple[int, int], float]) -> Frozen:
    return Frozen(Known(cost), {name: Known(table) for name, table in drafts.items()}, longest=3)


@pytest.mark.parametrize(
    ("drafter", "cost"),
    [*((name, {(1, 1): 1.0, (1, 2): 1.2, (1, 3): 2.5}) for name in DRAFTERS), ("cascade", FLAT), ("cascade", STEEP)],
)
def test_the_emitted_distribution_is_the_targets(drafter: str, cost: dict[tuple[int, int], float]) -> None:
    for setting, task in itertools.product(("temperature 1", "top-p 0.8"), TASKS.values()):
        target, draft = table_models(task, 1)
        known = drafters(target, draft)[drafter]
        auto = frozen(cost, **{name: {(1, 1): 0.1} for name in known.models()})
        found = task.emitted(SpeculativeDecoder(target, known, auto).round, setting)
        assert largest_error(found, task.plain(target, setting)) < 1e-12


def test_drawn_tokens_are_never_cut() -> None:
    """Passes that no draft could pay for, and a model that was asked for all the same (a request named its gamma)."""
    target, draft = TableModel(4, seed=2), TableModel(4, seed=7)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), frozen(STEEP, model={(1, 1): 9.0}))
    own = Sequence([1, 2], SamplingParams(max_tokens=9, temperature=1.0), seed=1, gamma=3)
    free = Sequence([1, 2], SamplingParams(max_tokens=9, temperature=1.0), seed=1)
    first, second = decoder.round(Batch([own, free])).rows
    assert first.drafted["model"] == 3
    assert second.drafted.total() == 0
    tokens = [[1, 2, 3], [1]]
    q = torch.zeros(2, 3, 4).scatter(-1, torch.tensor([[[1], [2], [3]], [[1], [0], [0]]]), 1.0)
    q[0, 1] = torch.tensor([0.0, 0.5, 0.5, 0.0])
    assert Draft.of_tokens(tokens, "a", "cpu", q=q).drawn_lengths() == [2, 0]
    rows = DraftRow([1, 2, 3], ["a", "b", "b"], [0, 0, 0]), DraftRow([1], ["b"], [0])
    assert Draft(rows).drawn_lengths({"a"}) == [1, 0]


def test_a_trimmed_draft_is_a_prefix_in_every_part() -> None:
    q = torch.rand(2, 3, 4)
    draft = Draft((DraftRow([1, 2, 3], ["a", "b", "b"], [1, 2, 3]), DraftRow([1], ["b"], [4])), q=q)
    trimmed = draft.trim(2)
    assert trimmed.rows == (DraftRow([1, 2], ["a", "b"], [1, 2]), DraftRow([1], ["b"], [4]))
    assert torch.equal(trimmed.q if trimmed.q is not None else q[:0], q[:, :2])
    assert draft.trim(3) is draft
    assert draft.trim(0).row_tokens == [[], []]


def test_tensors_of_a_draft_are_padded_to_its_width() -> None:
    draft = Draft.of_tokens([[1, 2], [3], []], "a", "cpu", support=[[5, 6], [7], []])
    assert draft.tokens.tolist() == [[1, 2], [3, 0], [0, 0]]
    assert draft.drafted.tolist() == [[True, True], [True, False], [False, False]]
    assert (draft.width, draft.lengths) == (2, [2, 1, 0])
    assert draft.rows[0] == DraftRow([1, 2], ["a", "a"], [5, 6])
    nothing = Draft.of_tokens([[], []], "a", "cpu")
    assert (nothing.tokens.shape, nothing.drafted.shape, nothing.width) == ((2, 0), (2, 0), 0)


def test_a_drafter_without_a_name_has_that_of_its_class() -> None:
    class Nameless(NoDrafter):
        name = ""

    class Heir(Nameless):
        pass

    assert (Nameless.name, Heir().name, NoDrafter().name) == ("Nameless", "Nameless", "none")


def test_a_budget_of_a_drafter_is_that_of_all_unless_it_has_its_own() -> None:
    budget = DraftBudget([4, 3], {"model": [1, 0]})
    assert (budget.of("model"), budget.of("lookup")) == ([1, 0], [4, 3])


def test_coupled_text_is_that_of_plain_decoding_while_gamma_learns() -> None:
    target = TableModel(4, seed=4)

    def texts(decoder: SpeculativeDecoder) -> list[list[int]]:
        settings = SamplingParams(max_tokens=60, temperature=0.7)
        rows = [Sequence([0, 1], settings, seed=seed, acceptance="coupled") for seed in range(4)]
        while any(row.finish_reason is None for row in rows):
            decoder.round(Batch([row for row in rows if row.finish_reason is None]))
        return [row.tokens for row in rows]

    plain = texts(SpeculativeDecoder(target))
    for drafter in (PromptLookupDrafter(min_ngram=1), ModelDrafter(TableModel(4, seed=5))):
        auto = Auto(PassCost(BUMPY), {name: PassCost({(1, 1): 3.0}) for name in drafter.models()})
        assert texts(SpeculativeDecoder(target, drafter, auto)) == plain


def test_forced_tokens_are_drafted_where_nothing_else_pays() -> None:
    """Speculation that does not pay is found out; what a grammar forces is drafted all the same."""
    chain = AutomatonMatcher({state: {state % 3: state + 1} for state in range(12)}, final={12})
    sequence = Sequence([0, 1, 0, 1], SamplingParams(max_tokens=12, temperature=0), matcher=chain)
    target = TableModel(3)
    known = drafters(target, target)["cascade"]
    auto = Auto(Known({(1, 1): 1.0, (1, 17): 2.0}), {"model": Known({(1, 1): 50.0})})
    stats = SpeculativeDecoder(target, known, auto).round(Batch([sequence]))
    assert stats.rows[0].drafted == {"forced": 11}
    assert sequence.tokens == [state % 3 for state in range(12)]


# What is learnt


def test_what_was_cut_teaches_as_well() -> None:
    """A look-up that is never worth its pass is known to be right all the same."""
    target = TableModel(5, seed=3, order=4)
    auto = Auto(Known(STEEP))
    decoder = SpeculativeDecoder(target, Guesser(target, rate=1.0), auto)
    sequence = Sequence([0, 1], SamplingParams(max_tokens=60, temperature=0))
    while sequence.finish_reason is None:
        assert decoder.round(Batch([sequence])).rows[0].drafted.total() == 0
    assert auto.acceptance.overall("guesser", 0) > 0.95


def test_what_a_sequence_does_moves_what_is_expected_of_it() -> None:
    acceptance = AcceptanceRates()
    copying, writing, new = (Sequence([1]) for _ in range(3))
    assumed = acceptance(new, "lookup", 4)
    for _ in range(20):
        acceptance.learn(copying, "lookup", 4, True)
        acceptance.learn(writing, "lookup", 4, False)
    assert acceptance(copying, "lookup", 4) > 0.85
    assert acceptance(writing, "lookup", 4) < 0.15
    assert acceptance(copying, "lookup", 4) > acceptance(new, "lookup", 4) > acceptance(writing, "lookup", 4)
    assert acceptance(new, "lookup", 5) == AcceptanceRates()(new, "lookup", 5) > assumed  # more support, another count
    assert acceptance(new, "forced", 0) == 1


def test_a_request_in_which_nothing_repeats_is_soon_known_whatever_the_support() -> None:
    rates, texts = AcceptanceRates(), [Sequence([1, 2]) for _ in range(3)]
    for support in range(1, 17):
        for _ in range(100):
            rates.learn(texts[0], "suffix", support, True)
    assert rates(texts[1], "suffix", 16) > 0.9
    for support in range(1, 9):  # each of them seen once
        rates.learn(texts[1], "suffix", support, False)
    assert rates(texts[1], "suffix", 16) < 0.5  # which was never seen here
    assert rates(texts[1], "model", 0) == rates.overall("model", 0)  # another drafter
    assert rates(texts[2], "suffix", 16) > 0.9  # another request
    for _ in range(20):
        rates.learn(texts[1], "suffix", 3, True)
    assert rates(texts[1], "suffix", 16) > 0.8


def test_a_request_that_does_better_than_others_is_not_trusted_beyond_reason() -> None:
    rates, texts = AcceptanceRates(), [Sequence([1, 2]) for _ in range(2)]
    for _ in range(300):
        rates.learn(texts[0], "suffix", 1, False)
        rates.learn(texts[0], "suffix", 9, True)
    for _ in range(30):
        rates.learn(texts[1], "suffix", 1, True)
    assert 0.5 < rates(texts[1], "suffix", 2) <= 0.95
    assert rates(texts[1], "suffix", 9) <= 1.0


@pytest.mark.parametrize(("rows", "expected"), [(1, 64), (3, 10)])
def test_several_rows_do_not_look_for_copies_in_every_round_where_none_pays(rows: int, expected: int) -> None:
    asked: list[list[int]] = []

    class Wrong(Drafter):
        name = "wrong"

        def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
            most = budget.of(self.name)
            asked.append(list(most))
            return Draft.of_tokens([[0] * min(n, 2) for n in most], self.name, batch.device)

    steep = Known({(n, width): float(width) for n in (1, 8) for width in (1, 17)})
    decoder = SpeculativeDecoder(TableModel(4, seed=2), Wrong(), Auto(steep))
    params = SamplingParams(max_tokens=200)
    texts = [Sequence([1, 2], params, seed=row) for row in range(rows)]
    for _ in range(64):
        decoder.round(Batch(texts))
    assert len([gamma for gamma in asked if any(gamma)]) == expected
    named = Sequence([1, 2], params, seed=9, gamma=2)  # whose request names its own
    asked.clear()
    for _ in range(8):
        decoder.round(Batch([*texts, named]))
    assert all(gamma[-1] > 0 for gamma in asked)


def test_samples_of_a_request_learn_together() -> None:
    rates, group = AcceptanceRates(), RequestGroup()
    samples = [*(Sequence([1, 2], group=group) for _ in range(3)), Sequence([1, 2])]
    for _ in range(20):
        rates.learn(samples[0], "suffix", 5, False)
        rates.learn(samples[3], "suffix", 5, True)
    assert rates(samples[2], "suffix", 5) == rates(samples[0], "suffix", 5) < 0.2
    assert rates(samples[3], "suffix", 5) > 0.8


def test_one_row_that_gains_much_does_not_outweigh_those_that_wait() -> None:
    costs = {0: 1.0, 8: 1.6}

    def cost(rows: int, width: int) -> float:
        return costs[0] + (costs[8] - costs[0]) * (width - 1) / 8

    good, bad = [0.99**k for k in range(1, 9)], [0.05**k for k in range(1, 9)]
    assert best_width([good], cost) == 8
    assert best_width([good, *[bad] * 7], cost) <= 1  # though 8 more tokens in 1.6 times the seconds are more a second
    assert best_width([good] * 7 + [bad], cost) > 4


def test_a_draft_model_that_never_pays_is_tried_now_and_then() -> None:
    target, draft = TableModel(4, seed=2), TableModel(4, seed=7)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), Auto(Known(FLAT), {"model": Known({(1, 1): 100.0})}))
    sequence = Sequence([1, 2], SamplingParams(max_tokens=200, temperature=1.0), seed=1)
    drafted = []
    while sequence.finish_reason is None:
        drafted.append(decoder.round(Batch([sequence])).rows[0].drafted["model"])
    assert 0 < sum(drafted) <= len(drafted) // 40


def test_a_draft_model_that_does_not_pay_is_told() -> None:
    target = Known({(1, 1): 10.0, (1, 17): 20.0})
    larger = Auto(target, {"model": Known({(1, 1): 15.0})})
    assert "1.50 times as long" in larger.remarks()[0]
    good = Auto(target, {"model": Known({(1, 1): 1.0})})
    assert good.remarks() == ()
    for _ in range(200):
        good.acceptance.learn(Sequence([1]), "model", 0, False)
    assert "0.10 of the target's" in good.remarks()[0]
    assert Auto(target).remarks() == ()


# Costs


def test_costs_between_and_beyond_what_was_measured() -> None:
    cost = PassCost({(1, 1): 10, (1, 3): 30, (4, 1): 40, (4, 3): 60})
    assert cost(1, 1) == 10
    assert cost(1, 2) == 20
    assert cost(2, 1) == 20
    assert cost(1, 5) == 50
    assert cost(8, 1) == 80
    assert PassCost({(1, 1): 10, (1, 5): 5})(1, 9) == 5  # never below what the last one took


@pytest.mark.parametrize("entries", [{}, {(1, 1): 0.0}, {(1, 1): float("nan")}, {(0, 1): 1.0}], ids=str)
def test_entries_that_make_no_sense_are_refused(entries: dict[tuple[int, int], float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        PassCost(entries)


def test_rounds_refine_an_entry_and_a_busy_machine_moves_none() -> None:
    busy, wrong = PassCost(BUMPY), PassCost(BUMPY)
    for _ in range(300):
        for width in (1, 5):
            busy.learn(1, width, 1.8 * BUMPY[1, width])
            wrong.learn(1, width, BUMPY[1, width] * (3 if width == 5 else 1))
    assert busy(1, 5) / busy(1, 1) == pytest.approx(57 / 40, rel=0.05)
    assert wrong(1, 5) / wrong(1, 1) == pytest.approx(3 * 57 / 40, rel=0.1)


def test_a_table_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(TableModel):
        fingerprint = "a table"

    cache = DiskCache(tmp_path / "cache")
    first = measured(as_language_model(Model()), cache)
    assert {(1, 1), (8, 17)} <= set(first.seconds)
    asked: list[dict[str, Any]] = []

    def nothing(model: Any, budget_s: float = 0, **options: Any) -> dict[tuple[int, int], float]:
        asked.append({"budget_s": budget_s, **options})
        return {(1, 1): first(1, 1) * 1.4, (8, 17): first(8, 17) / 1.4}

    monkeypatch.setattr(agentspec.models.pass_cost, "measure", nothing)
    second = measured(as_language_model(Model()), cache)
    quieter = first.seconds | {(8, 17): first(8, 17) / 1.4}  # a busy second is forgotten, a quiet one is not
    assert second.seconds == agentspec.models.pass_cost._without_spikes(quieter)
    assert [(how["budget_s"], set(how["known"])) for how in asked] == [(0.5, set(first.seconds))]


def test_the_outline_is_measured_whatever_it_takes_and_what_is_missing_comes_first() -> None:
    outline = {(r, w) for r in (1, 8) for w in (1, 5, 17)}
    assert set(agentspec.models.pass_cost.measure(as_language_model(TableModel()), budget_s=0)) == outline
    known = outline - {(8, 5)}
    assert set(agentspec.models.pass_cost.measure(as_language_model(TableModel()), budget_s=0, known=known)) == {(8, 5)}
    assert len(agentspec.models.pass_cost.measure(as_language_model(TableModel()), budget_s=0, known=outline)) == 1
    assert {(2, 3), (4, 13)} < set(agentspec.models.pass_cost.measure(as_language_model(TableModel())))


def test_a_busy_second_is_no_cost() -> None:
    spiky = {(1, 1): 90.0, (1, 5): 3.0, (8, 1): 4.0, (8, 5): 6.0}
    assert agentspec.models.pass_cost._without_spikes(spiky) == spiky | {(1, 1): 4.5}


def test_a_table_of_another_device_or_version_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(TableModel):
        fingerprint = "a table"

    cache = DiskCache(tmp_path / "cache")
    tables = [{(1, 1): 1.0}, {(1, 1): 2.0}, {(1, 1): 3.0}]
    monkeypatch.setattr(agentspec.models.pass_cost, "measure", lambda *_, **__: tables.pop(0))
    assert measured(as_language_model(Model()), cache)(1, 1) == 1
    monkeypatch.setattr(torch, "__version__", "another")
    assert measured(as_language_model(Model()), cache)(1, 1) == 2
    monkeypatch.setattr(Model, "fingerprint", "another table")
    assert measured(as_language_model(Model()), cache)(1, 1) == 3


def test_costs_of_a_model_that_cannot_capture_after_all_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Model(TableModel):
        fingerprint = "captured"

    def fails(model: Any, *_: Any, **__: Any) -> dict[tuple[int, int], float]:
        model.model.fingerprint = "launched"
        return {(1, 1): 1e-12}

    cache = DiskCache(tmp_path / "cache")
    right = agentspec.models.pass_cost.measure
    monkeypatch.setattr(agentspec.models.pass_cost, "measure", fails)
    assert measured(as_language_model(Model()), cache)(1, 1) == 1e-12
    monkeypatch.setattr(agentspec.models.pass_cost, "measure", right)
    assert measured(as_language_model(Model()), cache)(1, 1) > 1e-12


@pytest.mark.parametrize("value", [b"", b"{}", b"[[1, 1]]", b"[[1, 1, -3]]", b"\xff", b'"x"'], ids=str)
def test_a_broken_table_is_measured_again(tmp_path: Path, value: bytes) -> None:
    class Model(TableModel):
        fingerprint = "a table"

    cache = DiskCache(tmp_path / "cache")
    key = agentspec.models.pass_cost._key(as_language_model(Model()))
    assert key is not None
    cache.set(key, value)
    assert (8, 17) in measured(as_language_model(Model()), cache).seconds


def test_auto_is_measured_where_a_decoder_is_made() -> None:
    target, draft = TableModel(4, seed=2), TableModel(4, seed=7)
    decoder = SpeculativeDecoder(target, drafters(target, draft)["cascade"], gamma="auto")
    assert isinstance(decoder.draft_length, Auto)
    assert set(decoder.draft_length.drafts) == {"model"}
    sequence = Sequence([0, 1], SamplingParams(max_tokens=12, temperature=1.0), seed=1)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))
    assert sequence.length == 12


def test_the_report_tells_of_a_draft_model_that_does_not_pay() -> None:
    target = TableModel(4, seed=2)
    auto = Auto(Known({(1, 1): 1.0, (1, 17): 2.0}), {"model": Known({(1, 1): 3.0})})
    engine = LocalEngine(SpeculativeDecoder(target, ModelDrafter(target), auto))
    chosen, named = (
        engine.generate([Request([1, 2], SamplingParams(max_tokens=5), gamma=gamma)])[0][0].stats for gamma in (None, 2)
    )
    engine.close()
    assert chosen is not None
    assert named is not None
    (remark,) = chosen.to_dict()["remarks"]
    assert "3.00 times" in remark
    assert named.remarks == ()
    gain = call_gain([Step.model_validate(chosen.to_dict())])
    assert gain is not None
    assert gain.remarks == (remark,)
    assert remark in describe_gain(gain)
