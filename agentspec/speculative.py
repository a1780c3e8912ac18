"""Speculative decoding (Leviathan, Kalman, Matias 2022, arXiv 2211.17192). Start here.

A round drafts gamma tokens from q and asks the target for p at all of them in one pass. It keeps a prefix of the draft
and one token more, so that what is emitted has the distribution p. Greedy, look-up, constrained, bonus and ragged rows
are no cases of it: greedy is a one-hot p, a looked-up token a one-hot q, a constraint a mask inside ``warp``. Past its
draft a row has q = 0, for which the bonus token *is* the token drawn from the residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from agentspec.acceptance import Rule, Verification, accept, commit, leading, verify_coupled
from agentspec.batch import Batch
from agentspec.draft_length import DraftLength, draft_length_for
from agentspec.drafters import Draft, Drafter, as_drafter
from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import GrammarCursor
from agentspec.models import LanguageModel, as_language_model
from agentspec.rng import RNGS, Acceptance, Role, SequenceRng
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.sequence import Sequence as TokenSequence
from agentspec.stats import ROUND_PHASES, RoundStats, RowStats


def verify(p: Tensor, draft: Draft, rng: SequenceRng) -> Verification:
    """Algorithm 1 of the paper from the target's pass on: accept x_i with probability min(1, p(x_i) / q(x_i)).

    Args:
        p: ``[B, K+1, V]``, the target's distribution at every drafted position and after the last.
        draft: the drafted tokens and the q they were drawn from.
        rng: the randomness of the round.
    """
    rows, offsets = torch.arange(len(p), device=p.device), torch.arange(p.shape[1] - 1, device=p.device)
    if draft.width == 0:  # all that follows for q = 0
        return Verification(offsets.new_zeros(len(p)), rng.draw(p[:, 0], Role.TARGET, offsets.new_zeros(len(p))))
    p_of_tokens = p[:, :-1].gather(-1, draft.tokens[..., None])[..., 0]
    ratio = (p_of_tokens / draft.q_of_tokens()).double() * draft.drafted  # [B, K]; 0 past the draft

    r = rng.uniform(Role.ACCEPT, offsets.expand_as(ratio), edges=ratio)
    n = leading(r < ratio)  # strict, for r can be 0 and an illegal token has ratio 0

    p_n = p[rows, n]
    residual = (p_n - draft.q_at(n, like=p_n)).clamp_(min=0)
    empty = residual.sum(-1, keepdim=True) == 0  # p = q up to rounding, so a rejection was rounding too
    return Verification(n, rng.draw(torch.where(empty, p_n, residual), Role.TARGET, n))


VERIFY: dict[Acceptance, Rule] = {"rejection": verify, "coupled": verify_coupled}


class SpeculativeDecoder:
    """A target, a drafter, and the rule that makes the drafter invisible in the output.

    Args:
        target: the model whose distribution is kept.
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
        self.target = as_language_model(target)
        self.drafter = as_drafter(drafter)
        self.draft_length = draft_length_for(gamma, self.target, self.drafter)
        self.acceptance: Acceptance = acceptance

    @property
    def device(self) -> torch.device:
        """The device of the target's logits."""
        return self.target.device

    @property
    def draft_models(self) -> list[LanguageModel]:
        """The models that tokens are drawn from."""
        return [as_language_model(model) for model in self.drafter.models().values()]

    @property
    def fits_any_threads(self) -> bool:
        """Whether the models' logits are the same on any number of threads, bit for bit."""
        return all(model.fits_any_threads for model in (self.target, *self.draft_models))

    def batch(self, sequences: Sequence[TokenSequence], vocab_size: int | None = None) -> Batch:
        """Return sequences of one acceptance rule as a batch for ``round``.

        Args:
            sequences: unfinished.
            vocab_size: ids from this on are no tokens; None for all that the target has logits of.
        """
        known = self.target.vocab_size
        limit = known if vocab_size is None else min(vocab_size, known)
        return Batch(sequences, self.device, kernels=self.target.sampling_kernels, vocab_size=limit)

    def round(self, batch: Batch) -> RoundStats:
        """Play one round: draft, one target pass, acceptance, commit. Every row gains at least one token.

        What raises before the commit has changed nothing. What raises in the commit of a row, or leaves its matcher in
        an unknown state, becomes the ``fault`` of its sequence; the other rows are committed. Where every row has one,
        the first is raised.
        """
        timer = PhaseTimer.on(self.device, ROUND_PHASES)
        with timer("sample"):  # and what no phase inside it counts
            rows, width = self._play(batch, timer)
        return RoundStats(rows, timer.seconds, width)

    def _play(self, batch: Batch, timer: PhaseTimer) -> tuple[tuple[RowStats, ...], int]:
        """Return the rows of a round, and the width of the target's pass."""
        vocab_size = batch.vocab_size or self.target.vocab_size
        cursor = GrammarCursor(batch.sequences, vocab_size, batch.device, timer)
        try:
            with timer("draft"):
                proposed = self.drafter.propose(batch, self.draft_length(batch), cursor)  # x_1 .. x_gamma from q
                draft = self.draft_length.trim(batch, proposed)
            with timer("verify"):
                contexts, last = batch.contexts(draft.row_tokens), [n + 1 for n in draft.lengths]
                logits = self.target.next_logits(contexts, last).limit(vocab_size)  # all positions in one pass
            accepted = accept(batch, draft, logits, cursor, VERIFY)
            self.draft_length.learn(batch, proposed, accepted, timer)
            return commit(batch, accepted, cursor, timer), draft.width + 1
        finally:
            cursor.reset()  # until the commit a round changes nothing, so that one that fails can be played again

    def prefill(self, contexts: list[list[int]]) -> dict[str, float]:
        """Let target and drafter compute what they will need of these contexts. Costs time, changes nothing.

        Returns:
            The seconds of either, ``prefill_s`` and ``draft_prefill_s``.
        """
        timer, known = PhaseTimer.on(self.device), [context for context in contexts if context]
        with timer("prefill"):
            if known and self.target.is_cached:
                self.target.next_logits(known, [0] * len(known))
        with timer("draft_prefill"):
            if known:
                self.drafter.prefill(known)
        return timer.seconds
