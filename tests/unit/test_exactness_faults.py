"""The exactness checker sees every classic mistake: each fault below moves the distribution of what is emitted.

A fault replaces one piece of a correct whole: of the rule, of a drafter, of the cursor. Each is enumerated beside
the whole with nothing replaced, which must be exact in the same cases.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import pytest
import torch
from effort import effort
from enumeration import TASKS, TableModel, largest_error, table_models
from torch import Tensor

from agentspec import (
    Batch,
    Draft,
    Drafter,
    GrammarError,
    LanguageModel,
    ModelDrafter,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.acceptance import Verification
from agentspec.drafters import DraftBudget
from agentspec.grammars import GrammarCursor
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.rng import Role, SequenceRng
from agentspec.sampling import warp
from agentspec.speculative import VERIFY

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.whole]

ROUNDING, VISIBLE = 1e-12, 1e-6
WHAT = {"free": dataclasses.replace(TASKS["free"], length=3), "constrained": TASKS["constrained"]}
DRAWN, CUT = "temperature 1", "temperature 0.7, top-k 2"
CASES = effort(quick=(("free", DRAWN), ("constrained", CUT)), whole=tuple(itertools.product(WHAT, (DRAWN, CUT))))


def errors(drafter: Callable[[TableModel], Drafter]) -> dict[tuple[str, str], float]:
    """The error of every case with a drafter made from the draft model."""
    found = {}
    for task, setting in CASES:
        target, draft = table_models(WHAT[task], seed=1)
        decoder = SpeculativeDecoder(target, drafter(draft), gamma=2)
        expected = WHAT[task].plain(target, setting)
        try:
            found[task, setting] = largest_error(WHAT[task].emitted(decoder.round, setting), expected)
        except GrammarError:  # the commit will not take an illegal token
            found[task, setting] = 1.0
    return found


@pytest.fixture(scope="module")
def detected(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """The largest error of every fault; a table of them when the module is done."""
    found: dict[str, float] = {}
    yield found
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\nfaults and the largest error they make:")
        for name, error in found.items():
            print(f"  {error:8.1e}  {name}")


# The rule


def leading(accepted: Tensor) -> Tensor:
    """``[B]``: how many stand before the first rejected one."""
    return accepted.long().cumprod(-1).sum(-1)


def clamped(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


@dataclass(frozen=True)
class Rule:
    """Algorithm 1 again, in pieces; without arguments it is the decoder's own."""

    accepts: Callable[[Tensor, Tensor], Tensor] = torch.lt  # r, ratio
    ratio: Callable[[Tensor, Tensor], Tensor] = torch.div  # p, q of the drafted tokens
    count: Callable[[Tensor], Tensor] = leading
    residual: Callable[[Tensor, Tensor], Tensor] = clamped
    p_row: Callable[[Tensor, Tensor], Tensor] = lambda n, lengths: n
    q_row: Callable[[Tensor], Tensor] = lambda n: n

    def __call__(self, p: Tensor, draft: Draft, rng: SequenceRng) -> Verification:
        rows, offsets = torch.arange(len(p)), torch.arange(p.shape[1] - 1)
        p_of_tokens = p[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
        ratio = self.ratio(p_of_tokens, draft.q_of_tokens())
        r = rng.uniform(Role.ACCEPT, offsets.expand_as(ratio), edges=ratio)
        n = self.count(self.accepts(r, ratio) & draft.drafted)
        p_n = p[rows, self.p_row(n, torch.tensor(draft.lengths))]
        residual = self.residual(p_n, draft.q_at(self.q_row(n), like=p_n))
        empty = residual.sum(-1, keepdim=True) == 0
        return Verification(n, rng.draw(torch.where(empty, p_n, residual), Role.TARGET, n))


WRONG_RULES = {
    "accepts with <=": Rule(accepts=torch.le),
    "accepts with q / p": Rule(ratio=lambda p, q: q / p),
    "accepts with p alone": Rule(ratio=lambda p, q: p),
    "counts accepted tokens after a rejected one": Rule(count=lambda accepted: accepted.sum(-1)),
    "residual |p - q|": Rule(residual=lambda p, q: (p - q).abs()),
    "residual p": Rule(residual=lambda p, q: p),
    "residual max(p, q)": Rule(residual=torch.maximum),
    "bonus from p of the last accepted token": Rule(p_row=lambda n, lengths: (n - 1).clamp(min=0)),
    "recovered token from p after the draft": Rule(p_row=lambda n, lengths: lengths),
    "recovered token from q of the next position": Rule(q_row=lambda n: n + 1),
    "recovered token from q of the first position": Rule(q_row=torch.zeros_like),
}


def test_the_rule_in_pieces_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFY, "rejection", Rule())
    assert max(errors(ModelDrafter).values()) < ROUNDING


