"""The one definition of p and of q: ``warp`` turns logits into the law that a token is drawn from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentspec.device import upload, vector
from agentspec.errors import InvalidRequestError, shown
from agentspec.kernels import kernels_for
from agentspec.masks import TokenMask
from agentspec.tokens import NO_TOKEN
from agentspec.values import in_one_form, is_integer, is_number

LEAST_TEMPERATURE = 1e-5
"""Below this, scores divided by it leave float32; the law is greedy long before."""

MOST_STOPS, LONGEST_STOP = 256, 1024
"""Stop strings of a request at most, and characters of each: every text is searched for all of them."""

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""``(prefix, logits [V]) -> logits [V]``."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends. None stands for a default.

    Args:
        temperature: divides the scores; 0 is greedy.
        top_p: keep the most probable tokens whose mass reaches this; 1 keeps all.
        top_k: keep this many most probable tokens (and ties of the last); 0 keeps all.
        min_p: keep tokens at least this share as probable as the best; 0 keeps all.
        seed: same seed, same draws; None draws a fresh one per request.
        max_tokens: the most tokens to emit, an end token counted.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the sequence beside the tokenizer's own end tokens; emitted in ``tokens``, not in
            ``text``.
        logprobs: None or False for none, else how many alternatives to report beside each emitted token; True for 0.
        raw_logprobs: report the model's own probabilities in place of those of the law that was drawn from.
        include_stop: keep a stop string in the text, and its tokens.
        skip_special_tokens: leave special tokens out of the text (end tokens always are).
        min_tokens: end tokens are illegal before this many tokens (a stop string or the end of a grammar still ends).
        repetition_penalty: divides positive and multiplies negative scores of tokens seen in prompt or text (Keskar
            et al. 2019); 1 leaves them.
        presence_penalty: subtracted from the scores of tokens in the text.
        frequency_penalty: likewise, times their count.
        logit_bias: added to the scores of these ids, which may be written as text, as JSON has them.
        banned_token_ids: never emitted.
        logits_processor: functions ``(prefix, logits) -> logits`` of the ids so far and the scores ``[V]`` after them,
            applied in order behind penalties and bias; they must depend on nothing else.

    Raises:
        InvalidRequestError: for a value outside its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    raw_logprobs: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    banned_token_ids: tuple[int, ...] = ()
    logits_processor: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(in_one_form(self))
        rules: tuple[tuple[str, bool, str], ...] = (
            (
                "temperature",
                is_number(self.temperature) and (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE),
                f"0 (greedy) or a finite number >= {LEAST_TEMPERATURE}",
            ),
            ("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("top_k", is_integer(self.top_k) and self.top_k >= 0, "an integer >= 0 (0 keeps all)"),
            ("min_p", is_number(self.min_p) and 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("seed", self.seed is None or is_integer(self.seed), "None or an integer"),
            ("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 1, "an integer >= 1"),
            (
                "stop",
                len(self.stop) <= MOST_STOPS
                and all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in self.stop),
                f"non-empty strings, {MOST_STOPS} at most of {LONGEST_STOP} characters at most",
            ),
            ("stop_token_ids", all(is_integer(i) and i >= 0 for i in self.stop_token_ids), "ids >= 0"),
            (
                "logprobs",
                self.logprobs is None or (is_integer(self.logprobs) and self.logprobs >= 0),
                "None or an integer >= 0",
            ),
            (
                "min_tokens",
                is_integer(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                f"an integer in [0, max_tokens={self.max_tokens}]",
            ),
            (
                "repetition_penalty",
                is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number > 0",
            ),
            ("presence_penalty", is_number(self.presence_penalty), "a finite number"),
            ("frequency_penalty", is_number(self.frequency_penalty), "a finite number"),
            (
                "logit_bias",
                all(is_integer(i) and is_number(v) for i, v in self.logit_bias.items()),
                "finite numbers by id (banned_token_ids bans)",
            ),
            ("banned_token_ids", all(is_integer(i) and i >= 0 for i in self.banned_token_ids), "ids >= 0"),
            ("logits_processor", all(map(callable, self.logits_processor)), "functions (prefix, logits) -> logits"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise InvalidRequestError(f"{name} must be {expected}, got {shown(getattr(self, name))}.")

    @property
    def adjusts(self) -> bool:
        """Whether the law depends on more than scores, mask and filters."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty)
        return any((*penalties, self.logit_bias, self.banned_token_ids, self.min_tokens, self.logits_processor))


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
    mask: Tensor | None = None,
    prefixes: Sequence[Prefix] | None = None,
) -> Tensor:
    """The law a token is drawn from, given its scores. The order of the steps is part of the contract.

    Penalties and bias, the grammar's mask (before top-k, which could leave no legal token), temperature, top-k, top-p,
    min-p.

    Args:
        logits: ``[B, K, V]`` scores.
        params: one per row.
        mask: ``[B, K, V]`` bool, True where a token is legal; None where every token is.
        prefixes: one per row; needed where ``params`` look at them (``SamplingParams.adjusts``).

    Returns:
        ``[B, K, V]`` probabilities, float32 or wider; greedy rows are one-hot. A position without a legal token has no
        law: it is NaN. Behind a token that will be rejected that does no harm.

    Raises:
        InvalidRequestError: where a processor returns no scores.
    """
    scores = adjusted(logits, params, prefixes)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    greedy = [p.temperature == 0 for p in params]
    if all(greedy):
        return _one_hot(scores)
    warm = scores / _by_row([p.temperature or 1.0 for p in params], scores)
    for keep, values, neutral in (
        (_keep_top_k, [p.top_k for p in params], 0),
        (_keep_top_p, [p.top_p for p in params], 1.0),
        (_keep_min_p, [p.min_p for p in params], 0.0),
    ):
        rows = [b for b, value in enumerate(values) if value != neutral and not greedy[b]]
        if rows:
            index = _index(rows, scores)
            warm = warm.index_copy(0, index, keep(warm[index], [values[b] for b in rows]))
    law = warm.softmax(-1)
    cold = [b for b, is_greedy in enumerate(greedy) if is_greedy]
    return law.index_copy(0, _index(cold, law), _one_hot(scores[cold])) if cold else law


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
    scores = logits if logits.dtype == torch.float32 else logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows = [b for b, p in enumerate(params) if p.adjusts]
    if rows:
        if prefixes is None:
            raise ValueError("Penalties, bans and processors look at prefixes; expected one per row, got none.")
        scores = scores.clone()
        for b in rows:
            for k in range(prefixes[b].positions):
                scores[b, k] = _adjust(scores[b, k], params[b], prefixes[b], k)
    return scores


