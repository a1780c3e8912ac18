"""Speculative decoding (Leviathan, Kalman, Matias 2022, arXiv 2211.17192). Start here.

A round drafts gamma tokens from q, asks the target for p at all of them in one pass, and keeps a prefix of the draft
and one token more, so that what is emitted has the law p. Greedy, look-up, constrained, bonus and ragged rows are not
cases of it: greedy is a one-hot p, a looked-up token a one-hot q, a constraint a mask inside ``warp``, and past its
draft a row has q = 0, for which the bonus token *is* the token drawn from the residual.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentspec.batch import Batch
from agentspec.draft_length import Auto, DraftLength, Fixed
from agentspec.drafters import Draft, Drafter, NoDrafter
from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import GrammarCursor
from agentspec.grammars.token_mask import PackedMasks
from agentspec.models import BestModel, CachingModel, LanguageModel, fits_any_threads
from agentspec.models.pass_cost import measured
from agentspec.rng import RNGS, Acceptance, Role, SequenceRng
from agentspec.runtime.device import Stopwatch, wait_for
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.runtime.tokens import NO_TOKEN, common_prefix
from agentspec.sampling import adjusted, best_legal, best_tokens, warped, why_no_token
from agentspec.stats import FORCED, Laps, RoundStats, RowStats


@dataclass(frozen=True)
class Verification:
    """Per row ``[B]``: how many drafted tokens are accepted, and the recovered or bonus token behind them."""

    accepted: Tensor
    token: Tensor

    def blocks(self, draft: Draft, p: Tensor, logits: Tensor) -> list[list[int]]:
        """What each row emits: the accepted prefix of its draft, and the token behind it.

        It is here that the host waits for the target.

        Raises:
            InvalidRequestError: where a row's first token was to be drawn from no law.
        """
        rows = torch.arange(len(p), device=p.device)
        has_no_law = p[rows, self.accepted, 0].isnan()
        told = torch.stack([self.accepted, self.token.masked_fill(has_no_law, NO_TOKEN)], dim=1).tolist()
        return [_block(span[:n], token, row) for span, (n, token), row in zip(draft.spans, told, logits, strict=True)]


def _block(accepted: list[int], token: int, logits: Tensor) -> list[int]:
    """The accepted tokens and the one behind them. Where there is none, the text may end before it: a round that
    begins there tells, by the logits ``[K+1, V]``."""
    if token != NO_TOKEN:
        return [*accepted, token]
    if not accepted:
        raise InvalidRequestError(why_no_token(logits[0]))
    return accepted


def verify(p: Tensor, draft: Draft, rng: SequenceRng) -> Verification:
    """Algorithm 1 of the paper from the target's pass on: accept x_i with probability min(1, p(x_i) / q(x_i)).

    Args:
        p: ``[B, K+1, V]``, the target's law at every drafted position and behind the last.
        draft: the drafted tokens and the q they were drawn from.
    """
    rows, offsets = torch.arange(len(p), device=p.device), torch.arange(p.shape[1] - 1, device=p.device)
    if draft.width == 0:  # all that follows for q = 0
        return Verification(offsets.new_zeros(len(p)), rng.draw(p[:, 0], Role.TARGET, offsets.new_zeros(len(p))))
    p_of_tokens = p[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
    ratio = (p_of_tokens / draft.q_of_tokens()).double() * draft.drafted  # [B, K]; 0 past the draft

    r = rng.uniform(Role.ACCEPT, offsets.expand_as(ratio), edges=ratio)
    n = _leading(r < ratio)  # strict, for r can be 0 and an illegal token has ratio 0

    p_n = p[rows, n]
    residual = (p_n - draft.q_at(n, like=p_n)).clamp_(min=0)
    empty = residual.sum(-1, keepdim=True) == 0  # p = q up to rounding, so a rejection was rounding too
    return Verification(n, rng.draw(torch.where(empty, p_n, residual), Role.TARGET, n))


def verify_coupled(p: Tensor, draft: Draft, rng: SequenceRng) -> Verification:
    """The target draws each position with the draft's own noise; drafted tokens stand while they are the same.

    The text is the target's alone: whatever the draft, gamma or batch, a seed gives the tokens of plain decoding.
    """
    rows, offsets = torch.arange(len(p), device=p.device), torch.arange(p.shape[1], device=p.device)
    drawn = rng.draw(p, Role.TARGET, offsets.expand(p.shape[:2]))
    n = _leading((draft.tokens == drawn[:, :-1]) & draft.drafted & ~p[:, :-1, 0].isnan())
    return Verification(n, drawn[rows, n])


def verify_greedy(
    scores: Tensor, best: Sequence[Sequence[int]], draft: Draft, cursor: GrammarCursor
) -> list[list[int]]:
    """What either rule comes to where every p is one-hot: drafted tokens stand while they are the best legal ones.

    Args:
        scores: ``[B, K+1, V]``, the target's ``adjusted`` scores.
        best: ``[B, K+1]``, their ``best_tokens``.
        draft: the drafted tokens.
        cursor: along the draft; it goes back to what is accepted.

    Returns:
        What each row emits, as ``Verification.blocks``. Raises likewise.
    """
    blocks = []
    for row, (span, tokens) in enumerate(zip(draft.spans, best, strict=True)):
        legal, n = span[: cursor.legal_prefix(row, span)], 0
        while True:
            n += common_prefix(legal[n:], tokens[n:])
            token = _best_legal(scores, tokens[n], cursor, row, legal[:n])
            if token not in legal[n : n + 1]:
                break
            n += 1
        blocks.append(_block(legal[:n], token, scores[row]))
    return blocks


def _best_legal(scores: Tensor, best: int, cursor: GrammarCursor, row: int, accepted: list[int]) -> int:
    """The best token of a row that is legal behind the accepted ones, ``best`` being the best of all.

    A mask is made only where that one is not legal.
    """
    if (forced := cursor.forced(row, after=accepted)) is not None:
        return forced if forced == best or float(scores[row, len(accepted), forced]) > -math.inf else NO_TOKEN
    cursor.seek(row, accepted)
    if cursor.try_consume(row, best):
        return best
    mask = cursor.token_mask(row)
    return best if mask is None else best_legal(scores[row, len(accepted)], mask)


def _leading(accepted: Tensor) -> Tensor:
    """``[B]``: how many of ``[B, K]`` are accepted before the first that is not."""
    return accepted.long().cumprod(-1).sum(-1)


VERIFY: dict[Acceptance, Callable[[Tensor, Draft, SequenceRng], Verification]] = {
    "rejection": verify,
    "coupled": verify_coupled,
}


class SpeculativeDecoder:
    """A target, a drafter, and the rule that makes the drafter invisible in the output.

    Args:
        target: the model whose law is kept.
        drafter: proposes tokens; None decodes plainly.
        gamma: tokens to draft per round; ``"auto"`` for as many as pay by measured costs and acceptance (the costs are
            measured here, which takes seconds, and kept on disk); or the rule that chooses them.
        acceptance: ``"rejection"`` (the paper's; the highest acceptance) or ``"coupled"`` (the text for a seed does
            not depend on speculation); a request may name its own.

    Raises:
        InvalidRequestError: for a gamma that is no integer >= 0, or an unknown acceptance rule.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        gamma: int | Literal["auto"] | DraftLength = 4,
        acceptance: Acceptance = "rejection",
    ) -> None:
        if acceptance not in RNGS:
            raise InvalidRequestError(f"acceptance must be one of {sorted(RNGS)}, got {shown(acceptance)}.")
        if not (isinstance(gamma, int | DraftLength) or gamma == "auto"):
            raise InvalidRequestError(f"gamma must be an integer, 'auto' or a DraftLength, got {shown(gamma)}.")
        self.target = target
        self._best: BestModel | None = target if isinstance(target, BestModel) else None
        self.drafter = drafter or NoDrafter()
        self._name: str = getattr(self.drafter, "name", type(self.drafter).__name__)
        self.draft_length = _draft_length(gamma, target, self.drafter)
        self.acceptance: Acceptance = acceptance

    @property
    def device(self) -> torch.device:
        """Where the target's logits live."""
        return torch.device(getattr(self.target, "device", "cpu"))

    @property
    def fits_any_threads(self) -> bool:
        """Whether the models' scores are the same on any number of threads, bit for bit."""
        drafts = self.drafter.models().values() if isinstance(self.drafter, Drafter) else ()
        return all(map(fits_any_threads, (self.target, *drafts)))

    def round(self, batch: Batch) -> RoundStats:
        """One round: draft, one target pass, verdict, commit. Every row of the batch gains at least one token.

        What raises before the commit has changed nothing. What raises in the commit of a row, or leaves its matcher in
        an unknown state, becomes the ``fault`` of its sequence; the other rows are committed. Where every row has one,
        the first is raised.
        """
        laps = Laps()
        timer = PhaseTimer()
        cursor = GrammarCursor(batch.sequences, self.target.vocab_size, batch.device, timer)
        try:
            gamma = self.draft_length(batch).of(self._name)
            offered = self.drafter.propose(batch, gamma, cursor).named(self._name)  # x_1 .. x_gamma from q
            draft = self.draft_length.cut(batch, offered)
            laps.lap("draft_s")
            drafting = laps.total_s
            laps.move(timer.total_s, "draft_s", to="mask_s")
            with Stopwatch(self.device) as watch:
                logits = self.target.next_logits(batch.contexts(draft.spans), [len(span) + 1 for span in draft.spans])
            laps.lap("verify_s")
            masks = cursor.masks(draft.spans) if batch.needs_laws else None
            draft = _forced_named(draft, cursor)
            masked_at, masking, detokenizing = laps.lap("mask_s"), timer.total_s, batch.detokenize_seconds
            blocks, of_laws = self._verified(batch, draft, cursor, logits, masks)
            laps.lap("sample_s")
            width = 1 + max(map(len, draft.spans))
            self.draft_length.learn(batch, offered, blocks, width, laps.total_s - drafting)
            rows = [_commit(batch, row, block, draft, cursor, of_laws, logits) for row, block in enumerate(blocks)]
        finally:
            cursor.reset()  # until the commit a round changes nothing, so that one that fails can be played again
        _expect_a_row(batch)
        laps.lap("sample_s")
        laps.move(watch.runs_past(masked_at), "sample_s", to="verify_s")
        laps.move(timer.total_s - masking, "sample_s", to="mask_s")
        laps.move(batch.detokenize_seconds - detokenizing, "sample_s", to="detokenize_s")
        return RoundStats(tuple(rows), laps.seconds, width)

    def _verified(
        self, batch: Batch, draft: Draft, cursor: GrammarCursor, logits: Tensor, masks: PackedMasks | None
    ) -> tuple[list[list[int]], Tensor | None]:
        """What each row emits, and the ``warped`` logits where laws were needed."""
        prefixes = batch.prefixes(draft.spans)
        if not batch.needs_laws:
            scores = adjusted(logits, batch.params, prefixes)
            known = None if self._best is None else self._best.best_of(scores)
            return verify_greedy(scores, known or best_tokens(scores), draft, cursor), None
        of_laws = warped(logits, batch.params, masks, prefixes)
        p = of_laws.softmax(-1)  # as ``warp``
        return VERIFY[batch.acceptance](p, draft, batch.rng).blocks(draft, p, logits), of_laws

    def prefill(self, contexts: list[list[int]]) -> dict[str, float]:
        """Let target and drafter compute what they will need of these contexts. Costs time, changes nothing.

        Returns the seconds of either, ``prefill_s`` and ``draft_prefill_s``.
        """
        laps, known = Laps(), [context for context in contexts if context]
        if known and isinstance(self.target, CachingModel):
            self.target.next_logits(known, [0] * len(known))
            wait_for(self.device)
        laps.lap("prefill_s")
        if known and isinstance(self.drafter, Drafter):
            self.drafter.prefill(known)
            wait_for(self.device)
        laps.lap("draft_prefill_s")
        return laps.seconds


