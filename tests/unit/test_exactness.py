"""What is emitted has the distribution of the target, whatever drafts, and no row depends on its neighbours."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
import torch
from effort import effort
from enumeration import (
    DRAFTERS,
    SETTINGS,
    TASKS,
    AutomatonMatcher,
    Distribution,
    TableModel,
    Task,
    automaton,
    drafters,
    joint_distribution,
    largest_error,
    table_models,
)
from torch import Tensor

import agentspec.acceptance
import agentspec.drafters.model
from agentspec import (
    Batch,
    Draft,
    Drafter,
    PromptLookupDrafter,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
    SuffixDrafter,
)
from agentspec.acceptance import accept_argmax, verify_coupled
from agentspec.drafters import DraftBudget
from agentspec.errors import InvalidRequestError
from agentspec.grammars import GrammarCursor, Matcher
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.models.backends.native import compiles, kernels
from agentspec.models.backends.native.sampling import NativeSampling
from agentspec.rng import Acceptance, CoupledRng, Role, SequenceRng
from agentspec.sampling import argmax_tokens, warp, warped_logits
from agentspec.sequence import RequestGroup
from agentspec.speculative import verify

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDING = 1e-12
GAMMAS = (1, 2, 3)
SEEDS = (0, 1)
CASES = list(itertools.product(SEEDS, GAMMAS))
ACCEPTANCES: tuple[Acceptance, ...] = ("rejection", "coupled")

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
every_setting = pytest.mark.parametrize("setting", SETTINGS)
every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
every_acceptance = pytest.mark.parametrize("acceptance", ACCEPTANCES)


def chatty_models() -> tuple[TableModel, TableModel]:
    """A target whose texts are long and differ, and a draft."""
    return TableModel(4, seed=2, spread=0.7), TableModel(4, seed=7, spread=0.7)


def play(decoder: SpeculativeDecoder, sequences: SequenceOf[Sequence]) -> list[tuple[Counter[str], Counter[str]]]:
    """Decode to the end, finished rows leaving the batch; drafted and accepted tokens of each row, by drafter."""
    counts: list[tuple[Counter[str], Counter[str]]] = [(Counter(), Counter()) for _ in sequences]
    while live := [row for row, s in enumerate(sequences) if s.finish_reason is None]:
        stats = decoder.round(Batch([sequences[row] for row in live]))
        for row, row_stats in zip(live, stats.rows, strict=True):
            counts[row][0].update(row_stats.drafted)
            counts[row][1].update(row_stats.accepted)
    return counts


# Enumeration


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> Iterator[list[float]]:
    """The error of every enumerated case; one line about them when the module is done."""
    found: list[float] = []
    yield found
    if found:
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nenumeration: {len(found)} cases, largest error {max(found):.1e}")


def enumerated(*labels: str) -> list[tuple[int, int]]:
    """Seeds of the models and gammas to enumerate: all, or, quickly, one pair that the labels choose, gamma below 3."""
    small = [(seed, gamma) for seed, gamma in CASES if gamma < max(GAMMAS)]
    return effort(quick=[small[zlib.crc32(" ".join(labels).encode()) % len(small)]], whole=CASES)


@pytest.mark.skipif(not compiles("auto"), reason="no C++ compiler")
@pytest.mark.whole
@every_task
@every_setting
@every_drafter
def test_the_emitted_distribution_is_the_targets_by_native_kernels(drafter: str, setting: str, task: Task) -> None:
    """Natively, draws and filters are of float32: errors are its rounding."""
    native = NativeSampling(kernels())
    for seed, gamma in enumerated("native", drafter, setting, repr(task)):
        target, draft = table_models(task, seed, torch.float32)
        decoder = SpeculativeDecoder(target, drafters(target, draft)[drafter], gamma)
        error = largest_error(task.emitted(decoder.round, setting, native), task.plain(target, setting))
        assert error < 2e-6, f"models {seed}, gamma {gamma}"


@pytest.mark.skipif(not compiles("auto"), reason="no C++ compiler")
def test_a_wrong_native_draw_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    native, task = NativeSampling(kernels()), TASKS["free"]
    target, draft = table_models(task, 1, torch.float32)
    decoder = SpeculativeDecoder(target, drafters(target, draft)["model"], 2)
    right = native._kernels.draw
    monkeypatch.setattr(native._kernels, "draw", lambda probs, uniforms: right(probs.sqrt(), uniforms))
    wrong = task.emitted(decoder.round, "temperature 1", native)
    assert largest_error(wrong, task.plain(target, "temperature 1")) > 1e-4  # rounding is below 2e-6


@pytest.mark.whole
@every_task
@every_setting
@every_drafter
def test_the_emitted_distribution_is_the_targets(drafter: str, setting: str, task: Task, errors: list[float]) -> None:
    for seed, gamma in enumerated(drafter, setting, repr(task)):
        target, draft = table_models(task, seed)
        decoder = SpeculativeDecoder(target, drafters(target, draft)[drafter], gamma)
        error = largest_error(task.emitted(decoder.round, setting), task.plain(target, setting))
        errors.append(error)
        assert error < ROUNDING, f"models {seed}, gamma {gamma}"


@every_task
@every_setting
def test_the_expected_distribution_is_not_vacuous(setting: str, task: Task) -> None:
    expected = [task.plain(table_models(task, seed)[0], setting) for seed in SEEDS]
    assert [sum(probs.values()) for probs in expected] == pytest.approx([1] * len(expected), abs=ROUNDING)
    if setting == "greedy":
        assert [list(probs.values()) for probs in expected] == [[1.0]] * len(expected)
    else:
        assert all(len(probs) > 1 for probs in expected)


@pytest.mark.parametrize("drafter", [*DRAFTERS, "lookup in all rows", "suffix in all rows"])
def test_rows_of_a_batch_are_independent(drafter: str) -> None:
    """The joint distribution of two rows that differ in all settings is the product of those of each alone."""
    grammar = TASKS["constrained"]
    rows = [
        (Task(4, 2, prompt=(0, 1, 0)), "temperature 1"),
        (dataclasses.replace(grammar, length=2), "temperature 0.7, top-k 2"),
    ]
    target, draft = table_models(grammar, seed=1)
    known = drafters(target, draft)
    known["lookup in all rows"] = PromptLookupDrafter(min_ngram=1, scope="engine")
    known["suffix in all rows"] = SuffixDrafter(scope="engine", memory=0)
    decoder = SpeculativeDecoder(target, known[drafter], gamma=1)
    joint = joint_distribution(decoder.round, [lambda row=row: row[0].start(row[1]) for row in rows], length=2)
    first, second = (task.plain(target, setting) for task, setting in rows)
    product = {(a, b): first[a] * second[b] for a in first for b in second}
    assert min(len(first), len(second)) > 1
    assert max(abs(joint.get(texts, 0) - product.get(texts, 0)) for texts in joint | product) < ROUNDING


def test_texts_of_siblings_are_drafted_and_change_no_coupled_text() -> None:
    target = TableModel(4, seed=4)

    def texts(scope: Any, gamma: int) -> tuple[list[list[int]], int]:
        settings = SamplingParams(max_tokens=40, temperature=0.5)
        group = RequestGroup()
        for seed in range(5):
            Sequence([0, 1], settings, seed=seed, gamma=gamma, acceptance="coupled", group=group)
        samples = group.samples
        counts = play(SpeculativeDecoder(target, PromptLookupDrafter(min_ngram=3, scope=scope)), samples)
        return [sample.tokens for sample in samples], sum(accepted.total() for _, accepted in counts)

    plain, _ = texts("request", 0)
    alone, by_itself = texts("request", 4)
    shared, with_siblings = texts("siblings", 4)
    assert plain == alone == shared == texts("engine", 4)[0]
    assert with_siblings > by_itself


def test_an_empty_residual_falls_back_to_p() -> None:
    """Where rounding leaves p below q everywhere, a rejection draws from p."""
    q = torch.tensor([[[0.5, 0.5, 0.0]]])
    p = torch.cat([q * (1 - 1e-6), torch.full_like(q, math.nan)], dim=1)
    draft = Draft.of_tokens([[0]], "model", "cpu", q=q)

    class Highest(SequenceRng):
        def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
            return torch.full(offsets.shape, 1 - 2.0**-53, dtype=torch.float64)

    verification = verify(p, draft, Highest([0], [0]))
    assert (verification.accepted.item(), verification.token.item()) == (0, 1)


class Positions(Matcher):
    """A grammar that tells by the position alone what is legal."""

    def __init__(self, masks: SequenceOf[TokenMask]) -> None:
        self.masks = masks
        self.at = 0

    def token_mask(self) -> TokenMask:
        return self.masks[self.at]

    def accept_token(self, token: int) -> bool:
        is_legal = token in self.masks[self.at]
        self.at += is_legal
        return is_legal

    def rollback(self, count: int) -> None:
        self.at -= count

    def is_accepting(self) -> bool:
        return False


@pytest.mark.parametrize("is_dense", [False, True], ids=["tokens alone", "with q"])
def test_the_greedy_path_is_what_both_rules_come_to(is_dense: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, gamma, vocabulary = 40, 3, 4
    logits = torch.randn(rows, gamma + 1, vocabulary, generator=generator)
    nowhere = torch.rand(rows, gamma + 1, generator=generator) < 0.1  # no token is legal there
    legal = (torch.rand(logits.shape, generator=generator) < 0.7) & ~nowhere[..., None]
    masks = [[TokenMask.of(mask) for mask in row] for row in legal]
    params = SamplingParams(temperature=0)
    p = warp(logits, [params] * rows, PackedMasks(masks))
    argmax = p.nan_to_num().argmax(-1)[:, :-1]
    strays = torch.randint(vocabulary, argmax.shape, generator=generator)
    tokens = torch.where(torch.rand(argmax.shape, generator=generator) < 0.7, argmax, strays)
    lengths = torch.randint(gamma + 1, (rows,), generator=generator)
    q = 0.5 + torch.rand(rows, gamma, vocabulary, generator=generator) if is_dense else None
    drafted = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    q = None if q is None else (q / q.sum(-1, keepdim=True))[:, : max(map(len, drafted))]
    draft = Draft.of_tokens(drafted, "model", "cpu", q=q)
    seeds, accepted, undefined = list(range(rows)), set(), [0, 0]
    for rule, rng in ((verify, SequenceRng(seeds, seeds)), (verify_coupled, CoupledRng(seeds, seeds))):
        verification = rule(p, draft, rng)
        for b, (n, token) in enumerate(zip(verification.accepted.tolist(), verification.token.tolist(), strict=True)):
            row, some = Draft.of_tokens([drafted[b]], "model", "cpu"), logits[b : b + 1]
            for makes_masks in (False, True):
                matcher = Positions(masks[b])
                cursor = GrammarCursor([Sequence([0], params, matcher=matcher)], vocabulary)
                _ = cursor.masks([drafted[b]]) if makes_masks else cursor.seek(0, drafted[b])
                is_undefined = bool(p[b, n, 0].isnan())
                undefined[n > 0] += is_undefined
                if is_undefined and n == 0:
                    with pytest.raises(InvalidRequestError, match="No token may come next"):
                        accept_argmax(some, argmax_tokens(some), row, cursor)
                else:
                    new = [*drafted[b][:n], *[token] * (not is_undefined)]
                    assert accept_argmax(some, argmax_tokens(some), row, cursor) == [new]
                    assert cursor.commit(0, new) in (n, n + 1)  # the last token may have been found by its mask
                    accepted.add(n)
                cursor.reset()
                assert matcher.at in (0, n, n + 1)
    assert all(undefined)
    assert accepted == set(range(gamma + 1))


# Coupled acceptance: the text for a seed does not know about speculation


def crowd(acceptance: Acceptance, gammas: SequenceOf[int], seeds: SequenceOf[int]) -> list[Sequence]:
    """Up to 12 tokens for every setting, free and constrained, gamma and seed."""
    tasks = [Task(4, max_tokens=12), Task(4, max_tokens=12, matcher=automaton)]
    return [
        task.start(setting, seed=seed, gamma=gamma, acceptance=acceptance)
        for task, setting, seed, gamma in itertools.product(tasks, SETTINGS, seeds, gammas)
    ]


CROWD = range(effort(quick=40, whole=200))


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    """The texts of the crowd without speculation."""
    plain = crowd("coupled", [0], CROWD)
    play(SpeculativeDecoder(chatty_models()[0]), plain)
    return [s.tokens for s in plain]


@pytest.mark.whole
@every_drafter
def test_coupled_text_does_not_depend_on_speculation(drafter: str, plain_texts: list[list[int]]) -> None:
    assert len(set(map(tuple, plain_texts))) > len(CROWD)
    target, draft = chatty_models()
    sequences = crowd("coupled", [0], CROWD)
    for row, sequence in enumerate(sequences):
        sequence.gamma = row % 5  # over the seeds, every setting meets every gamma several times
    play(SpeculativeDecoder(target, drafters(target, draft)[drafter]), sequences)
    assert [s.tokens for s in sequences] == plain_texts


@every_drafter
def test_coupled_text_of_every_gamma(drafter: str) -> None:
    """The same seeds and settings under every gamma."""
    target, draft = chatty_models()
    sequences = crowd("coupled", range(5), range(4))
    play(SpeculativeDecoder(target, drafters(target, draft)[drafter]), sequences)
    assert all(len({tuple(s.tokens) for s in same}) == 1 for same in zip(*[iter(sequences)] * 5, strict=True))


def chi_square_quantile(freedom: int, z: float) -> float:
    """The chi-square value that a standard normal ``z`` corresponds to (Wilson, Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + z * math.sqrt(spread)) ** 3


