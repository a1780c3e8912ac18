"""The engine seam: requests in, completions or deltas out; and the engine of this process."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import queue
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from agentspec.constraints import GrammarCompiler, GrammarEngine, Matcher, begin, compiler
from agentspec.detokenizer import Detokenizer
from agentspec.dice import Acceptance, fresh_seed, sample_seed
from agentspec.errors import ContextOverflowError, InvalidRequestError
from agentspec.grammar import Grammar
from agentspec.job import Delta, Job
from agentspec.metrics import EngineMetrics
from agentspec.models import CachingModel, PaddedModel, max_context
from agentspec.models import end_tokens as model_end_tokens
from agentspec.request import Completion, Request
from agentspec.sampling import SamplingParams
from agentspec.scheduler import Scheduler
from agentspec.sequence import Sequence
from agentspec.speculative import SpeculativeDecoder
from agentspec.threads import apart
from agentspec.tokens import exact_decoder
from agentspec.validation import Check

UNCACHED_ROWS = 64
"""Sequences that share a round of a target without a cache."""

_TEXTS = 1 << 14  # of few tokens, that are kept


class Engine(Protocol):
    """Serves requests; several callers, threads and tasks may share one."""

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode to the end; per request, its samples in order."""
        ...

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Deltas as they settle, of a sample ``every_s`` seconds at most. Closing the iterator cancels the request."""
        ...

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """``stream`` for an event loop, which is never blocked."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class LocalEngine:
    """An engine over a decoder in this process, with one worker thread that owns the models.

    Args:
        decoder: target, drafter and their defaults.
        tokenizer: gives text, end tokens and grammars; None where only ids are asked for.
        end_tokens: ids that end every sequence; None for those of the tokenizer and the checkpoint.
        max_running: most sequences that share a round; None for as many as the target keeps cached.
        grammar_engine: makes the masks of grammars, where a request does not name its own.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        tokenizer: Any = None,
        *,
        end_tokens: Collection[int] | None = None,
        max_running: int | None = None,
        grammar_engine: GrammarEngine = "auto",
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        if end_tokens is None:
            # The model's own count only beside its tokenizer: without one nobody asked for an end.
            end_tokens = () if tokenizer is None else {*_end_tokens(tokenizer), *model_end_tokens(decoder.target)}
        self._end_tokens = frozenset(end_tokens)
        if tokenizer is not None and isinstance(decoder.target, PaddedModel):
            decoder.target.narrow(min(decoder.target.vocab_size, max(tokenizer.get_vocab().values()) + 1))
        self._grammar_engine = grammar_engine
        self._families: weakref.WeakValueDictionary[str, Family] = weakref.WeakValueDictionary()
        self._compilers: dict[GrammarEngine, GrammarCompiler] = {}
        self._decoders: dict[tuple[bool, bool], Callable[[list[int]], str]] = {}
        rows = decoder.target.max_rows if isinstance(decoder.target, CachingModel) else UNCACHED_ROWS
        self._scheduler = Scheduler(decoder, rows if max_running is None else max_running)
        self.identity = uuid.uuid4().hex
        """Tells this engine's answers from those of any other, in this process or another."""
        self._finalizer = weakref.finalize(self, self._scheduler.close)

    def generate(self, requests: SequenceOf[Request]) -> list[list[Completion]]:
        """Decode all requests together; per request, its samples in order.

        Raises:
            InvalidRequestError: for a request that cannot be served; before any is started.
            EngineClosedError: where the engine is closed.
        """
        if isinstance(requests, Request):
            raise InvalidRequestError("generate takes a list of requests, got a single one; put it into a list.")
        prepared, checks = [self._sequences(request) for request in requests], [Check(request) for request in requests]
        boxes: list[queue.SimpleQueue[Delta | BaseException]] = [queue.SimpleQueue() for _ in requests]
        jobs = [
            Job(sequences, box.put, request.timeout_s, request.priority, math.inf)
            for request, sequences, box in zip(requests, prepared, boxes, strict=True)
        ]
        try:
            for job in jobs:
                self._scheduler.submit(job)
            return [_collect(*waiting) for waiting in zip(requests, boxes, checks, strict=True)]
        finally:
            for job in jobs:
                job.cancel()

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """Deltas as they settle; of all samples, in the order they come. Closing the iterator cancels the request.

        Args:
            request: what is asked for.
            every_s: seconds between deltas of a sample, at least; its first and its last come at once. Each wakes
                whoever reads them, on a processor that the model could use.

        Raises:
            InvalidRequestError: for a request that cannot be served; at the call, before any compute.
        """
        _expect_seconds(every_s)
        return self._stream(request, self._sequences(request), Check(request), every_s)

    def _stream(self, request: Request, sequences: list[Sequence], check: Check, every_s: float) -> Iterator[Delta]:
        box: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        job = Job(sequences, box.put, request.timeout_s, request.priority, every_s)
        self._scheduler.submit(job)
        try:
            unfinished = len(sequences)
            while unfinished:
                delta = check(_unwrap(box.get()))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            job.cancel()

    def astream(self, request: Request, every_s: float = 0.0) -> AsyncGenerator[Delta, None]:
        """``stream`` for an event loop, which is never blocked. Cancelling the task cancels the request.

        Raises:
            InvalidRequestError: for a request that cannot be served; with the first delta, before any compute.
        """
        _expect_seconds(every_s)
        return self._astream(request, every_s)

    async def _astream(self, request: Request, every_s: float) -> AsyncGenerator[Delta, None]:
        sequences = await asyncio.to_thread(self._sequences, request)  # compiling a grammar takes its time
        loop, box = asyncio.get_running_loop(), asyncio.Queue[Delta | BaseException]()

        def emit(item: Delta | BaseException) -> None:
            loop.call_soon_threadsafe(box.put_nowait, item)

        job, check = Job(sequences, emit, request.timeout_s, request.priority, every_s), Check(request)
        self._scheduler.submit(job)
        try:
            unfinished = len(sequences)
            while unfinished:
                delta = check(_unwrap(await box.get()))
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            job.cancel()

    def metrics(self) -> EngineMetrics:
        """What this engine did since it was made; see ``agentspec.report.prometheus``. From any thread."""
        return self._scheduler.metrics()

    def close(self) -> None:
        """End the worker thread; requests on their way end with ``EngineClosedError``. May be called again."""
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return not self._finalizer.alive

    def _sequences(self, request: Request) -> list[Sequence]:
        """The samples of a request, at their start. All that can be wrong with it is found here."""
        params, prompt, vocab_size = request.params, list(request.prompt), self.decoder.target.vocab_size
        if not prompt:
            raise InvalidRequestError("The prompt is empty; a model needs at least one token to go on from.")
        for name, ids in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("banned_token_ids", params.banned_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            outside = [i for i in ids if not 0 <= i < vocab_size]
            if outside:
                raise InvalidRequestError(f"{name} holds ids outside the vocabulary of {vocab_size}: {outside[:5]}.")
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError("Stop strings need an engine with a tokenizer; use stop_token_ids without one.")
        limit = max_context(self.decoder.target)
        if limit is not None and len(prompt) >= limit:
            raise ContextOverflowError(
                f"The prompt has {len(prompt)} tokens and leaves no room in the model's context of {limit}; shorten it."
            )
        seed = fresh_seed() if params.seed is None else params.seed
        samples = [
            Sequence(
                prompt,
                params,
                matcher=None if request.grammar is None else self._matcher(request, request.grammar),
                end_tokens=self._end_tokens,
                detokenizer=self._detokenizer(params, is_exact=request.grammar is not None),
                seed=sample_seed(seed, index),
                limit=None if limit is None else limit - len(prompt),
                gamma=request.gamma,
                acceptance=request.acceptance or self._acceptance(request),
            )
            for index in range(request.n)
        ]
        family = Family() if request.family is None else self._families.setdefault(request.family, Family())
        family.extend(samples)
        for sample in samples:
            sample.siblings = family
        return samples

    def _acceptance(self, request: Request) -> Acceptance:
        """Who names a seed wants the same text again; where gamma depends on a clock, only coupled drawing gives it."""
        is_timed = request.gamma is None and self.decoder.draft_length.is_timed
        return "coupled" if is_timed and request.params.seed is not None else self.decoder.acceptance

    @apart
    def _matcher(self, request: Request, grammar: Grammar) -> Matcher:
        if self.tokenizer is None:
            raise InvalidRequestError("Grammars need an engine with a tokenizer.")
        name = request.grammar_engine or self._grammar_engine
        if name not in self._compilers:
            self._compilers[name] = compiler(self.tokenizer, self.decoder.target.vocab_size, name)
        if request.validate:
            grammar = dataclasses.replace(grammar, lenient=True)
        return begin(grammar, self._compilers[name], self.tokenizer)

    def _detokenizer(self, params: SamplingParams, *, is_exact: bool) -> Detokenizer | None:
        if self.tokenizer is None:
            return None

        skip_special = params.skip_special_tokens
        hidden = frozenset(self.tokenizer.all_special_ids) if skip_special else frozenset()
        skip = hidden | self._end_tokens | frozenset(params.stop_token_ids)
        spelled = _spelled(self.tokenizer, skip, params) if params.stop else {}
        return Detokenizer(
            self._decoder(skip_special, is_exact),
            skip=skip,
            spelled=Detokenizer(self._decoder(False, is_exact), apart=frozenset(spelled)) if spelled else None,
            textless=frozenset(spelled.values()),
        )

    def _decoder(self, skip_special: bool, is_exact: bool) -> Callable[[list[int]], str]:
        kind = (skip_special, is_exact)
        if kind not in self._decoders:
            self._decoders[kind] = _decoder(self.tokenizer, *kind)
        return self._decoders[kind]


def _spelled(tokenizer: Any, skip: Collection[int], params: SamplingParams) -> dict[int, str]:
    """How tokens that have no text are spelled, where a stop string holds one."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) if params.skip_special_tokens else {}
    ids = {*(i for i, token in added.items() if token.special), *skip}
    spelled = {i: text for i in ids if (text := tokenizer.decode([i], skip_special_tokens=False))}
    return spelled if any(text in stop for text in spelled.values() for stop in params.stop) else {}


def _expect_seconds(every_s: float) -> None:
    if not isinstance(every_s, int | float) or not every_s >= 0:
        raise InvalidRequestError(f"every_s must be a number of seconds >= 0, got {every_s!r}.")


class Family(list[Sequence]):
    """Sequences that may look at each other's text; forgotten with the last of them."""


def _decoder(tokenizer: Any, skip_special: bool, is_exact: bool) -> Callable[[list[int]], str]:
    """Ids to text, for a detokenizer: it asks for few ids at a time, and often for the same.

    Args:
        tokenizer: of transformers.
        skip_special: whether special tokens have no text.
        is_exact: whether the text is that of the tokens' bytes, which a grammar describes.
    """
    if is_exact:
        return exact_decoder(tokenizer, skip_special_tokens=skip_special)

    @functools.lru_cache(maxsize=_TEXTS)
    def decoded(ids: tuple[int, ...]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    return lambda ids: decoded(tuple(ids))


def _end_tokens(tokenizer: Any) -> list[int]:
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None else [end]


def _unwrap(item: Delta | BaseException) -> Delta:
    if isinstance(item, BaseException):
        raise item
    return item


def _collect(request: Request, box: queue.SimpleQueue[Delta | BaseException], check: Check) -> list[Completion]:
    """Wait for all samples of a request."""
    deltas: list[list[Delta]] = [[] for _ in range(request.n)]
    unfinished = request.n
    while unfinished:
        delta = check(_unwrap(box.get()))
        deltas[delta.index].append(delta)
        unfinished -= delta.finish_reason is not None
    return [_completion(parts, request.params.logprobs is not None) for parts in deltas]


def _completion(parts: list[Delta], with_logprobs: bool) -> Completion:
    last = parts[-1]
    if last.finish_reason is None or last.stats is None:
        raise RuntimeError(f"The last delta of a sample must carry its finish reason and stats, got {last}.")
    return Completion(
        last.index,
        tuple(token for part in parts for token in part.tokens),
        "".join(part.text for part in parts),
        last.finish_reason,
        tuple(entry for part in parts for entry in part.logprobs) if with_logprobs else None,
        last.stats,
        last.invalid,
    )
