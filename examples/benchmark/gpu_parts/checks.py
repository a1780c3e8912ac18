"""Is what this device computes right? Findings, each of which holds, or does not, or could not be looked at."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentspec import Batch, CausalLM, LocalEngine, ModelDrafter, Request, SamplingParams
from agentspec import SpeculativeDecoder as Decoder
from agentspec.models.fusion import fused_modules
from agentspec.rng import Role, SequenceRng
from gpu_parts.models import Scale, Widened, fused, random_model

GAMMAS = (0, 1, 4, 8)
_ROUNDING = 1e-4  # of the largest score, in float32
_LARGE_VOCABULARY = 128_256
_NOISE = 0.05  # enough that some drafted tokens are rejected


@dataclass(frozen=True)
class Finding:
    """What a check found; ``holds`` is None where it could not be made."""

    name: str
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        """A line with the verdict."""
        return f"{ {True: 'ok', False: 'FAILED', None: 'skipped'}[self.holds]:8s}{self.name}: {self.detail}"


@torch.inference_mode()
def same_function(wide: Widened, small: Any) -> Finding:
    """With noise 0 the wide model's logits are those of the small one. Leaves the noise at 0."""
    wide.set_noise(0.0)
    ids = _ids(small.config.vocab_size, (2, 64)).to(small.device)
    expected, found = (model(input_ids=ids, use_cache=False).logits for model in (small, wide.model))
    off = float((expected - found).abs().max() / expected.abs().max())
    return Finding("the widened model computes the small one's function", off < _ROUNDING, f"{off:.1e} of the largest")


def fused_scores(model: CausalLM, plain: PreTrainedModel) -> Finding:
    """Scores of the fused model against those of transformers' own."""
    ids = _ids(model.vocab_size, (2, 64)).to(model.device)
    with torch.inference_mode():
        found, expected = (module(input_ids=ids, use_cache=False).logits.float() for module in (model.model, plain))
    off = float((found - expected).abs().max() / expected.abs().max())
    limit = _ROUNDING if model.dtype == torch.float32 else 5e-2
    name = f"fused modules score as transformers' own ({_title(model)})"
    count = fused_modules(model.model)
    return Finding(name, off < limit and count > 0, f"{off:.1e} of the largest, {count} modules fused")


def cached_logits(model: CausalLM) -> tuple[Finding, float]:
    """Compare the logits of ragged cached blocks with those of uncached passes; return the largest difference too."""
    contexts = _ids(model.vocab_size, (4, 90)).tolist()
    model.next_logits([context[:60] for context in contexts], [0] * 4)
    model.next_logits([[*context[: 70 + b], 1, 2, 3] for b, context in enumerate(contexts)], [4] * 4)  # to be rejected
    cached = model.next_logits(contexts, [5] * 4).values
    with torch.inference_mode():
        ids = torch.tensor(contexts, device=model.device)
        plain = model.model(input_ids=ids, use_cache=False).logits[:, -5:].float()
    off, largest = float((cached - plain).abs().max()), float(plain.abs().max())
    limit = _ROUNDING if model.dtype == torch.float32 else 5e-2
    name = f"cached logits equal uncached ones ({_short(model.dtype)})"
    return Finding(name, off / largest < limit, f"{off / largest:.1e} of the largest"), off


def captured_passes(launched: CausalLM, captured: CausalLM) -> Finding:
    """Scores of captured passes against those of the same model's launched ones, while contexts grow and part."""
    name, off = f"captured passes score as launched ones ({_title(launched)})", 0.0
    contexts = _ids(launched.vocab_size, (3, 40)).tolist()
    news = _ids(launched.vocab_size, (72, 9)).tolist()
    for step, tokens in enumerate(news):
        width = (1, 3, 5, 9)[step % 4]
        called = [context + tokens[:width] for context in contexts[: 1 + step // 4 % 3]]
        asked = [width] * len(called)
        ours, theirs = captured.next_logits(called, asked).values, launched.next_logits(called, asked).values
        off = max(off, float((ours - theirs).abs().max() / theirs.abs().max()))
        contexts[0].extend(tokens[:1])
        if step == len(news) // 2:  # K and V move, and what was captured is captured anew
            long = [_ids(launched.vocab_size, (1, 400)).tolist()[0]]
            for model in (captured, launched):
                model.next_logits(long, [1])
    if not captured.captures:
        on_cuda = captured.device.type == "cuda"
        return Finding(name, False if on_cuda else None, "nothing is captured here, or no longer")
    limit = _ROUNDING if launched.dtype == torch.float32 else 5e-2
    holds = off < limit and captured.replayed_passes > 0
    return Finding(name, holds, f"{off:.1e} of the largest, {captured.replayed_passes} passes replayed")


Texts = dict[int, list[tuple[int, ...]]]


def texts(target: CausalLM, draft: CausalLM, temperature: float, length: int) -> tuple[list[list[int]], Texts]:
    """Prompts, and by gamma the texts that coupled drawing gives behind them."""
    prompts = _ids(target.vocab_size, (4, 24)).tolist()
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=length) for i in range(len(prompts))]
    engine = LocalEngine(Decoder(target, ModelDrafter(draft), acceptance="coupled"))
    try:
        found = {
            gamma: engine.generate([Request(p, s, gamma=gamma) for p, s in zip(prompts, params, strict=True)])
            for gamma in GAMMAS
        }
    finally:
        engine.close()
    return prompts, {gamma: [samples[0].tokens for samples in done] for gamma, done in found.items()}


