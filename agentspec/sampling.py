"""The one definition of p and of q: ``warp`` turns logits into the law that a token is drawn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.errors import InvalidRequestError
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.models.backends.native import kernels_for
from agentspec.params import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from agentspec.params import LogitsProcessor as LogitsProcessor
from agentspec.params import SamplingParams as SamplingParams
from agentspec.runtime.device import upload, vector
from agentspec.runtime.tokens import NO_TOKEN


@dataclass(frozen=True)
class Prefix:
    """What stands before the positions of one row: position k follows all but the last ``positions - 1 - k`` tokens.

    Args:
        tokens: prompt, text and draft.
        prompt_length: how many of them are the prompt.
        positions: how many positions the row has.
        end_tokens: ids that end the sequence.
    """

    tokens: list[int]
    prompt_length: int
    positions: int
    end_tokens: frozenset[int]

    def before(self, k: int) -> list[int]:
        """The tokens before position k."""
        return self.tokens[: len(self.tokens) - self.positions + 1 + k]


def warp(
    logits: Tensor,
    params: Sequence[SamplingParams],
    masks: PackedMasks | None = None,
    prefixes: Sequence[Prefix] | None = None,
) -> Tensor:
    """The law a token is drawn from, given its scores: the softmax of what ``warped`` makes of them.

    Arguments and errors are those of ``warped``.

    Returns:
        ``[B, K, V]`` probabilities, float32 or wider; greedy rows are one-hot. A position without a law is NaN.
    """
    return warped(logits, params, masks, prefixes).softmax(-1)


def warped(
    logits: Tensor,
    params: Sequence[SamplingParams],
    masks: PackedMasks | None = None,
    prefixes: Sequence[Prefix] | None = None,
) -> Tensor:
    """Turn logits into those whose softmax is the law. The order of the steps is part of the contract.

    Penalties and bias, the grammar's mask (before top-k, which could leave no legal token), temperature, top-k, top-p,
    min-p. Legal tokens with a logit of +inf share the whole mass equally; at temperature 0 the first of them has it.

    Args:
        logits: ``[B, K, V]`` scores.
        params: one per row.
        masks: of the positions ``[B, K]``; None where every token is legal.
        prefixes: one per row; needed where ``params`` look at them (``SamplingParams.adjusts``).

    Returns:
        ``[B, K, V]``, float32 or wider, of which the greatest of a position is 0. A position has no law, and is NaN,
        where no token is legal or the logit of a legal one is NaN: harmless after a token that will be rejected.

    Raises:
        InvalidRequestError: where a processor returns no scores.
    """
    scores = adjusted(logits, params, prefixes)
    if masks:
        scores = masks.apply_(scores.clone() if scores is logits else scores)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        return _one_hot(scores)
    warm = _below_greatest(scores).div_(_by_row([p.temperature or 1.0 for p in params], scores))
    for keep, values, neutral in (
        (_keep_top_k, [p.top_k for p in params], 0),
        (_keep_top_p, [p.top_p for p in params], 1.0),
        (_keep_min_p, [p.min_p for p in params], 0.0),
    ):
        rows = [b for b, value in enumerate(values) if value != neutral and not greedy[b]]
        if rows:
            index = _index(rows, scores)
            warm = warm.index_copy(0, index, keep(warm[index], [values[b] for b in rows]))
    cold = [b for b, is_greedy in enumerate(greedy) if is_greedy]
    return warm.index_copy(0, _index(cold, warm), _one_hot(scores[cold])) if cold else warm


def log_probs(logits: Tensor) -> Tensor:
    """Return the logarithm of the law of logits ``[..., V]``, raw or ``warped``: finite where the law rounds to 0."""
    return _below_greatest(_widened(logits)).log_softmax(-1)


def _below_greatest(logits: Tensor) -> Tensor:
    """Return ``logits - greatest``, whose softmax is the same and whose quotients are finite.

    Where the greatest is +inf, those that are +inf become 0 and all others -inf: the limit.
    """
    greatest = logits.amax(-1, keepdim=True)
    below = logits - greatest
    if _is_on_host(logits) and not bool((greatest == math.inf).any()):
        return below  # no other pass over V; a device would have to be waited for
    return below.masked_fill_(logits == math.inf, 0.0)


def best_tokens(scores: Tensor) -> list[list[int]]:
    """The first best token of every position of scores ``[B, K, V]``; ``NO_TOKEN`` where none has a score.

    Of ``adjusted`` scores it is what ``warp`` comes to at temperature 0, without the V numbers of a law.
    """
    if _is_on_host(scores):
        numbers = scores.numpy(force=True)
        best = numbers.argmax(-1)  # many times as fast as torch's
        return [
            [token if numbers[b, k, token] > -math.inf else NO_TOKEN for k, token in enumerate(row)]
            for b, row in enumerate(best.tolist())
        ]
    values, tokens = scores.max(-1)
    told: list[list[int]] = tokens.masked_fill(~(values > -math.inf), NO_TOKEN).tolist()
    return told


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def best_legal(scores: Tensor, mask: TokenMask) -> int:
    """The first best of the tokens that ``mask`` allows, by their scores ``[V]``; ``NO_TOKEN`` where none has one."""
    if mask.is_empty:
        return NO_TOKEN
    legal = mask.tensor().nonzero()[:, 0]
    [[best]] = best_tokens(scores[upload(legal, scores.device)][None, None])
    return NO_TOKEN if best == NO_TOKEN else int(legal[best])


def adjusted(logits: Tensor, params: Sequence[SamplingParams], prefixes: Sequence[Prefix] | None = None) -> Tensor:
    """The scores ``[B, K, V]``, float32 or wider, under penalties, bias, bans and processors.

    Args:
        logits: ``[B, K, V]`` scores.
        params: one per row.
        prefixes: one per row; needed where ``params`` look at them (``SamplingParams.adjusts``).

    Raises:
        InvalidRequestError: where a processor returns no scores.
    """
    scores = _widened(logits)
    rows = [b for b, p in enumerate(params) if p.adjusts]
    if rows:
        if prefixes is None:
            raise ValueError("Penalties, bans and processors look at prefixes; expected one per row, got none.")
        scores = scores.clone()
        for b in rows:
            for k in range(prefixes[b].positions):
                scores[b, k] = _adjust(scores[b, k], params[b], prefixes[b], k)
    return scores


def _widened(logits: Tensor) -> Tensor:
    """Return logits as float32, or wider where they are wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _adjust(scores: Tensor, params: SamplingParams, prefix: Prefix, k: int) -> Tensor:
    """The scores ``[V]`` of position k under penalties, bias, bans and processors."""
    seen = prefix.before(k)
    text = seen[prefix.prompt_length :]
    if params.repetition_penalty != 1:
        ids = _index(sorted(set(seen)), scores)
        penalised = scores[ids]
        factor = params.repetition_penalty
        scores = _copied(scores, ids, torch.where(penalised > 0, penalised / factor, penalised * factor))
    counts = Counter(text)
    steps = {i: -params.presence_penalty - params.frequency_penalty * n for i, n in counts.items()}
    for shift in (steps if params.presence_penalty or params.frequency_penalty else {}, params.logit_bias):
        if shift:
            ids = _index(list(shift), scores)
            scores = _copied(scores, ids, scores[ids] + vector(list(shift.values()), scores))
    ends = prefix.end_tokens if len(text) < params.min_tokens else ()
    illegal = [*params.banned_token_ids, *ends]
    if illegal:
        scores = scores.index_fill(0, _index(illegal, scores), -math.inf)
    for processor in params.logits_processor:
        processed = processor(seen, scores.clone())
        is_shaped = isinstance(processed, Tensor) and processed.shape == scores.shape
        # NaN that the model gave is no fault of the processor: it is told apart where the token is chosen.
        if not is_shaped or (_has_nan(processed) and not _has_nan(scores)):
            found = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise InvalidRequestError(
                f"A logits_processor must return scores of shape {tuple(scores.shape)} without NaN, got {found}"
                f"{' with NaN' if is_shaped else ''}."
            )
        scores = processed.to(scores)
    return scores