def assert_follows(texts: list[tuple[int, ...]], expected: Distribution) -> None:
    """A chi-square test at p = 1e-4, rare texts counted as one."""
    counts = Counter(texts)
    assert set(counts) <= set(expected)
    common = [text for text, mass in expected.items() if mass * len(texts) >= 5]
    cells = [(counts[text], expected[text] * len(texts)) for text in common]
    rare = len(texts) - sum(count for _, count in cells)
    if rare >= 1:
        cells.append((len(texts) - sum(seen for seen, _ in cells), rare))
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    assert statistic < chi_square_quantile(len(cells) - 1, z=3.719)  # the normal's upper 1e-4 point


@pytest.mark.whole
@pytest.mark.parametrize(("acceptance", "drafter"), [("coupled", "none"), ("rejection", "model")], ids=str)
@pytest.mark.parametrize("task", ["free, limited", "constrained"])
def test_seeded_draws_have_the_targets_distribution(acceptance: Acceptance, drafter: str, task: str) -> None:
    """Many texts of pinned seeds. Besides the distribution this checks the keys of the rng across rounds."""
    what = dataclasses.replace(TASKS[task], length=4, max_tokens=4)
    target, draft = table_models(what, seed=1)
    sequences = [
        what.start("temperature 1", seed=seed, acceptance=acceptance)
        for seed in range(effort(quick=2_000, whole=10_000))
    ]
    play(SpeculativeDecoder(target, drafters(target, draft)[drafter], gamma=2), sequences)
    assert_follows([tuple(s.tokens) for s in sequences], what.plain(target, "temperature 1"))


