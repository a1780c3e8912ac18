"""`accept`: which drafted tokens stay, whatever rule or fast path decides; and `commit`, which makes them text."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from agentspec.batch import Batch
from agentspec.drafters.draft import Draft, DraftRow
from agentspec.errors import InvalidRequestError
from agentspec.grammars import GrammarCursor
from agentspec.models import Logits
from agentspec.rng import Acceptance, Role, SequenceRng
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.runtime.tokens import NO_TOKEN, common_prefix
from agentspec.sampling import argmax_tokens, explain_no_token, masked_argmax, processed_logits, warped_logits
from agentspec.stats import FORCED, RowStats


@dataclass(frozen=True, eq=False)
class Verification:
    """The decision of a rule, per row ``[B]``.

    Args:
        accepted: number of accepted drafted tokens.
        token: the recovered or bonus token after them.
    """

    accepted: Tensor
    token: Tensor


Rule: TypeAlias = Callable[[Tensor, Draft, SequenceRng], Verification]
"""A function that decides from p ``[B, K+1, V]``, the draft and the randomness of the round."""


@dataclass(frozen=True, eq=False)
class Accepted:
    """The new tokens of a round, and what their commit needs.

    Args:
        draft: the draft that was verified; tokens that the grammar forced have it as their source.
        tokens: of each row, the accepted prefix of its draft and the next token.
        logits: ``[B, K+1, V]``, as the target gave them.
        warped: ``[B, K+1, V]``, those whose softmax is p; None where the batch needed no distributions.
    """

    draft: Draft
    tokens: list[list[int]]
    logits: Tensor
    warped: Tensor | None


def accept(
    batch: Batch,
    draft: Draft,
    logits: Logits,
    cursor: GrammarCursor,
    rules: Mapping[Acceptance, Rule],
) -> Accepted:
    """Decide which drafted tokens stay, and what comes after them.

    Where every p is one-hot, both rules come to the masked argmax: it is found without making distributions or masks.

    Args:
        batch: the sequences of the round.
        draft: what was drafted for them.
        logits: ``[B, K+1, V]``, the target's at every drafted position and after the last.
        cursor: of this round.
        rules: by their names.

    Raises:
        InvalidRequestError: where a row's first token has no distribution to be drawn from.
    """
    draft = _with_forced(draft, cursor)
    prefixes = batch.prefixes(draft.row_tokens)
    values = logits.values
    if batch.needs_probs:
        p_logits = warped_logits(values, batch.params, cursor.masks(draft.row_tokens), prefixes, batch.kernels)
        p = p_logits.softmax(-1)  # as ``warp``
        verification = rules[batch.acceptance](p, draft, batch.rng)
        return Accepted(draft, _new_tokens(verification, draft, p, values), values, p_logits)
    processed = processed_logits(values, batch.params, prefixes)
    known = logits.argmax if processed is values else None
    argmax = argmax_tokens(processed) if known is None else known
    return Accepted(draft, accept_argmax(processed, argmax, draft, cursor), values, None)


def _with_forced(draft: Draft, cursor: GrammarCursor) -> Draft:
    """Return the draft, with the grammar as the source of each token that it left no choice about."""
    rows = tuple(_row_with_forced(row, cursor, b) for b, row in enumerate(draft.rows))
    return draft if all(map(operator.is_, rows, draft.rows)) else replace(draft, rows=rows)


def _row_with_forced(row: DraftRow, cursor: GrammarCursor, b: int) -> DraftRow:
    forced = cursor.forced_positions(b, row.tokens)
    if not any(forced):
        return row
    source = [FORCED if is_forced else name for name, is_forced in zip(row.source, forced, strict=True)]
    return replace(row, source=source)


def _new_tokens(verification: Verification, draft: Draft, p: Tensor, logits: Tensor) -> list[list[int]]:
    """Return what each row emits. It is here that the host waits for the target."""
    n, rows = verification.accepted, torch.arange(len(p), device=p.device)
    is_undefined = p[rows, n, 0].isnan()
    read = torch.stack([n, verification.token.masked_fill(is_undefined, NO_TOKEN)], dim=1).tolist()
    return [
        _emitted(drafted[:count], token, row)
        for drafted, (count, token), row in zip(draft.row_tokens, read, logits, strict=True)
    ]


def _emitted(accepted: list[int], token: int, logits: Tensor) -> list[int]:
    """Return the accepted tokens and the next one; without a next one, the accepted tokens alone.

    The text may end before the missing token: a round that begins there raises, with the reason in ``logits``
    ``[K+1, V]``.
    """
    if token != NO_TOKEN:
        return [*accepted, token]
    if not accepted:
        raise InvalidRequestError(explain_no_token(logits[0]))
    return accepted


def leading(accepted: Tensor) -> Tensor:
    """Return how many of ``[B, K]`` are accepted before the first that is not, ``[B]``."""
    return accepted.long().cumprod(-1).sum(-1)


def verify_coupled(p: Tensor, draft: Draft, rng: SequenceRng) -> Verification:
    """Draw each position of the target with the draft's own noise; drafted tokens stand while they are the same.

    The text is the target's alone: whatever the draft, gamma or batch, a seed gives the tokens of plain decoding.
    """
    rows, offsets = torch.arange(len(p), device=p.device), torch.arange(p.shape[1], device=p.device)
    drawn = rng.draw(p, Role.TARGET, offsets.expand(p.shape[:2]))
    n = leading((draft.tokens == drawn[:, :-1]) & draft.drafted & ~p[:, :-1, 0].isnan())
    return Verification(n, drawn[rows, n])


def accept_argmax(
    logits: Tensor, argmax: Sequence[Sequence[int]], draft: Draft, cursor: GrammarCursor
) -> list[list[int]]:
    """Return what either rule comes to where every p is one-hot: drafted tokens stand while they are the argmax.

    Args:
        logits: ``[B, K+1, V]``, processed.
        argmax: ``[B, K+1]``, their argmax over all tokens, legal or not.
        draft: the drafted tokens.
        cursor: after the draft; it goes back to what is accepted.

    Returns:
        The new tokens of each row.

    Raises:
        InvalidRequestError: where no token can be a row's first.
    """
    new = []
    for row, (drafted, tokens) in enumerate(zip(draft.row_tokens, argmax, strict=True)):
        legal, n = drafted[: cursor.legal_prefix(row, drafted)], 0
        while True:
            n += common_prefix(legal[n:], tokens[n:])
            token = _masked_argmax(logits, tokens[n], cursor, row, legal[:n])
            if token not in legal[n : n + 1]:
                break
            n += 1
        new.append(_emitted(legal[:n], token, logits[row]))
    return new


def _masked_argmax(logits: Tensor, argmax: int, cursor: GrammarCursor, row: int, accepted: list[int]) -> int:
    """Return the argmax of a row over the tokens that are legal after the accepted ones; ``argmax`` is over all.

    A mask is made only where the latter is not legal.
    """
    if (forced := cursor.forced(row, after=accepted)) is not None:
        return forced if forced == argmax or float(logits[row, len(accepted), forced]) > -math.inf else NO_TOKEN
    cursor.seek(row, accepted)
    if cursor.try_consume(row, argmax):
        return argmax
    mask = cursor.token_mask(row)
    return argmax if mask is None else masked_argmax(logits[row, len(accepted)], mask)


def commit(batch: Batch, accepted: Accepted, cursor: GrammarCursor, timer: PhaseTimer) -> tuple[RowStats, ...]:
    """Commit the new tokens of every row; count what each drafter proposed and what of it was kept.

    An exception becomes the ``fault`` of its row's sequence: half of the tokens may stand. Where every row has one, the
    first is raised.
    """
    rows = tuple(_commit_row(batch, b, accepted, cursor, timer) for b in range(len(batch)))
    faults = [sequence.fault for sequence in batch.sequences if sequence.fault is not None]
    if len(faults) == len(batch):
        raise faults[0]
    return rows


def _commit_row(batch: Batch, b: int, accepted: Accepted, cursor: GrammarCursor, timer: PhaseTimer) -> RowStats:
    sequence, row, tokens = batch.sequences[b], accepted.draft.rows[b], accepted.tokens[b]
    logits = accepted.logits if sequence.params.raw_logprobs else accepted.warped
    try:
        consumed = cursor.commit(b, tokens)
        count = batch.commit(b, tokens, None if logits is None else logits[b], consumed, timer)
    except BaseException as error:  # an engine in Rust panics with one that is no Exception
        sequence.give_up(error)
        return RowStats(Counter(row.source), Counter(), 0)
    kept = min(count, common_prefix(row.tokens, tokens))
    return RowStats(Counter(row.source), Counter(row.source[:kept]), count, cursor.count_constrained(b, count))
