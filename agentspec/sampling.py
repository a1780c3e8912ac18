"""`warp`: the one definition of p and of q, from logits to the distribution that a token is drawn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.errors import InvalidRequestError
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.params import LEAST_TEMPERATURE as LEAST_TEMPERATURE
from agentspec.params import LogitsProcessor as LogitsProcessor
from agentspec.params import SamplingParams as SamplingParams
from agentspec.runtime.device import upload, vector
from agentspec.runtime.tokens import NO_TOKEN


@dataclass(frozen=True)
class Prefix:
    """What precedes the positions of one row: position k follows all but the last ``positions - 1 - k`` tokens.

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

    def preceding(self, k: int) -> list[int]:
        """Return the tokens that precede position k."""
        return self.tokens[: len(self.tokens) - self.positions + 1 + k]


def warp(
    logits: Tensor,
    params: Sequence[SamplingParams],
    masks: PackedMasks | None = None,
    prefixes: Sequence[Prefix] | None = None,
    kernels: SamplingKernels = TORCH,
) -> Tensor:
    """Return the distribution that a token is drawn from: the softmax of ``warped_logits``.

    Arguments and errors are those of ``warped_logits``.

    Returns:
        ``[B, K, V]`` probabilities, float32 or wider; greedy rows are one-hot. A position without a distribution is
        NaN.
    """
    return warped_logits(logits, params, masks, prefixes, kernels).softmax(-1)


def warped_logits(
    logits: Tensor,
    params: Sequence[SamplingParams],
    masks: PackedMasks | None = None,
    prefixes: Sequence[Prefix] | None = None,
    kernels: SamplingKernels = TORCH,
) -> Tensor:
    """Turn logits into those whose softmax is the distribution. The order of the steps is part of the contract.

    Penalties and bias, the grammar's mask (before top-k, which could leave no legal token), temperature, top-k, top-p,
    min-p. Legal tokens with a logit of +inf share the whole mass equally; at temperature 0 the first of them has it.

    Args:
        logits: ``[B, K, V]``.
        params: one per row.
        masks: of the positions ``[B, K]``; None where every token is legal.
        prefixes: one per row; needed where ``params`` depend on them (``SamplingParams.adjusts``).
        kernels: compute top-k and top-p.

    Returns:
        ``[B, K, V]``, float32 or wider; the largest of a position is 0. A position has no distribution, and is NaN,
        where no token is legal or the logit of a legal one is NaN: harmless after a token that will be rejected.

    Raises:
        InvalidRequestError: for a processor that does not return logits.
    """
    processed = processed_logits(logits, params, prefixes)
    if masks:
        processed = masks.apply_(processed.clone() if processed is logits else processed)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        return _one_hot(processed)
    warm = _below_max(processed).div_(_by_row([p.temperature or 1.0 for p in params], processed))
    for keep, values, neutral in (
        (kernels.keep_top_k, [p.top_k for p in params], 0),
        (kernels.keep_top_p, [p.top_p for p in params], 1.0),
        (_keep_min_p, [p.min_p for p in params], 0.0),
    ):
        rows = [b for b, value in enumerate(values) if value != neutral and not greedy[b]]
        if rows:
            index = _index(rows, warm)
            warm = warm.index_copy(0, index, keep(warm[index], [values[b] for b in rows]))
    cold = [b for b, is_greedy in enumerate(greedy) if is_greedy]
    return warm.index_copy(0, _index(cold, warm), _one_hot(processed[cold])) if cold else warm


def log_probs(logits: Tensor) -> Tensor:
    """Return log-probabilities of logits ``[..., V]``, raw or warped: finite where the probability rounds to 0."""
    return _below_max(_widened(logits)).log_softmax(-1)


def _below_max(logits: Tensor) -> Tensor:
    """Return ``logits - max``, whose softmax is the same and whose quotients are finite.

    Where the max is +inf, logits of +inf become 0 and all others -inf: the limit.
    """
    largest = logits.amax(-1, keepdim=True)
    below = logits - largest
    if _is_on_host(logits) and not bool((largest == math.inf).any()):
        return below  # no other pass over V; a device would have to be waited for
    return below.masked_fill_(logits == math.inf, 0.0)


def argmax_tokens(logits: Tensor) -> list[list[int]]:
    """Return the argmax of every position of logits ``[B, K, V]``; ``NO_TOKEN`` where none is above -inf.

    Of ``processed_logits`` it is what ``warp`` comes to at temperature 0, without V probabilities.
    """
    if _is_on_host(logits):
        numbers = logits.numpy(force=True)
        argmax = numbers.argmax(-1)  # many times as fast as torch's
        return [
            [token if numbers[b, k, token] > -math.inf else NO_TOKEN for k, token in enumerate(row)]
            for b, row in enumerate(argmax.tolist())
        ]
    values, tokens = logits.max(-1)
    found: list[list[int]] = tokens.masked_fill(~(values > -math.inf), NO_TOKEN).tolist()
    return found


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def masked_argmax(logits: Tensor, mask: TokenMask) -> int:
    """Return the argmax of logits ``[V]`` over the legal tokens; ``NO_TOKEN`` where none is above -inf."""
    if mask.is_empty:
        return NO_TOKEN
    legal = mask.tensor().nonzero()[:, 0]
    [[argmax]] = argmax_tokens(logits[upload(legal, logits.device)][None, None])
    return NO_TOKEN if argmax == NO_TOKEN else int(legal[argmax])