def _adjust(scores: Tensor, params: SamplingParams, prefix: Prefix, k: int) -> Tensor:
    """The scores ``[V]`` of position k under penalties, bias, bans and processors."""
    seen = prefix.before(k)
    text = seen[prefix.prompt_length :]
    if params.repetition_penalty != 1:
        ids = _index(sorted(set(seen)), scores)
        penalised = scores[ids]
        factor = params.repetition_penalty
        scores = scores.index_copy(0, ids, torch.where(penalised > 0, penalised / factor, penalised * factor))
    counts = Counter(text)
    steps = {i: -params.presence_penalty - params.frequency_penalty * n for i, n in counts.items()}
    for shift in (steps if params.presence_penalty or params.frequency_penalty else {}, params.logit_bias):
        if shift:
            scores = scores.index_add(0, _index(list(shift), scores), vector(list(shift.values()), scores))
    ends = prefix.end_tokens if len(text) < params.min_tokens else ()
    illegal = [*params.banned_token_ids, *ends]
    if illegal:
        scores = scores.index_fill(0, _index(illegal, scores), -math.inf)
    for processor in params.logits_processor:
        processed = processor(seen, scores.clone())
        if not isinstance(processed, Tensor) or processed.shape != scores.shape or bool(processed.isnan().any()):
            found = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise InvalidRequestError(
                f"A logits_processor must return scores of shape {tuple(scores.shape)} without NaN, got {found}"
                f"{' with NaN' if found == tuple(scores.shape) else ''}."
            )
        scores = processed.to(scores)
    return scores


def _index(rows: list[int], like: Tensor) -> Tensor:
    return vector(rows, like, torch.long)


def _one_hot(scores: Tensor) -> Tensor:
    """The limit of temperature 0: all mass on the first best token, which no filter would change."""
    values, ids = scores.max(-1, keepdim=True)
    law = torch.zeros_like(scores).scatter_(-1, ids, 1.0)
    return law.masked_fill_(~(values > -math.inf), math.nan)  # none is legal, or a score is NaN


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
