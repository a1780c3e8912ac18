"""Self-consistency: ask several times, and answer what most of the samples say."""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs
from pydantic import BaseModel

from agentspec import InvalidRequestError
from agentspec.errors import NoAnswerError, shown
from agentspec.voting import Ballot, Stop, canonical, is_decided, tally, winner
from langchain_agentspec.samples import Sample, within

Aggregate = Literal["majority", "weighted"] | Callable[[list[Any]], Any]
Ask = Callable[[Sample, RunnableConfig | None], Awaitable[Any]]


@dataclass
class Sampled:
    """A sample that is done.

    Args:
        index: of the sample.
        output: what the model or chain gave; None where it failed.
        answer: what was extracted of it, which it votes for; None for no vote.
        error: why there is no answer.
        tokens: emitted for it.
        logprob: mean log-probability of its tokens; None where that was not asked for.
    """

    index: int
    output: Any = None
    answer: Any = None
    error: str | None = None
    tokens: int = 0
    logprob: float | None = None

    @property
    def weight(self) -> float:
        """The geometric mean of its tokens' probabilities; 1 where they are not known."""
        return 1.0 if self.logprob is None else math.exp(self.logprob)


@dataclass(frozen=True)
class ConsistencyResult:
    """A vote.

    Args:
        answer: that won.
        output: of the first sample that gave it.
        votes: heads, or weights, per answer in canonical form.
        share: of the winner in them.
        samples: that are done, in the order of their indices.
        stopped_early: whether samples were left out, the vote being decided.
        tokens: emitted in all samples that are done.
        tokens_saved: an estimate: as many as those that were left out would have had at the mean of the others.
        latency_s: seconds from the question to the answer.
    """

    answer: Any
    output: Any
    votes: dict[str, float]
    share: float
    samples: list[Sampled] = field(repr=False)
    stopped_early: bool = False
    tokens: int = 0
    tokens_saved: int = 0
    latency_s: float = 0.0