@pytest.mark.parametrize("fault", WRONG_RULES)
def test_a_wrong_rule_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, detected: dict[str, float]) -> None:
    monkeypatch.setitem(VERIFY, "rejection", WRONG_RULES[fault])
    detected[fault] = max(errors(ModelDrafter).values())
    assert detected[fault] > VISIBLE


# The drafter


@dataclass(frozen=True)
class Pieces:
    """A drafter's choices at one position."""

    drawn_from: Callable[[Tensor, SamplingParams, Tensor | None], Tensor]  # logits, settings, mask -> [V]
    reported: Callable[[Tensor, SamplingParams, Tensor | None], Tensor]  # as q
    pick: Callable[[Callable[[], int], Tensor], int] = lambda draw, q: draw()
    keeps: Callable[[int, Tensor, Tensor | None], bool] = lambda token, q, mask: True


class PiecewiseDrafter(Drafter):
    """``ModelDrafter`` for one row, in pieces."""

    name = "pieces"

    def __init__(self, model: LanguageModel, pieces: Pieces) -> None:
        self.model, self.pieces = model, pieces
        self.draws = 0

    def _draw(self, rng: SequenceRng, q: Tensor) -> int:
        """A draw with a random number of its own."""
        self.draws += 1
        return int(rng.draw(q[None], Role.DRAFT, torch.tensor([self.draws])))

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        tokens: list[int] = []
        reported: list[Tensor] = []
        while len(tokens) < budget.of(self.name)[0] and cursor.is_open(0):
            logits = self.model.next_logits([cursor.context(0)], [1])[0, 0]
            legal, params = cursor.token_mask(0), batch.params[0]
            mask = None if legal is None else legal.tensor()
            q = self.pieces.drawn_from(logits, params, mask)
            token = self.pieces.pick(functools.partial(self._draw, batch.rng, q), q)
            if not self.pieces.keeps(token, q, mask):
                break
            reported.append(self.pieces.reported(logits, params, mask))
            tokens.append(token)
            cursor.consume(0, token)
        return Draft.of_tokens([tokens], self.name, "cpu", q=torch.stack(reported)[None] if reported else None)


def masked(logits: Tensor, params: SamplingParams, mask: Tensor | None) -> Tensor:
    """The q of the contract."""
    return warp(logits[None, None], [params], None if mask is None else PackedMasks.of(mask[None, None]))[0, 0]


def unmasked(logits: Tensor, params: SamplingParams, mask: Tensor | None) -> Tensor:
    return masked(logits, params, None)


def at_temperature_1(logits: Tensor, params: SamplingParams, mask: Tensor | None) -> Tensor:
    return masked(logits, dataclasses.replace(params, temperature=1), mask)


def greedy(logits: Tensor, params: SamplingParams, mask: Tensor | None) -> Tensor:
    return masked(logits, dataclasses.replace(params, temperature=0), mask)


def confident(token: int, q: Tensor, mask: Tensor | None) -> bool:
    return bool(q[token] > 0.4)


