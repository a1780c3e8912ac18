"""The systems that are compared, each behind ``answer``: transformers and agentspec here, others in ``workers``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from generate_peer import constrained, first_forward
from transformers import AutoModelForCausalLM

from agentspec import LocalEngine, embedded
from agentspec.grammars import begin, compiler
from agentspec.runtime.threads import apart
from agentspec.stats import StepStats
from comparison.work import Item, Workload

LOOKUP_TOKENS = 10
"""Tokens that ``generate`` drafts by prompt look-up: the value of its documentation."""


@dataclass(frozen=True)
class Answer:
    """What a system said.

    Args:
        samples: ids of each, up to an end token, which not every system tells of.
        seconds: from the request to the last token.
        prompt_s: of them, up to where the prompt was read; None where a system does not tell.
        step: agentspec's account, of a single sample.
        is_exact: whether ``samples`` are the ids that were emitted, and not those of their text.
    """

    samples: tuple[tuple[int, ...], ...]
    seconds: float
    prompt_s: float | None = None
    step: StepStats | None = None
    is_exact: bool = True

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(map(len, self.samples))


class System(Protocol):
    """One that answers. Any exception of ``answer`` is reported as its failure in the workload."""

    same_weights: bool
    """Whether its greedy texts should be those of ``generate``."""

    def refusal(self, workload: Workload) -> str | None:
        """Why it takes no part in a workload; None where it does."""
        ...

    def begin(self) -> None:
        """Before a row: drop what earlier rows left."""
        ...

    def end(self) -> None:
        """After a row: leave the cores to the others."""
        ...

    def answer(self, item: Item, seed: int) -> Answer:
        """Decode."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Generate:
    """transformers' ``generate``, on a model that agentspec has not touched.

    Args:
        engine: whose tokenizer and grammars are used.
        model: of transformers.
        lookup: draft by prompt look-up.
        masks: keep to the grammars.
        together: several samples in one call.
    """

    same_weights = True

    def __init__(
        self, engine: LocalEngine, model: Any, *, lookup: bool = False, masks: bool = False, together: bool = True
    ) -> None:
        self._tokenizer, self._model = engine.tokenizer, model
        self._grammars = compiler(engine.tokenizer, engine.decoder.target.vocab_size, "auto")
        self._lookup, self._masks, self._together = lookup, masks, together

    def refusal(self, workload: Workload) -> str | None:
        """Masks are for grammars, single calls for several samples."""
        if not self._together and workload.samples == 1:
            return "one sample is asked for"
        if self._masks != workload.constrained:
            return "no grammar to keep to" if self._masks else "cannot keep to a grammar"
        return None

    def begin(self) -> None:
        """It remembers nothing."""

    def end(self) -> None:
        """Its threads have ended."""

    def answer(self, item: Item, seed: int) -> Answer:
        """All samples, in one call or in as many."""
        torch.manual_seed(seed)
        if self._together:
            return self._call(item, item.request.n)
        return _one_by_one([self._call(item, 1) for _ in range(item.request.n)])

    @apart
    def _call(self, item: Item, n: int) -> Answer:
        request, end = item.request, self._tokenizer.eos_token_id
        options: dict[str, Any] = {"do_sample": False}
        if request.params.temperature:
            options = {"do_sample": True, "temperature": request.params.temperature, "top_k": 0, "top_p": 1.0}
        if self._lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if request.grammar is not None:
            options |= constrained(begin(request.grammar, self._grammars, self._tokenizer), len(request.prompt), end)
        ids = torch.tensor([request.prompt])
        started = time.perf_counter()
        with first_forward(self._model) as watch:
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.params.max_tokens,
                num_return_sequences=n,
                pad_token_id=end,
                **options,
            )
        seconds = time.perf_counter() - started
        samples = tuple(_up_to(row, end) for row in out[:, ids.shape[1] :].tolist())
        return Answer(samples, seconds, None if watch.ended_at is None else watch.ended_at - started)

    def close(self) -> None:
        """Nothing is held."""


class AgentSpec:
    """agentspec's engine.

    Args:
        engine: whose decoder and tokenizer are used.
        gamma: tokens to draft; None for the default.
        together: several samples in one request.
    """

    same_weights = True

    def __init__(self, engine: LocalEngine, gamma: int | None, *, together: bool = True) -> None:
        self._engine, self._decoder, self._tokenizer = engine, engine.decoder, engine.tokenizer
        self._gamma, self._together = gamma, together

    def refusal(self, workload: Workload) -> str | None:
        """Single calls are for several samples."""
        return None if self._together or workload.samples > 1 else "one sample is asked for"

    def begin(self) -> None:
        """An engine, and so a worker, of its own, and an empty KV cache."""
        target: Any = self._decoder.target
        target.kv.clear()
        self._engine = LocalEngine(self._decoder, self._tokenizer)

    def end(self) -> None:
        """End the worker: threads that have computed, and stay, slow down all others."""
        self._engine.close()

    def answer(self, item: Item, seed: int) -> Answer:
        """All samples, in one request or in as many."""
        if self._together:
            return self._call(item, item.request.n, seed)
        return _one_by_one([self._call(item, 1, seed + i) for i in range(item.request.n)])

    def _call(self, item: Item, n: int, seed: int) -> Answer:
        params = replace(item.request.params, seed=seed if item.request.params.temperature else None)
        request = replace(item.request, params=params, gamma=self._gamma, n=n)
        self._engine.stream(request).close()  # type: ignore[attr-defined]  # compiles the grammar, computes nothing
        started = time.perf_counter()
        [completions] = self._engine.generate([request])
        seconds = time.perf_counter() - started
        step = completions[0].stats
        return Answer(
            tuple(_up_to(completion.tokens, self._tokenizer.eos_token_id) for completion in completions),
            seconds,
            step.seconds["prefill_s"] + step.seconds["draft_prefill_s"],
            step if n == 1 else None,
        )

    def close(self) -> None:
        """End the worker, if there is one."""
        self._engine.close()


def _one_by_one(answers: list[Answer]) -> Answer:
    """Single calls as one answer."""
    return Answer(tuple(a.samples[0] for a in answers), sum(a.seconds for a in answers))


def _up_to(ids: Sequence[int], end: int) -> tuple[int, ...]:
    """The ids before the first end token: what stands behind it is padding."""
    return tuple(ids[: ids.index(end)] if end in ids else ids)


@apart
def plain_model() -> Any:
    """The embedded model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(
        embedded.path(), dtype=torch.float32, local_files_only=True
    ).requires_grad_(False)


@dataclass(frozen=True)
class Kind:
    """A system that runs in this process: its title, and what makes it of the engine and of transformers' model."""

    title: str
    make: Callable[[LocalEngine, Any], System]


KINDS: dict[str, Kind] = {
    "generate": Kind("transformers generate", Generate),
    "generate-lookup": Kind("generate, prompt look-up", lambda e, m: Generate(e, m, lookup=True)),
    "generate-masks": Kind("generate, same masks", lambda e, m: Generate(e, m, masks=True)),
    "generate-masks-lookup": Kind(
        "generate, same masks, prompt look-up", lambda e, m: Generate(e, m, masks=True, lookup=True)
    ),
    "generate-single": Kind("generate, one sample after the other", lambda e, m: Generate(e, m, together=False)),
    "agentspec-off": Kind("agentspec, speculation off", lambda e, _: AgentSpec(e, 0)),
    "agentspec-single": Kind("agentspec, one sample after the other", lambda e, _: AgentSpec(e, None, together=False)),
    "agentspec": Kind("agentspec", lambda e, _: AgentSpec(e, None)),
}
"""By name."""