def _expect_a_row(batch: Batch) -> None:
    """Raise the first fault where no row was committed."""
    faults = [sequence.fault for sequence in batch.sequences if sequence.fault is not None]
    if len(faults) == len(batch):
        raise faults[0]


def _forced_named(draft: Draft, cursor: GrammarCursor) -> Draft:
    """The draft, with the grammar as the drafter of each token that it left no choice about."""
    named = copy(draft)
    named.sources = [
        [
            FORCED if is_forced else source
            for source, is_forced in zip(sources, cursor.forced_positions(row, span), strict=True)
        ]
        for row, (sources, span) in enumerate(zip(draft.sources, draft.spans, strict=True))
    ]
    return named


def _commit(
    batch: Batch,
    row: int,
    block: list[int],
    draft: Draft,
    cursor: GrammarCursor,
    of_laws: Tensor | None,
    logits: Tensor,
) -> RowStats:
    """Commit the block of a row; count what each drafter proposed and what was kept of it.

    An exception is the row's own: half of the block may stand, so that the sequence cannot go on.
    """
    sequence, sources = batch.sequences[row], draft.sources[row]
    try:
        taken = batch.commit(row, block, of_laws, logits, cursor.commit(row, block))
    except BaseException as error:
        sequence.give_up(error)
        return RowStats(Counter(sources), Counter(), 0)
    accepted = min(taken, common_prefix(draft.spans[row], block))
    return RowStats(Counter(sources), Counter(sources[:accepted]), taken, cursor.count_constrained(row, taken))


def _draft_length(gamma: int | Literal["auto"] | DraftLength, target: LanguageModel, drafter: Drafter) -> DraftLength:
    if isinstance(gamma, int):
        return Fixed(gamma)
    if isinstance(gamma, DraftLength):
        return gamma
    from agentspec.runtime.cache import DiskCache  # here, for it needs diskcache, and a fixed gamma needs neither

    cache = DiskCache()
    drafts = {name: measured(model, cache) for name, model in drafter.models().items()}
    return Auto(measured(target, cache), drafts)