def equal_texts(target: CausalLM, draft: CausalLM, temperature: float, length: int) -> Finding:
    """Whether texts are the same with speculation on and off."""
    _, found = texts(target, draft, temperature, length)
    pairs = [(plain, other) for gamma in GAMMAS[1:] for plain, other in zip(found[0], found[gamma], strict=True)]
    same = sum(plain == other for plain, other in pairs)
    name = f"{'coupled' if temperature else 'greedy'} ids do not depend on speculation ({_short(target.dtype)})"
    return Finding(name, same == len(pairs), f"{same} of {len(pairs)} texts of {length} tokens")


def margins(target: CausalLM, draft: CausalLM, length: int, wobble: float) -> Finding:
    """Where greedy texts differ, two logits must have been as good as equal: within what ``wobble`` can turn round.

    ``wobble`` is the largest difference between cached and uncached logits, seen on a sample; twice that is allowed,
    for either of the two logits.
    """
    prompts, found = texts(target, draft, 0.0, length)
    pairs = [
        (prompt, plain, other)
        for gamma in GAMMAS[1:]
        for prompt, plain, other in zip(prompts, found[0], found[gamma], strict=True)
    ]
    gaps = [_gap(target, prompt, plain, other) for prompt, plain, other in pairs if plain != other]
    limit = 4 * wobble
    detail = f"{len(gaps)} of {len(pairs)} texts differ" + (
        f"; largest margin at the first difference {max(gaps):.3g}, allowed {limit:.3g}" if gaps else ""
    )
    name = f"greedy ids differ at ties only ({_short(target.dtype)})"
    return Finding(name, all(gap <= limit for gap in gaps), detail)