def legal(token: int, q: Tensor, mask: Tensor | None) -> bool:
    return mask is None or bool(mask[token])


def likelier_of_two(draw: Callable[[], int], q: Tensor) -> int:
    return max(draw(), draw(), key=lambda token: float(q[token]))


def second_chance(draw: Callable[[], int], q: Tensor) -> int:
    first = draw()
    return first if q[first] > 0.3 else draw()


EXACT_DRAFTERS = {
    "q with the target's settings and masks": Pieces(masked, masked),
    "q without masks": Pieces(unmasked, unmasked),
    "q at another temperature": Pieces(at_temperature_1, at_temperature_1),
    "greedy, one-hot q": Pieces(greedy, greedy),
    "stops by q before the draw": Pieces(masked, masked, keeps=lambda token, q, mask: bool(q.max() > 0.6)),
}
INEXACT_DRAFTERS = {
    "drops drawn tokens of low confidence": Pieces(masked, masked, keeps=confident),
    "drops drawn tokens that are illegal": Pieces(unmasked, unmasked, keeps=legal),
    "reports a masked q, draws without masks": Pieces(unmasked, masked),
    "reports q without masks, draws with masks": Pieces(masked, unmasked),
    "draws the likeliest token, reports a soft q": Pieces(greedy, masked),
    "draws softly, reports a one-hot q": Pieces(masked, greedy),
    "reports q without the temperature": Pieces(masked, at_temperature_1),
    "draws twice, keeps the likelier": Pieces(masked, masked, pick=likelier_of_two),
    "draws again where the first draw is unlikely": Pieces(masked, masked, pick=second_chance),
}


@pytest.mark.parametrize("pieces", EXACT_DRAFTERS.values(), ids=EXACT_DRAFTERS)
def test_a_drafter_that_keeps_the_contract_is_exact(pieces: Pieces) -> None:
    assert max(errors(lambda model: PiecewiseDrafter(model, pieces)).values()) < ROUNDING


@pytest.mark.parametrize("fault", INEXACT_DRAFTERS)
def test_a_drafter_that_breaks_the_contract_is_seen(fault: str, detected: dict[str, float]) -> None:
    pieces = INEXACT_DRAFTERS[fault]
    detected[fault] = max(errors(lambda model: PiecewiseDrafter(model, pieces)).values())
    assert detected[fault] > VISIBLE


# The cursor


Row = list[TokenMask | None]


def edited(edit: Callable[[Row], Row]) -> Callable[[GrammarCursor, SequenceOf[list[int]]], PackedMasks]:
    """The cursor's masks, those of every row changed."""
    original = GrammarCursor.masks
    return lambda cursor, spans: PackedMasks([edit(list(row)) for row in original(cursor, spans).rows])


def unmask_bonus(row: Row) -> Row:
    return [*row[:-1], None]


def unmask_draft(row: Row) -> Row:
    return [*[None] * (len(row) - 1), row[-1]]


def shift(row: Row) -> Row:
    return [*row[:1], *row[:-1]]


WRONG_CURSORS = {
    "p without its mask at the bonus": ("masks", edited(unmask_bonus)),
    "p masked at the bonus alone": ("masks", edited(unmask_draft)),
    "p with the mask of the position before": ("masks", edited(shift)),
    "the matcher is left where the draft ended": ("commit", lambda cursor, row, block: 0),
}


@pytest.mark.parametrize("fault", WRONG_CURSORS)
def test_a_wrong_cursor_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch, detected: dict[str, float]) -> None:
    assert max(errors(ModelDrafter).values()) < ROUNDING
    monkeypatch.setattr(GrammarCursor, *WRONG_CURSORS[fault])
    found = errors(ModelDrafter)
    detected[fault] = max(found.values())
    assert detected[fault] > VISIBLE
    assert all(error < ROUNDING for (task, _), error in found.items() if task == "free")
