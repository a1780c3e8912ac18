"""``AgentSpecLLM``: completion prompts without chat templates, as a plain LangChain LLM."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from agentspec import Delta, Grammar, InvalidRequestError, LocalEngine, Request
from agentspec.runtime.tokens import well_formed
from langchain_agentspec.callbacks import PROGRESS_S
from langchain_agentspec.settings import SHARED, STRICT, ModelSettings, canonical, check_keywords, decoding, sampling
from langchain_agentspec.structured_output import core_errors


class AgentSpecLLM(ModelSettings, BaseLLM):
    """A plain language model on this machine: it goes on from where the prompt ends.

    Takes the settings of ``ModelSettings`` (model, draft, temperature, seed, max_tokens, stop, n, gamma, ...).

    Args:
        grammar: what every text must be: anything that ``Grammar.of`` reads (a pydantic class, a JSON Schema, a list
            of choices) or a ``Grammar``; None for free text.

    Example:
        AgentSpecLLM(temperature=0, max_tokens=16).invoke("One, two, three,")
    """

    model_config = STRICT

    grammar: Any = None

    @property
    def _llm_type(self) -> str:
        return "agentspec"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.identity(), "grammar": None if self.grammar is None else repr(Grammar.of(self.grammar))}

    def load(self) -> AgentSpecLLM:
        """Load the models now, and not at the first call; returns this model."""
        self.engine_of(self.model)
        return self

    def generate(self, prompts: list[str], stop: list[str] | None = None, *arguments: Any, **kwargs: Any) -> LLMResult:
        """As of any LLM. Settings of the call are part of what a cache of answers goes by."""
        llm, stops, others = self._with_settings(stop, kwargs)
        return BaseLLM.generate(llm, prompts, stops, *arguments, **others)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *arguments: Any, **kwargs: Any
    ) -> LLMResult:
        """As ``generate``, for an event loop."""
        llm, stops, others = self._with_settings(stop, kwargs)
        return await BaseLLM.agenerate(llm, prompts, stops, *arguments, **others)

    def _with_settings(
        self, stop: list[str] | None, kwargs: dict[str, Any]
    ) -> tuple[AgentSpecLLM, list[str] | None, dict[str, Any]]:
        """Return this model with the settings of a call as its own, the stop strings, and the other keywords."""
        kwargs = canonical(kwargs)
        stops = kwargs.pop("stop", None) if stop is None else stop
        names = {*SHARED, "grammar"} - ({"model"} if self.engine else set())
        settings = {name: value for name, value in self.taken(kwargs).items() if name in names}
        if "grammar" in kwargs:
            settings["grammar"] = kwargs["grammar"]
        others = {name: value for name, value in kwargs.items() if name not in names}
        return self.model_copy(update=settings) if settings else self, stops, others

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        engine, requests, template_s = self._prepare(prompts, stop, kwargs)
        with core_errors():
            completions = engine.generate(requests)
        generations = [
            [
                Generation(text=c.text, generation_info=_info(c.finish_reason, c.stats.after(template_s)))
                for c in samples
            ]
            for samples in completions
        ]
        counts = [(samples[0].stats.prompt_tokens, sum(len(c.tokens) for c in samples)) for samples in completions]
        return LLMResult(generations=generations, llm_output=self._output(counts, kwargs))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        engine, requests, template_s = await asyncio.to_thread(self._prepare, prompts, stop, kwargs)
        with core_errors():
            tasks = [asyncio.ensure_future(_samples(engine, request, template_s)) for request in requests]
            try:
                samples = await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # the others of one that failed
                    task.cancel()
        counts = [
            (chunks[0].generation_info["agentspec"]["prompt_tokens"], _emitted(chunks))  # type: ignore[index]
            for chunks in samples
        ]
        generations: list[Any] = [
            [Generation(text=chunk.text, generation_info=chunk.generation_info) for chunk in chunks]
            for chunks in samples
        ]
        return LLMResult(generations=generations, llm_output=self._output(counts, kwargs))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        engine, [request], template_s = self._prepare([prompt], stop, kwargs, streams=True)
        with core_errors():
            for delta in engine.stream(request):
                chunk = _chunk(delta, template_s)
                if run_manager and chunk.text:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        engine, [request], template_s = await asyncio.to_thread(self._prepare, [prompt], stop, kwargs, streams=True)
        with core_errors():
            async with aclosing(engine.astream(request)) as deltas:
                async for delta in deltas:
                    chunk = _chunk(delta, template_s)
                    if run_manager and chunk.text:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    def _prepare(
        self, prompts: list[str], stop: list[str] | None, kwargs: dict[str, Any], *, streams: bool = False
    ) -> tuple[LocalEngine, list[Request], float]:
        """Prompts as requests, and the seconds that took. All that can be wrong with them is found here."""
        kwargs = canonical(kwargs)
        check_keywords(kwargs, (*SHARED, "grammar"))
        settings = self.settings(kwargs)
        engine = self.engine_of(settings["model"])
        described = kwargs.get("grammar", self.grammar)
        how = decoding(settings)
        if streams and how["n"] > 1:
            raise InvalidRequestError(f"Only one sample can be streamed, got n={how['n']}; use invoke or n=1.")
        params = sampling(settings, stop if stop is not None else kwargs.get("stop") or self.stop)
        grammar = None if described is None else Grammar.of(described)
        started = time.perf_counter()
        requests = [Request(engine.tokenizer.encode(well_formed(prompt)), params, grammar, **how) for prompt in prompts]
        return engine, requests, time.perf_counter() - started

    def _output(self, counts: list[tuple[int, int]], kwargs: dict[str, Any]) -> dict[str, Any]:
        """In the form in which LangChain's users look for token counts."""
        prompt, emitted = sum(p for p, _ in counts), sum(e for _, e in counts)
        usage = {"prompt_tokens": prompt, "completion_tokens": emitted, "total_tokens": prompt + emitted}
        return {"token_usage": usage, "model_name": kwargs.get("model", self.model)}


async def _samples(engine: LocalEngine, request: Request, template_s: float) -> list[GenerationChunk]:
    """Return the whole samples of a request."""
    chunks: defaultdict[int, list[GenerationChunk]] = defaultdict(list)
    async with aclosing(engine.astream(request, PROGRESS_S)) as deltas:
        async for delta in deltas:
            chunks[delta.index].append(_chunk(delta, template_s))
    return [
        GenerationChunk(text="".join(c.text for c in parts), generation_info=parts[-1].generation_info)
        for _, parts in sorted(chunks.items())
    ]


def _emitted(chunks: list[GenerationChunk]) -> int:
    return sum((chunk.generation_info or {})["agentspec"]["new_tokens"] for chunk in chunks)


def _chunk(delta: Delta, template_s: float) -> GenerationChunk:
    info = None if delta.stats is None else _info(delta.finish_reason, delta.stats.after(template_s))
    return GenerationChunk(text=delta.text, generation_info=info)


def _info(finish_reason: Any, stats: Any) -> dict[str, Any]:
    return {"finish_reason": str(finish_reason), "agentspec": stats.to_dict()}