def _copied(scores: Tensor, ids: Tensor, changed: Tensor) -> Tensor:
    """Return ``scores`` ``[V]`` with other ones for ``ids``: finite ones stay finite, and others as they are."""
    bound, before = torch.finfo(scores.dtype).max, scores[ids]
    return scores.index_copy(0, ids, torch.where(before.isfinite(), changed.clamp(-bound, bound), before))


def _has_nan(logits: Tensor) -> bool:
    return bool(logits.isnan().any())


def why_no_token(logits: Tensor) -> str:
    """Say why no token can follow, given the target's logits ``[V]`` there."""
    if _has_nan(logits):
        return (
            f"The target model gave NaN as the logits of {int(logits.isnan().sum())} of {len(logits)} tokens, so that "
            "none can be chosen: its weights hold NaN, or its arithmetic overflowed. Check the weights, or load it in "
            "another dtype (float16 overflows easily)."
        )
    return (
        "No token may come next: the grammar has a dead end here, or it, banned ids, min_tokens and a "
        "logits_processor together leave none; loosen one of them."
    )


def _index(rows: list[int], like: Tensor) -> Tensor:
    return vector(rows, like, torch.long)


def _one_hot(scores: Tensor) -> Tensor:
    """The logits of the limit of temperature 0: 0 for the first best token and -inf for all others."""
    values, ids = scores.max(-1, keepdim=True)
    peak = torch.full_like(scores, -math.inf).scatter_(-1, ids, 0.0)
    return peak.masked_fill_(~(values > -math.inf), math.nan)  # none is legal, or a score is NaN


