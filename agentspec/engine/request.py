"""What is asked of an engine, and what comes of it: descriptions only, so that an engine elsewhere could serve it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import Grammar, GrammarEngine
from agentspec.rng import RNGS, Acceptance
from agentspec.runtime.checks import is_finite, is_integer
from agentspec.sampling import SamplingParams
from agentspec.sequence import FinishReason, TokenLogprob
from agentspec.stats import StepStats

MOST_SAMPLES = 1024
"""Samples of one request at most."""


@dataclass(frozen=True)
class Request:
    """What to decode: descriptions only, so that an engine elsewhere could serve it.

    Args:
        prompt: ids.
        params: sampling settings and limits.
        grammar: the language the text must be in.
        n: number of samples, ``MOST_SAMPLES`` at most.
        gamma: tokens to draft per round, 0 for none; None for the decoder's own.
        acceptance: None for the decoder's own; or for ``"coupled"`` where a seed is named and gamma is chosen by
            measured time, for a seed would not tell the text otherwise.
        grammar_engine: which makes the grammar's masks; None for the engine's own choice.
        timeout_s: seconds after which the request ends with ``RequestTimeoutError``, at the next round; where the
            worker does not come to it, a second later with ``EngineStuckError``. None for no limit.
        family: requests of one family are siblings, as the samples of one request are: drafters may copy from one what
            they propose for another. None for a family of its own.
        priority: requests of a higher one leave the queue first.
        validate: check every finished text against the grammar's JSON Schema. What the grammar engine cannot express
            of it is then left to this check, in place of being refused.
    """

    prompt: SequenceOf[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    grammar: Grammar | None = None
    n: int = 1
    gamma: int | None = None
    acceptance: Acceptance | None = None
    grammar_engine: GrammarEngine | None = None
    timeout_s: float | None = None
    family: str | None = None
    priority: int = 0
    validate: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "prompt", tuple(operator.index(i) for i in self.prompt))
        except TypeError as error:
            raise InvalidRequestError(
                f"A prompt is a sequence of token ids, got {shown(self.prompt)}: {error}."
            ) from error
        if not is_integer(self.n) or not 1 <= self.n <= MOST_SAMPLES:
            raise InvalidRequestError(
                f"n is the number of samples, 1 or more and {MOST_SAMPLES} at most; got {shown(self.n)}. For more, "
                "make several requests."
            )
        if self.gamma is not None and not (is_integer(self.gamma) and self.gamma >= 0):
            raise InvalidRequestError(f"gamma is the number of tokens to draft, 0 or more; got {shown(self.gamma)}.")
        if self.acceptance is not None and self.acceptance not in tuple(RNGS):
            raise InvalidRequestError(f"acceptance must be one of {sorted(RNGS)}, got {shown(self.acceptance)}.")
        if self.timeout_s is not None and not _is_time(self.timeout_s):
            raise InvalidRequestError(f"A timeout is a number of seconds above 0, got {shown(self.timeout_s)}.")
        if not is_finite(self.priority):  # the worker compares those of all requests
            raise InvalidRequestError(f"A priority is a number, got {shown(self.priority)}.")
        if self.family is not None and not isinstance(self.family, str):
            raise InvalidRequestError(f"A family is named by a string, got {shown(self.family)}.")
        if self.validate and (self.grammar is None or self.grammar.kind != "json_schema"):
            raise InvalidRequestError("validate=True checks texts against a JSON Schema; the request has none.")


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    Args:
        index: of the sample.
        tokens: emitted ids, the end token included.
        text: their text, without end token and stop string; "" for an engine without a tokenizer.
        finish_reason: why it ended.
        logprobs: one per token; None where none were asked for.
        stats: what the step took.
        invalid: why the finished text does not satisfy its schema (``Request.validate``); None where it does.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    stats: StepStats
    invalid: str | None = None


def _is_time(value: float) -> bool:
    return (is_finite(value) or value == math.inf) and value > 0
