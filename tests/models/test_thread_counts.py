"""A number of threads that changes while a model is at work changes no bit of what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch
from enumeration import TableModel
from tiny import VOCABULARY, gpt2, llama, mistral
from transformers import PreTrainedModel

from agentspec import Cascade, Completion, LocalEngine, Request, SamplingParams, SpeculativeDecoder
from agentspec.drafters import Drafter
from agentspec.drafters.model import ModelDrafter
from agentspec.drafters.suffix import SuffixDrafter
from agentspec.engine import scheduler
from agentspec.models.backends.native import compiles
from agentspec.models.causal_lm import CausalLM
from agentspec.sampling import warp

needs_kernels = pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")


class Unsteady:
    """Gives another number of threads at each call."""

    def __init__(self, *counts: int) -> None:
        self._counts = cycle(counts)
        self.given: list[int] = []

    def apply(self) -> int:
        torch.set_num_threads(next(self._counts))
        self.given.append(torch.get_num_threads())
        return self.given[-1]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def saved(folder: Path, make: Callable[..., PreTrainedModel], **sizes: int) -> CausalLM:
    make(**sizes).save_pretrained(folder)
    return CausalLM.from_pretrained(folder, device="cpu")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}


@needs_kernels
def test_scores_of_kernels_are_the_same_on_any_number_of_threads(tmp_path: Path) -> None:
    lm = saved(tmp_path, llama, **SIZES)
    assert lm.fits_any_threads
    contexts = [torch.randint(VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 41)]
    found = []
    for counts in ((1, 1), (2, 2), (3, 3), (1, 2), (3, 1)):
        lm.kv.clear()
        torch.set_num_threads(counts[0])
        first = lm.next_logits([context[:-9] for context in contexts], [3, 3]).values
        torch.set_num_threads(counts[1])
        found.append(torch.cat([first, lm.next_logits(contexts, [9, 9]).values], dim=1))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_only_models_of_kernels_say_that_they_fit_any_number(tmp_path: Path) -> None:
    assert not saved(tmp_path / "gpt2", gpt2).fits_any_threads
    assert not CausalLM(llama()).fits_any_threads
    assert not SpeculativeDecoder(TableModel()).fits_any_threads
    if compiles("auto"):
        target, draft = saved(tmp_path / "a", llama, **SIZES), saved(tmp_path / "b", mistral, **SIZES)
        assert SpeculativeDecoder(target, Cascade([ModelDrafter(draft)])).fits_any_threads == draft.fits_any_threads
        assert not SpeculativeDecoder(target, ModelDrafter(CausalLM(llama()))).fits_any_threads
        assert not SpeculativeDecoder(CausalLM(llama()), ModelDrafter(target)).fits_any_threads


def complete(target: CausalLM, drafters: list[Drafter]) -> tuple[list[Completion], LocalEngine]:
    engine = LocalEngine(SpeculativeDecoder(target, Cascade(drafters), 4), max_running=3)
    requests = [
        Request([5, 6, 7, 5, 6], SamplingParams(max_tokens=40, temperature=t, top_p=p, seed=3, logprobs=2), n=2)
        for t, p in ((0.0, 1.0), (0.9, 0.8), (1.3, 1.0))
    ]
    try:
        return [sample for samples in engine.generate(requests) for sample in samples], engine
    finally:
        engine.close()


@needs_kernels
def test_a_worker_whose_threads_change_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = saved(tmp_path / "a", llama, **SIZES), saved(tmp_path / "b", llama, seed=1, **SIZES)
    expected, _ = complete(target, [SuffixDrafter(), ModelDrafter(draft)])
    for counts in ((1,), (2, 1), (1, 3, 2)):
        unsteady = Unsteady(*counts)
        monkeypatch.setattr(scheduler, "BUDGET", unsteady)
        target.kv.clear()
        draft.kv.clear()
        found, engine = complete(target, [SuffixDrafter(), ModelDrafter(draft)])
        assert len(unsteady.given) > 10
        assert engine.metrics().threads == unsteady.given[-1]
        for one, other in zip(found, expected, strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_a_worker_of_other_models_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    unsteady = Unsteady(1, 2)
    monkeypatch.setattr(scheduler, "BUDGET", unsteady)
    _, engine = complete(CausalLM(llama()), [])
    assert unsteady.given == []
    assert engine.metrics().threads == torch.get_num_threads()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"top_k": 5, "top_p": 0.5},
    ],
    ids=str,
)
def test_sampling_over_a_large_vocabulary_is_the_same_on_any_number_of_threads(settings: dict[str, float]) -> None:
    logits = torch.randn(5, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        probs = [warp(logits[:rows, None], [SamplingParams(**settings)] * rows, None) for rows in (1, 5)]
        found.append([*probs, logits.log_softmax(-1), logits[:1].log_softmax(-1), logits.argmax(-1)])
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