class SelfConsistency(Runnable[Any, Any]):
    """A model or chain asked ``k`` times at once; the answer is what most of the samples say.

    Over ``ChatAgentSpec`` the samples share one prompt's computation and the rounds of one engine, and each has a seed
    of its own: sample i is the single call with ``sample_seed(seed, i)`` under coupled acceptance. A cache of answers
    is left aside.

    Args:
        model: a chat model, or a chain with one in it.
        k: samples.
        extract: takes the answer out of an output; None for tool calls (name and arguments), else the parsed object,
            else the text. Where it raises or gives None, the sample has no vote.
        aggregate: ``"majority"``; ``"weighted"`` by the mean probability of a sample's tokens; or a function of all
            answers.
        stop: when to leave out samples that are on their way, see ``agentspec.voting.is_decided``.
        threshold, min_samples: of ``stop``.
        tie: between equals, ``"first"`` or the highest ``"logprob"``.
        seed: of all samples; None for the model's own.
        ignore_args: arguments of tool calls that do not matter to the vote.
        return_all: give a ``ConsistencyResult`` in place of the winning output.

    Raises:
        InvalidRequestError: for values that make no sense, naming what was expected.
    """

    def __init__(
        self,
        model: Runnable[Any, Any],
        k: int = 8,
        *,
        extract: Callable[[Any], Any] | None = None,
        aggregate: Aggregate = "majority",
        stop: Stop = "none",
        threshold: float = 0.95,
        min_samples: int = 3,
        tie: Literal["first", "logprob"] = "first",
        seed: int | None = None,
        ignore_args: Sequence[str] = (),
        return_all: bool = False,
    ) -> None:
        known = aggregate in ("majority", "weighted") or callable(aggregate)
        stops = ("none", "unanimous_window", "adaptive")
        rules = (
            ("k", isinstance(k, int) and k >= 1, "a number of samples, 1 or more", k),
            ("aggregate", known, "'majority', 'weighted' or a function of the answers", aggregate),
            ("stop", stop in stops, f"one of {stops}", stop),
            ("stop", stop == "none" or aggregate == "majority", "'none' where not heads are counted", stop),
            ("tie", tie in ("first", "logprob"), "'first' or 'logprob'", tie),
            ("threshold", 0.5 < threshold <= 1, "a probability above a half", threshold),
            ("min_samples", min_samples >= 1, "1 or more", min_samples),
        )
        for name, holds, expected, found in rules:
            if not holds:
                raise InvalidRequestError(f"{name} must be {expected}, got {shown(found)}.")
        self.model, self.k, self.extract, self.aggregate = model, k, extract, aggregate
        self.stop, self.threshold, self.min_samples, self.tie = stop, threshold, min_samples, tie
        self.seed, self.ignore_args, self.return_all = seed, tuple(ignore_args), return_all

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """Return the winning output, or the whole vote with ``return_all``.

        Raises:
            NoAnswerError: where no sample has an answer; shows them.
        """
        return in_own_loop(lambda: self.ainvoke(input, config, **kwargs))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """As ``invoke``; cancelling the task cancels all samples."""

        async def _ask(_: Sample, sample_config: RunnableConfig | None) -> Any:
            return await self.model.ainvoke(input, sample_config, **kwargs)

        result = await self.vote(_ask, config)
        return result if self.return_all else result.output

    async def vote(self, ask: Ask, config: RunnableConfig | None = None) -> ConsistencyResult:
        """Draw samples by ``ask`` until the vote is decided."""
        started = time.perf_counter()
        group = uuid.uuid4().hex
        wants_logprobs = self.aggregate == "weighted" or self.tie == "logprob"
        contexts = [Sample(i, self.k, self.seed, group, wants_logprobs) for i in range(self.k)]
        pending = {within(sample, self._sampled(ask, sample, config)) for sample in contexts}
        done: list[Sampled] = []
        try:
            while pending and not self._is_decided(done):
                finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                done += [task.result() for task in finished]
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        return self._result(sorted(done, key=lambda sampled: sampled.index), time.perf_counter() - started)

    async def _sampled(self, ask: Ask, sample: Sample, config: RunnableConfig | None) -> Sampled:
        listener = _Listener()
        sampled = Sampled(sample.index)
        try:
            sampled.output = await ask(sample, merge_configs(config, {"callbacks": [listener]}))
        except InvalidRequestError:
            raise  # the others would say the same
        except Exception as error:
            sampled.error = repr(error)
        else:
            self._extract(sampled)
        sampled.tokens, sampled.logprob = listener.tokens, listener.logprob
        return sampled

    def _extract(self, sampled: Sampled) -> None:
        try:
            answer = self.extract(sampled.output) if self.extract else answer_of(sampled.output, self.ignore_args)
            canonical(answer)
        except Exception as error:  # whatever a user's function raises: no vote, and no harm to the others
            sampled.error = f"no answer in {shown(sampled.output)}: {shown(error)}"
        else:
            sampled.answer = answer
            sampled.error = f"no answer in {shown(sampled.output)}" if answer is None else None

    def _ballots(self, done: Sequence[Sampled]) -> list[Ballot]:
        return [Ballot(s.index, None if s.answer is None else canonical(s.answer), s.weight, s.logprob) for s in done]

    def _is_decided(self, done: Sequence[Sampled]) -> bool:
        return is_decided(
            self._ballots(done), self.k, stop=self.stop, threshold=self.threshold, min_samples=self.min_samples
        )

    def _result(self, done: list[Sampled], latency_s: float) -> ConsistencyResult:
        ballots, weighted = self._ballots(done), self.aggregate == "weighted"
        answers = [sampled for sampled in done if sampled.answer is not None]
        if not answers:
            raise NoAnswerError(f"None of {len(done)} samples has an answer: {[s.error for s in done]}")
        if callable(self.aggregate):
            answer = self.aggregate([sampled.answer for sampled in answers])
            key = canonical(answer)
        else:
            key = winner(ballots, weighted=weighted, tie=self.tie) or ""
            answer = next(s.answer for s in answers if canonical(s.answer) == key)
        votes = tally(ballots, weighted=weighted)
        tokens = sum(sampled.tokens for sampled in done)
        return ConsistencyResult(
            answer,
            next((s.output for s in answers if canonical(s.answer) == key), answer),
            votes,
            votes.get(key, 0.0) / sum(votes.values()),
            done,
            stopped_early=len(done) < self.k,
            tokens=tokens,
            tokens_saved=round(tokens / len(done) * (self.k - len(done))),
            latency_s=latency_s,
        )


def answer_of(output: Any, ignore_args: Sequence[str] = ()) -> Any:
    """Return the answer in an output: its tool calls, its parsed object, or its text; None for nothing."""
    if isinstance(output, AIMessage):
        calls = [
            {"name": call["name"], "args": {k: v for k, v in call["args"].items() if k not in ignore_args}}
            for call in output.tool_calls
        ]
        return calls or output.text or None
    if isinstance(output, BaseModel):
        return output.model_dump(mode="json")
    if isinstance(output, dict) and output.keys() == {"raw", "parsed", "parsing_error"}:
        return answer_of(output["parsed"])
    return output


class _Listener(BaseCallbackHandler):
    """Counts the tokens of a sample's model calls, and hears how likely they were."""

    run_inline = True

    def __init__(self) -> None:
        self.tokens = 0
        self._logprobs: list[float] = []

    @property
    def logprob(self) -> float | None:
        return sum(self._logprobs) / len(self._logprobs) if self._logprobs else None

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for generation in response.generations[0]:
            if isinstance(generation, ChatGeneration) and isinstance(generation.message, AIMessage):
                self.tokens += (generation.message.usage_metadata or {"output_tokens": 0})["output_tokens"]
                content = (generation.message.response_metadata.get("logprobs") or {}).get("content") or ()
                self._logprobs += [entry["logprob"] for entry in content]


def in_own_loop(make: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine to its end from code that may or may not have an event loop around it."""

    async def _run() -> Any:
        return await make()

    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, asyncio.run, _run()).result()