# A row in a batch is the row alone


def mixed_rows(acceptance: Acceptance, seed: int) -> list[Sequence]:
    """Five rows that differ in all that a row can differ in."""
    free, constrained = Task(4, max_tokens=12), Task(4, max_tokens=9, matcher=automaton)
    copying, limited = Task(4, max_tokens=12, prompt=(2, 1, 2, 1, 2, 1)), Task(4, max_tokens=5)
    return [
        free.start("temperature 1", seed=seed, gamma=3, acceptance=acceptance),
        constrained.start("temperature 0.7, top-k 2", seed=seed + 1, gamma=1, acceptance=acceptance),
        copying.start("top-p 0.8", seed=seed, gamma=4, acceptance=acceptance),
        limited.start("greedy", seed=seed + 2, gamma=2, acceptance=acceptance),
        dataclasses.replace(constrained, prompt=(1,)).start("min-p 0.3", seed=seed, gamma=0, acceptance=acceptance),
    ]


@pytest.mark.whole
@every_acceptance
@every_drafter
def test_a_row_in_a_batch_is_the_row_alone(drafter: str, acceptance: Acceptance) -> None:
    target, draft = TableModel(4, seed=4), TableModel(4, seed=5)
    decoder = SpeculativeDecoder(target, drafters(target, draft)[drafter])
    for seed in range(effort(quick=3, whole=12)):
        together, alone = mixed_rows(acceptance, seed), mixed_rows(acceptance, seed)
        counts = play(decoder, together)
        assert counts == [play(decoder, [row])[0] for row in alone]
        assert [row.tokens for row in together] == [row.tokens for row in alone]
        assert [row.finish_reason for row in together] == [row.finish_reason for row in alone]