# Each keep-function cuts by value, not by rank: tied tokens share one fate, whatever order a sort would give them.


def _keep_top_k(scores: Tensor, ks: Sequence[float]) -> Tensor:
    within = [min(int(k), scores.shape[-1]) for k in ks]
    if (kernels := kernels_for(scores)) is not None:
        return _from(kernels.least_of_top_k(*_by_position(scores, within)), scores)
    best = scores.topk(max(within), dim=-1).values
    threshold = best.gather(-1, (_by_row(within, scores).long() - 1).expand(-1, scores.shape[1], 1))
    return scores.masked_fill(scores < threshold, -math.inf)


def _keep_top_p(scores: Tensor, top_ps: Sequence[float]) -> Tensor:
    if (kernels := kernels_for(scores)) is not None:
        return _from(kernels.least_of_top_p(*_by_position(scores, top_ps)), scores)
    top_p, p = _by_row(top_ps, scores), scores.softmax(-1)
    head = p.topk(min(512, p.shape[-1]), dim=-1).values
    if bool((head.sum(-1, keepdim=True) < top_p).any()):
        head = p.sort(dim=-1, descending=True).values
    before = head.cumsum(-1) - head
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    return scores.masked_fill(p < head.gather(-1, kept - 1), -math.inf)


def _keep_min_p(scores: Tensor, min_ps: Sequence[float]) -> Tensor:
    best = scores.max(-1, keepdim=True).values
    return scores.masked_fill(scores < best + _by_row(min_ps, scores).log(), -math.inf)


def _from(least: Tensor, scores: Tensor) -> Tensor:
    """Scores ``[R, K, V]`` that are no less than those of their positions ``[R K]``."""
    return scores.masked_fill(scores < least.view(*scores.shape[:2], 1), -math.inf)


def _by_position(scores: Tensor, values: Sequence[float]) -> tuple[Tensor, list[float]]:
    """``[R K, V]``, and a value for each of these."""
    return scores.flatten(0, 1), [value for value in values for _ in range(scores.shape[1])]


def _by_row(values: Sequence[float], scores: Tensor) -> Tensor:
    """``[R, 1, 1]``: a value for each row of ``scores``."""
    return vector(values, scores).view(-1, 1, 1)