def _gap(target: CausalLM, prompt: list[int], plain: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Between the logits of the two tokens at which two texts part."""
    at = next(i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    logits = target.next_logits([[*prompt, *plain[:at]]], [1]).values[0, 0]
    return float((logits[plain[at]] - logits[other[at]]).abs())


class _AtEdges(SequenceRng):
    """A rng whose every number lies on an edge of the decision: where rounding shows."""

    needs_edges = True

    def __init__(self, rows: int, device: str, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__(range(rows), [0] * rows, device)
        self._choose = choose

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        """One of the edges of each row, the last of them (1) never."""
        assert edges is not None
        self.edges = edges
        return self._choose(edges).clamp(max=1 - 2.0**-53)


def zero_mass(vocabulary: int, device: str, rows: int = 16, tries: int = 24) -> Finding:
    """No token without mass is drawn from distributions of few tokens among many, even by a uniform on an edge.

    A parallel sum may round otherwise at neighbouring places: then a token without mass would own a sliver.
    """
    generator = torch.Generator(device).manual_seed(4)
    kept = torch.rand(rows, vocabulary, device=device, generator=generator)
    probs = torch.where(kept < torch.logspace(-3, -0.3, rows, device=device)[:, None], kept, 0.0)
    probs[:, 0] = 0
    probs[:, vocabulary // 2] += 1e-3  # no row without mass
    probs[:, -vocabulary // 8 :] = 0
    offsets = torch.zeros(rows, dtype=torch.long, device=device)
    wrong, drawn = 0, 0
    empty = probs == 0
    for k in range(tries):
        at = torch.randint(vocabulary, (rows, 1), device=device, generator=generator)
        rng = _AtEdges(rows, device, lambda edges, at=at, k=k: _edge(edges, at, k))  # type: ignore[misc]
        for some in (rng, SequenceRng([k * rows + row for row in range(rows)], [0] * rows, device)):
            tokens = some.draw(probs, Role.TARGET, offsets)
            wrong += int(empty.gather(1, tokens[:, None]).sum())
            drawn += rows
    steps = rng.edges.diff(dim=1)
    slivers, falls = int((steps[empty[:, 1:]] > 0).sum()), int((steps < 0).sum())
    detail = f"{wrong} of {drawn} draws; {slivers} slivers in {int(empty.sum())} such tokens, {falls} falls of the sum"
    return Finding("no token without mass is drawn", wrong == slivers == falls == 0, detail)


def _edge(edges: Tensor, at: Tensor, k: int) -> Tensor:
    """0, the number below 1, then edges at chance."""
    if k < 2:
        return torch.full_like(edges[:, 0], float(k))
    return edges.gather(1, at)[:, 0]


CASES = tuple(
    itertools.product(
        ("model", "cascade", "none"), ("temperature 1", "top-p 0.8", "greedy"), ("free", "constrained"), (1, 2)
    )
)
"""Drafter, setting, task and gamma of the enumeration, in the order of playing."""


def enumeration(tests: Path, device: str, seconds: float) -> Finding:
    """The distribution that rounds emit on this device, by enumeration, as in ``tests/enumeration.py``.

    Cases are played until ``seconds`` are over, one at least. Decoding is played on the device; the distribution
    that should come out is written down on the CPU.
    """
    name = "rounds emit the distribution of plain decoding, by enumeration"
    if not (tests / "enumeration.py").is_file():
        return Finding(name, None, "tests/enumeration.py does not lie beside the examples")
    sys.path.insert(0, str(tests))
    try:
        module = importlib.import_module("enumeration")
    finally:
        sys.path.remove(str(tests))
    began, worst, done = time.perf_counter(), 0.0, 0
    for case in CASES:
        if done and time.perf_counter() - began > seconds:
            break
        worst, done = max(worst, _case(module, device, *case)), done + 1
    return Finding(name, worst < 1e-12, f"largest error {worst:.1e} in {done} of {len(CASES)} cases")


def _case(module: ModuleType, device: str, drafter: str, setting: str, task: str, gamma: int) -> float:
    class Table(module.TableModel):  # type: ignore[misc, name-defined]
        """A table model whose logits lie on the device."""

        def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
            logits: Tensor = super().next_logits(contexts, last)
            return logits.to(device)

    class Branching(module.EnumeratingRng):  # type: ignore[misc, name-defined]
        """The enumerating rng, its numbers on the device."""

        def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
            numbers: Tensor = super().uniform(role, offsets, edges)
            return numbers.to(device)

    what = module.TASKS[task]
    target, draft = (Table(what.vocab_size, seed=seed) for seed in (0, 1))
    decoder = Decoder(target, module.drafters(target, draft)[drafter], gamma=gamma)
    with (
        mock.patch.object(module, "EnumeratingRng", Branching),
        mock.patch.object(module, "Batch", lambda sequences, rng, kernels: Batch(sequences, device, rng, kernels)),
    ):
        found = what.emitted(decoder.round, setting)
    error: float = module.largest_error(found, what.plain(target, setting))
    return error if math.isfinite(error) else math.inf


def attempt(name: str, check: Callable[[], Finding]) -> Finding:
    """What a check finds; one that breaks off does not hold, and the next may still be made."""
    try:
        return check()
    except Exception as error:  # a machine that nobody has seen can raise anything
        return Finding(name, False, f"{type(error).__name__}: {error}")


def all_findings(scale: Scale, device: str, tests: Path, seconds: float) -> Iterator[Finding]:
    """Every check: models of ``scale`` in float32 and bfloat16; ``seconds`` for the enumeration."""
    yield attempt("enumeration", lambda: enumeration(tests, device, seconds))
    yield attempt("draws", lambda: zero_mass(_LARGE_VOCABULARY, device))
    for dtype in (torch.float32, torch.bfloat16):
        try:
            yield from model_findings(scale, device, dtype, length=32 if device == "cpu" else 96)
        except Exception as error:  # as above
            yield Finding(f"models in {_short(dtype)}", False, f"{type(error).__name__}: {error}")


def model_findings(scale: Scale, device: str, dtype: torch.dtype, length: int) -> Iterator[Finding]:
    """The checks of a pair of models; equality of texts in float32, margins in any other type."""
    small = random_model(scale.draft, scale.vocabulary, device, dtype)
    wide = Widened(small, scale.target)
    if dtype == torch.float32:
        yield same_function(wide, small)
    wide.set_noise(_NOISE)
    target, draft = fused(wide.model), fused(small)
    yield fused_scores(target, wide.model)
    cached, wobble = cached_logits(target)
    yield cached
    for model in (target, draft):
        yield captured_passes(CausalLM(model.model, cuda_graphs=False), model)
    if dtype == torch.float32:
        yield equal_texts(target, draft, 0.0, length)
        yield equal_texts(target, draft, 1.0, length)
    else:
        yield margins(target, draft, length, wobble)


def _ids(vocabulary: int, shape: tuple[int, int]) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


def _title(model: CausalLM) -> str:
    return f"{_short(model.dtype)}, {model.model.config.num_hidden_layers} layers"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