def test_a_row_does_not_depend_on_its_place_in_the_batch() -> None:
    target, draft = TableModel(4, seed=4), TableModel(4, seed=5)
    decoder = SpeculativeDecoder(target, drafters(target, draft)["cascade"])
    expected = mixed_rows("rejection", seed=3)
    play(decoder, expected)
    for order in itertools.permutations(range(5)):
        rows = mixed_rows("rejection", seed=3)
        play(decoder, [rows[row] for row in order])
        assert [row.tokens for row in rows] == [row.tokens for row in expected]


# The cursor: one mask for p and q, and a grammar that stands where the tokens end


class Stubborn(Drafter):
    """Proposes the same token, legal or not, without consuming it."""

    name = "stubborn"

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        return Draft.of_tokens([[self.token] * n for n in budget.of(self.name)], self.name, batch.device)


class Illegal(Drafter):
    """Proposes the first illegal token where there is one."""

    name = "illegal"

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        masks = [cursor.token_mask(row) for row in range(len(batch))]
        tokens = [
            [int((~mask.tensor()).nonzero()[0])] * n if mask is not None and not mask.tensor().all() else []
            for mask, n in zip(masks, budget.of(self.name), strict=True)
        ]
        return Draft.of_tokens(tokens, self.name, batch.device)


