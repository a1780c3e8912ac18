"""Make sequences from requests: every invalid request is refused here, before any compute, and within bounds."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from typing import Any

from agentspec.engine.request import Request
from agentspec.errors import ContextOverflowError, EngineStuckError, InvalidRequestError, shown
from agentspec.grammars import GrammarCompiler, GrammarEngine, Matcher, begin, compiler
from agentspec.grammars.grammar import Grammar
from agentspec.rng import Acceptance, fresh_seed, sample_seed
from agentspec.runtime.detokenizer import Detokenizer
from agentspec.runtime.threads import OverdueError, run_apart, stack_of
from agentspec.runtime.tokens import exact_decoder
from agentspec.sampling import SamplingParams
from agentspec.sequence import RequestGroup, Sequence
from agentspec.speculative import SpeculativeDecoder

_TEXTS = 1 << 14  # cached texts of short id sequences


class Admission:
    """Makes the sequences of requests.

    Args:
        decoder: decodes the sequences.
        tokenizer: gives text and grammars; None for an engine of ids alone.
        end_tokens: ids that end every sequence.
        grammar_engine: computes the masks of grammars, unless a request names its own.
        vocab_size: number of ids that are tokens.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: Any,
        end_tokens: Collection[int],
        grammar_engine: GrammarEngine,
        vocab_size: int,
    ) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._grammar_engine = grammar_engine
        self._groups: weakref.WeakValueDictionary[str, RequestGroup] = weakref.WeakValueDictionary()
        self._compilers: dict[GrammarEngine, GrammarCompiler] = {}
        self._decoders: dict[tuple[bool, bool], Callable[[list[int]], str]] = {}

    def __call__(self, request: Request) -> list[Sequence]:
        """Return the samples of a request, at their start.

        Raises:
            InvalidRequestError: for a request that cannot be served.
            EngineStuckError: if its grammar takes longer to compile than the request may take.
        """
        began = time.perf_counter()
        limit = self._check(request)
        params, prompt = request.params, list(request.prompt)
        seed, detokenizer = fresh_seed() if params.seed is None else params.seed, self._detokenizers(request)
        group = RequestGroup() if request.group is None else self._groups.setdefault(request.group, RequestGroup())
        return [
            Sequence(
                prompt,
                params,
                matcher=matcher,
                end_tokens=self._end_tokens,
                detokenizer=detokenizer(),
                seed=sample_seed(seed, index),
                limit=None if limit is None else limit - len(prompt),
                gamma=request.gamma,
                acceptance=request.acceptance or self._acceptance(request),
                group=group,
            )
            for index, matcher in enumerate(self._matchers(request, began))
        ]

    def _check(self, request: Request) -> int | None:
        """Check that a request can be served; return the model's context length, None without a bound."""
        params, prompt, vocab_size = request.params, request.prompt, self._vocab_size
        if not prompt:
            raise InvalidRequestError("The prompt is empty; a model needs at least one token to continue.")
        limit = self._decoder.target.max_context
        if limit is not None and len(prompt) >= limit:
            raise ContextOverflowError(
                f"The prompt has {len(prompt)} tokens and leaves no room in the model's context of {limit}; shorten it."
            )
        _check_ids("prompt", prompt, vocab_size)
        for name in ("stop_token_ids", "banned_token_ids", "logit_bias"):
            ids = getattr(params, name)
            if len(ids) > vocab_size:
                raise InvalidRequestError(
                    f"{name} holds {len(ids):,} ids, more than the {vocab_size:,} that the model has; leave out "
                    "duplicates."
                )
            _check_ids(name, ids, vocab_size)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError("Stop strings need an engine with a tokenizer; use stop_token_ids without one.")
        return limit

    def _acceptance(self, request: Request) -> Acceptance:
        """Return the rule. Where gamma depends on a clock, only coupled noise gives the same text for a seed."""
        is_timed = request.gamma is None and self._decoder.draft_length.is_timed
        return "coupled" if is_timed and request.params.seed is not None else self._decoder.acceptance

    def _matchers(self, request: Request, began: float) -> SequenceOf[Matcher | None]:
        """Make a matcher per sample, in a thread: compiling may take longer than the request may take."""
        if request.grammar is None:
            return [None] * request.n
        grammar, left = request.grammar, request.timeout_s
        if left is not None:
            left = min(max(0.0, left - (time.perf_counter() - began)), threading.TIMEOUT_MAX)
        try:
            return run_apart(
                lambda: [self._matcher(request, grammar) for _ in range(request.n)], "grammar", left, on_idle_cores=True
            )
        except OverdueError as error:
            raise EngineStuckError(
                f"The request took longer than its timeout of {request.timeout_s:g} s: its grammar is still being "
                f"compiled, in a thread that cannot be ended and is at:\n{stack_of(error.thread)}\n"
                "Allow for it in the timeout, or ask for a smaller grammar."
            ) from None

    def _matcher(self, request: Request, grammar: Grammar) -> Matcher:
        if self._tokenizer is None:
            raise InvalidRequestError("Grammars need an engine with a tokenizer.")
        name = request.grammar_engine or self._grammar_engine
        if name not in self._compilers:
            self._compilers[name] = compiler(self._tokenizer, self._vocab_size, name)
        if request.validate:
            grammar = dataclasses.replace(grammar, lenient=True)
        return begin(grammar, self._compilers[name], self._tokenizer)

    def _detokenizers(self, request: Request) -> Callable[[], Detokenizer | None]:
        """Return a factory of detokenizers for the samples of a request; what they share is computed once."""
        if self._tokenizer is None:
            return lambda: None

        params, is_exact = request.params, request.grammar is not None and not request.grammar.is_free
        skip_special = params.skip_special_tokens
        hidden = frozenset(self._tokenizer.all_special_ids) if skip_special else frozenset()
        skip = hidden | self._end_tokens | frozenset(params.stop_token_ids)
        spelled = _spelled(self._tokenizer, skip, params) if params.stop else {}
        return lambda: Detokenizer(
            self._decode(skip_special, is_exact),
            skip=skip,
            spelled=Detokenizer(self._decode(False, is_exact), apart=frozenset(spelled)) if spelled else None,
            textless=frozenset(spelled.values()),
        )

    def _decode(self, skip_special: bool, is_exact: bool) -> Callable[[list[int]], str]:
        kind = (skip_special, is_exact)
        if kind not in self._decoders:
            self._decoders[kind] = _decoder(self._tokenizer, *kind)
        return self._decoders[kind]


def _spelled(tokenizer: Any, skip: Collection[int], params: SamplingParams) -> dict[int, str]:
    """Return the spelling of tokens without text, if a stop string contains one; else nothing."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if params.skip_special_tokens else {}
    ids = {*(i for i, token in added.items() if token.special), *skip}
    spelled = {i: text for i in ids if (text := tokenizer.decode([i], skip_special_tokens=False))}
    return spelled if any(text in stop for text in spelled.values() for stop in params.stop) else {}


def _check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise InvalidRequestError(
            f"{name} holds ids outside the vocabulary of {vocab_size}: {', '.join(map(shown, outside[:5]))}."
        )


def _decoder(tokenizer: Any, skip_special: bool, is_exact: bool) -> Callable[[list[int]], str]:
    """Return a function from ids to text for a detokenizer, which decodes few ids at a time, and often the same.

    Args:
        tokenizer: of transformers.
        skip_special: whether special tokens have no text.
        is_exact: whether the text is that of the tokens' bytes, as a grammar describes it.
    """
    if is_exact:
        return exact_decoder(tokenizer, skip_special_tokens=skip_special)

    @functools.lru_cache(maxsize=_TEXTS)
    def decoded(ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    return lambda ids: decoded(tuple(ids))
