"""``SamplingParams``: how the tokens of one request are drawn, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from agentspec.errors import InvalidRequestError, shown
from agentspec.runtime.checks import GREATEST, LEAST, MOST, in_one_form, is_integer, is_number, is_whole

LEAST_TEMPERATURE = 1e-5
"""Below this, logits divided by it leave float32; the distribution is one-hot long before."""

MOST_STOPS, LONGEST_STOP = 256, 1024
"""Stop strings of a request at most, and characters of each: every text is searched for all of them."""

_SIZES = f"0 or of a size that float32 holds ({LEAST:.2g} to {GREATEST:.2g})"
_IDS = f"ids from 0 to {MOST}"

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""``(prefix, logits [V]) -> logits [V]``."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends. None stands for a default.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_p: keep the most probable tokens whose mass reaches this; 1 keeps all.
        top_k: keep this many most probable tokens (and ties of the last); 0 keeps all.
        min_p: keep tokens at least this share as probable as the best; 0 keeps all.
        seed: same seed, same draws; None draws a fresh one per request.
        max_tokens: the most tokens to emit, an end token counted.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the sequence beside the tokenizer's own end tokens; emitted in ``tokens``, not in
            ``text``.
        logprobs: None or False for none, else how many alternatives to report beside each emitted token; True for 0.
        raw_logprobs: report the model's own probabilities in place of those of the distribution that was drawn from.
        include_stop: keep a stop string in the text, and its tokens.
        skip_special_tokens: leave special tokens out of the text (end tokens always are).
        min_tokens: end tokens are illegal before this many tokens (a stop string or the end of a grammar still ends).
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or text (Keskar
            et al. 2019); 1 leaves them.
        presence_penalty: subtracted from the logits of tokens in the text.
        frequency_penalty: likewise, times their count.
        logit_bias: added to the logits of these ids, which may be written as text, as JSON has them.
        banned_token_ids: never emitted.
        logits_processor: functions ``(prefix, logits) -> logits`` of the ids so far and the logits ``[V]`` after them,
            applied in order after penalties and bias; they must depend on nothing else.

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
                f"0 (greedy) or a number from {LEAST_TEMPERATURE} to {GREATEST:.2g}",
            ),
            ("top_p", is_number(self.top_p) and 0 < self.top_p <= 1, f"a number in (0, 1], {_SIZES}"),
            ("top_k", is_integer(self.top_k) and self.top_k >= 0, f"an integer from 0 (which keeps all) to {MOST}"),
            ("min_p", is_number(self.min_p) and 0 <= self.min_p <= 1, f"a number in [0, 1], {_SIZES}"),
            ("seed", self.seed is None or is_whole(self.seed), "None or an integer"),
            ("max_tokens", is_integer(self.max_tokens) and self.max_tokens >= 1, f"an integer from 1 to {MOST}"),
            (
                "stop",
                len(self.stop) <= MOST_STOPS
                and all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in self.stop),
                f"non-empty strings, {MOST_STOPS} at most of {LONGEST_STOP} characters at most",
            ),
            ("stop_token_ids", all(is_integer(i) and i >= 0 for i in self.stop_token_ids), _IDS),
            (
                "logprobs",
                self.logprobs is None or (is_integer(self.logprobs) and self.logprobs >= 0),
                f"None or an integer from 0 to {MOST}",
            ),
            (
                "min_tokens",
                is_integer(self.min_tokens) and is_integer(self.max_tokens) and 0 <= self.min_tokens <= self.max_tokens,
                f"an integer in [0, max_tokens={shown(self.max_tokens)}]",
            ),
            (
                "repetition_penalty",
                is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                f"a number > 0, {_SIZES}",
            ),
            ("presence_penalty", is_number(self.presence_penalty), f"a number, {_SIZES}"),
            ("frequency_penalty", is_number(self.frequency_penalty), f"a number, {_SIZES}"),
            (
                "logit_bias",
                all(is_integer(i) and is_number(v) for i, v in self.logit_bias.items()),
                f"numbers by id, {_SIZES} (banned_token_ids bans)",
            ),
            (
                "banned_token_ids",
                all(is_integer(i) and i >= 0 for i in self.banned_token_ids),
                _IDS,
            ),
            ("logits_processor", all(map(callable, self.logits_processor)), "functions (prefix, logits) -> logits"),
        )
        for name, holds, expected in rules:
            if not holds:
                raise InvalidRequestError(f"{name} must be {expected}, got {shown(getattr(self, name))}.")

    @property
    def adjusts(self) -> bool:
        """Whether the distribution depends on more than logits, mask and filters."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty, self.frequency_penalty)
        return any((*penalties, self.logit_bias, self.banned_token_ids, self.min_tokens, self.logits_processor))