def path_of(tokens: SequenceOf[int]) -> list[int]:
    """The states of the automaton along these tokens."""
    matcher = automaton()
    for token in tokens:
        matcher.accept_token(token)
    return matcher.path


def matcher_of(sequence: Sequence) -> AutomatonMatcher:
    assert isinstance(sequence.matcher, AutomatonMatcher)
    return sequence.matcher


class Recorded(Drafter):
    """Another drafter, and what it proposed last."""

    name = "recorded"

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        self.draft = self.drafter.propose(batch, budget, cursor)
        return self.draft


@every_acceptance
@pytest.mark.parametrize("name", ["model", "cascade"])
def test_p_and_q_see_the_same_masks(name: str, acceptance: Acceptance, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[PackedMasks]] = {"p": [], "q": []}

    def spy(side: str, spied_on: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spied(logits: Tensor, params: SequenceOf[SamplingParams], masks: PackedMasks, *rest: Any) -> Tensor:
            seen[side].append(masks)
            return spied_on(logits, params, masks, *rest)

        return spied

    monkeypatch.setattr(agentspec.acceptance, "warped_logits", spy("p", warped_logits))
    monkeypatch.setattr(agentspec.drafters.model, "warp", spy("q", warp))
    target, draft = chatty_models()
    drafter = Recorded(drafters(target, draft)[name])
    compared = 0
    for seed in range(20):
        sequence = TASKS["constrained"].start("temperature 1", seed=seed, gamma=4, acceptance=acceptance)
        while sequence.finish_reason is None:
            for masked in seen.values():
                masked.clear()
            SpeculativeDecoder(target, drafter).round(Batch([sequence]))
            [[p_masks]] = [masks.rows for masks in seen["p"]]
            by_model = [k for k, source in enumerate(drafter.draft.rows[0].source) if source == "model"]
            for k, q_masks in zip(by_model, seen["q"], strict=True):
                mask = p_masks[k]
                assert [[mask]] == q_masks.rows
                compared += mask is not None and not mask.tensor().all()
    assert compared > 10


def test_the_matcher_stands_where_the_tokens_end() -> None:
    """After every round, whatever was rejected of the draft."""
    target, draft = chatty_models()
    for name, drafter in drafters(target, draft).items():
        for seed in range(10):
            sequence = Task(4, max_tokens=12, matcher=automaton).start("temperature 1", seed=seed, gamma=3)
            while sequence.finish_reason is None:
                SpeculativeDecoder(target, drafter).round(Batch([sequence]))
                emitted = [token for token in sequence.tokens if token not in sequence.end_tokens]
                assert matcher_of(sequence).path == path_of(emitted), name


def test_a_fully_rejected_draft_leaves_only_the_committed_token() -> None:
    """The look-up consumes legal tokens; a greedy target that wants another one accepts none of them."""

    class Contrary(TableModel):
        def logits(self, context: list[int]) -> Tensor:
            return torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)  # stays in the cycle on 1

        def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
            return self.logits([]).expand(len(contexts), max(last), 4)

    sequence = Task(4, matcher=automaton, prompt=(3, 0, 2, 0, 0, 2, 0, 3)).start("greedy", seed=0, gamma=4)
    target = Contrary(4)
    decoder = SpeculativeDecoder(target, drafters(target, target)["lookup"])
    stats = decoder.round(Batch([sequence]))
    assert stats.rows[0].drafted["forced"] + stats.rows[0].drafted["lookup"] == 4
    assert sequence.tokens == [1]
    assert matcher_of(sequence).path == [0, 0]


@pytest.mark.whole
@pytest.mark.parametrize("drafter", [Illegal(), *map(Stubborn, range(4))], ids=["illegal", *map(str, range(4))])
def test_bad_drafts_change_nothing(drafter: Drafter) -> None:
    for setting, task in itertools.product(
        effort(quick=list(SETTINGS)[:3], whole=list(SETTINGS)), [TASKS["constrained"], Task(4)]
    ):
        target, _ = table_models(task, seed=1)
        round_ = SpeculativeDecoder(target, drafter, gamma=2).round
        assert largest_error(task.emitted(round_, setting), task.plain(target, setting)) < ROUNDING


def test_an_illegal_draft_is_never_accepted() -> None:
    target, _ = table_models(TASKS["constrained"], seed=0)
    sequences = [Task(4, max_tokens=12, matcher=automaton).start("greedy", gamma=3) for _ in range(2)]
    ((drafted, accepted),) = play(SpeculativeDecoder(target, Illegal()), sequences[:1])
    play(SpeculativeDecoder(target), sequences[1:])
    assert sequences[0].tokens == sequences[1].tokens
    assert drafted.total() > 0
    assert accepted.total() == 0
