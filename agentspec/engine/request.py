"""`Request`, `Delta` and `Completion`: plain values, so that an engine elsewhere can serve them."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field

from agentspec.errors import InvalidRequestError, shown
from agentspec.grammars import Grammar, GrammarEngine
from agentspec.rng import RNGS, Acceptance
from agentspec.runtime.checks import is_finite, is_integer
from agentspec.sampling import SamplingParams
from agentspec.sequence import FinishReason, TokenLogprob
from agentspec.stats import StepStats

MOST_SAMPLES = 1024
"""Most samples of one request."""


@dataclass(frozen=True)
class Request:
    """A description of what to decode.

    Args:
        prompt: ids.
        params: sampling settings and limits.
        grammar: language that the text must be in.
        n: number of samples, ``MOST_SAMPLES`` at most.
        gamma: tokens to draft per round, 0 for none; None for the decoder's own.
        acceptance: None for the decoder's own. With a seed and a gamma chosen by measured time, None means
            ``"coupled"``: a seed would not determine the text otherwise.
        grammar_engine: computes the grammar's masks; None for the engine's own choice.
        timeout_s: seconds after which the request ends with ``RequestTimeoutError``, at the next round. A worker that
            does not come to it ends it a second later with ``EngineStuckError``. None for no limit.
        group: requests of one group are siblings, as the samples of one request are: drafters may copy from one what
            they propose for another. None for a group of its own.
        priority: requests of a higher one leave the queue first.
        validate: check every finished text against the grammar's JSON Schema. The check then covers what the grammar
            engine cannot express; without it such a schema is refused.
        family: old name of ``group``, for one release.
    """

    prompt: SequenceOf[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    grammar: Grammar | None = None
    n: int = 1
    gamma: int | None = None
    acceptance: Acceptance | None = None
    grammar_engine: GrammarEngine | None = None
    timeout_s: float | None = None
    group: str | None = None
    priority: int = 0
    validate: bool = False
    family: InitVar[str | None] = None

    def __post_init__(self, family: str | None) -> None:
        if family is not None:
            warnings.warn("Request(family=...) is Request(group=...) now.", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "group", family)
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
        if self.group is not None and not isinstance(self.group, str):
            raise InvalidRequestError(f"A request group is named by a string, got {shown(self.group)}.")
        if self.validate and (self.grammar is None or self.grammar.kind != "json_schema"):
            raise InvalidRequestError("validate=True checks texts against a JSON Schema; the request has none.")


@dataclass(frozen=True)
class Delta:
    """What one or more rounds added to a sample.

    Args:
        index: of the sample.
        tokens: ids emitted since the last delta, settled: no later delta takes them back.
        text: their text.
        logprobs: one per token where they were requested.
        finish_reason: set on the sample's last delta.
        stats: of the sample's whole step, on its last delta.
        invalid: on the last delta, why the whole text does not satisfy its schema (``Request.validate``).
        acceptance_rate: accepted over drafted tokens of the sample until now; None where nothing was drafted.
    """

    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stats: StepStats | None = None
    invalid: str | None = None
    acceptance_rate: float | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    Args:
        index: of the sample.
        tokens: emitted ids, the end token included.
        text: their text, without end token and stop string; "" for an engine without a tokenizer.
        finish_reason: why it ended.
        logprobs: one per token; None where none were requested.
        stats: of the step.
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