def processed_logits(
    logits: Tensor, params: Sequence[SamplingParams], prefixes: Sequence[Prefix] | None = None
) -> Tensor:
    """Return logits ``[B, K, V]``, float32 or wider, under penalties, bias, bans and processors.

    Args:
        logits: ``[B, K, V]``; returned themselves where nothing applies.
        params: one per row.
        prefixes: one per row; needed where ``params`` depend on them (``SamplingParams.adjusts``).

    Raises:
        InvalidRequestError: for a processor that does not return logits.
    """
    processed = _widened(logits)
    rows = [b for b, p in enumerate(params) if p.adjusts]
    if rows:
        if prefixes is None:
            raise ValueError("Penalties, bans and processors look at prefixes; expected one per row, got none.")
        processed = processed.clone()
        for b in rows:
            for k in range(prefixes[b].positions):
                processed[b, k] = _process(processed[b, k], params[b], prefixes[b], k)
    return processed


def _widened(logits: Tensor) -> Tensor:
    """Return logits as float32, or wider where they are wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _process(logits: Tensor, params: SamplingParams, prefix: Prefix, k: int) -> Tensor:
    """Return the logits ``[V]`` of position k under penalties, bias, bans and processors."""
    seen = prefix.preceding(k)
    text = seen[prefix.prompt_length :]
    if params.repetition_penalty != 1:
        ids = _index(sorted(set(seen)), logits)
        penalised = logits[ids]
        factor = params.repetition_penalty
        logits = _replace(logits, ids, torch.where(penalised > 0, penalised / factor, penalised * factor))
    counts = Counter(text)
    steps = {i: -params.presence_penalty - params.frequency_penalty * n for i, n in counts.items()}
    for shift in (steps if params.presence_penalty or params.frequency_penalty else {}, params.logit_bias):
        if shift:
            ids = _index(list(shift), logits)
            logits = _replace(logits, ids, logits[ids] + vector(list(shift.values()), logits))
    ends = prefix.end_tokens if len(text) < params.min_tokens else ()
    illegal = [*params.banned_token_ids, *ends]
    if illegal:
        logits = logits.index_fill(0, _index(illegal, logits), -math.inf)
    for processor in params.logits_processor:
        processed = processor(seen, logits.clone())
        is_shaped = isinstance(processed, Tensor) and processed.shape == logits.shape
        # NaN from the model is no fault of the processor: `explain_no_token` names it where the token is chosen.
        if not is_shaped or (_has_nan(processed) and not _has_nan(logits)):
            found = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise InvalidRequestError(
                f"A logits_processor must return logits of shape {tuple(logits.shape)} without NaN, got {found}"
                f"{' with NaN' if is_shaped else ''}."
            )
        logits = processed.to(logits)
    return logits


def _replace(logits: Tensor, ids: Tensor, changed: Tensor) -> Tensor:
    """Return logits ``[V]`` with those of ``ids`` changed: finite ones stay finite, others stay as they are."""
    bound, before = torch.finfo(logits.dtype).max, logits[ids]
    return logits.index_copy(0, ids, torch.where(before.isfinite(), changed.clamp(-bound, bound), before))


def _has_nan(logits: Tensor) -> bool:
    return bool(logits.isnan().any())


def explain_no_token(logits: Tensor) -> str:
    """Return why no token can follow, given the target's logits ``[V]`` there."""
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


def _one_hot(logits: Tensor) -> Tensor:
    """Return the logits of the limit of temperature 0: 0 for the argmax and -inf for all others."""
    values, ids = logits.max(-1, keepdim=True)
    peak = torch.full_like(logits, -math.inf).scatter_(-1, ids, 0.0)
    return peak.masked_fill_(~(values > -math.inf), math.nan)  # none is legal, or a logit is NaN


def _keep_min_p(logits: Tensor, min_ps: Sequence[float]) -> Tensor:
    largest = logits.max(-1, keepdim=True).values
    return logits.masked_fill(logits < largest + _by_row(min_ps, logits).log(), -math.inf)


def _by_row(values: Sequence[float], logits: Tensor) -> Tensor:
    """Return a value for each row of ``logits``, ``[R, 1, 1]``."""
    return vector(values, logits).view(-1, 1, 1)
