"""The host beside a device: it waits once a round, and hands things over without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import AutomatonMatcher, TableModel
from torch import Tensor

from agentspec import acceptance, sampling
from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget, Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.model import ModelDrafter
from agentspec.grammars import GrammarCursor
from agentspec.runtime import device
from agentspec.runtime.device import upload, upload_beside, vector, wait_for
from agentspec.sampling import SamplingParams
from agentspec.sequence import Sequence as TokenSequence
from agentspec.speculative import SpeculativeDecoder

CPU = torch.device("cpu")
ARGMAX = int(TableModel().logits([0, 1, 2]).argmax())
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")


class Repeats(Drafter):
    """Drafts the same token again and again."""

    name = "repeats"

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        return Draft.of_tokens([[1] * n for n in budget.of(self.name)], self.name, batch.device)


def batch_of(rows: int, **settings: Any) -> Batch:
    params = SamplingParams(max_tokens=9, **settings)
    return Batch([TokenSequence([0, 1, 2], params, seed=seed) for seed in range(rows)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("drafter", "settings", "expected"),
    [
        (Repeats(), {"temperature": 0.0}, 1),
        (Repeats(), {"temperature": 0.8, "top_k": 2, "min_p": 0.1}, 1),
        (Repeats(), {"temperature": 0.8, "top_p": 0.9}, 2),  # whether a sort is needed
        (ModelDrafter(TableModel(seed=5)), {"temperature": 0.8}, 4),
        (Cascade([Repeats(), ModelDrafter(TableModel(seed=5))]), {"temperature": 0.8}, 1),
    ],
    ids=["greedy", "top-k", "top-p", "a draft model of three tokens", "a cascade"],
)
def test_the_host_reads_once_a_round_and_once_for_each_token_that_a_draft_model_draws(
    drafter: Drafter, settings: dict[str, Any], expected: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(TableModel(), drafter, gamma=3)
    assert len(reads_of(decoder, batch_of(rows, **settings), monkeypatch)) == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("edges", "more"), [({0: 0, 1: 0, 2: 0}, 0), ({ARGMAX: 0}, 0), ({(ARGMAX + 1) % 3: 0}, 1)])
def test_under_a_grammar_the_host_reads_again_only_where_the_argmax_is_not_legal(
    edges: dict[int, int], more: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are legal, or the argmax alone, or another one alone, whose logit is looked at."""
    batch = batch_of(rows, temperature=0.0)
    for sequence in batch.sequences:
        sequence.matcher = AutomatonMatcher({0: edges}, set())
    reads = reads_of(SpeculativeDecoder(TableModel(), gamma=0), batch, monkeypatch)
    assert len(reads) == 1 + more * rows


def reads_of(decoder: SpeculativeDecoder, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host would wait for on a GPU, in a round."""
    reads: list[str] = []
    monkeypatch.setattr(sampling, "_is_on_host", lambda tensor: False)
    for name in READS:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, _name: str = name, _original: Any = original) -> Any:
            reads.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(Tensor, name, read)
    decoder.round(batch)
    return reads


def test_seconds_that_the_host_waits_for_a_pass_are_those_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for a device: a pass of 20 s is launched in no time, and waited for where tokens are read."""
    now, free_at, events = [100.0], [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            events.append(self)

        def record(self, stream: str) -> None:
            self.at = max(free_at[0], now[0])

        def synchronize(self) -> None:
            assert self is events[-1]
            assert now[0] >= self.at, "the round has read its tokens"

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    class Far(TableModel):
        device = "cuda:1"

        def next_logits(self, contexts: Any, last: Any) -> Tensor:
            free_at[0] = now[0] + 20
            return super().next_logits(contexts, last)

    def read(logits: Tensor) -> list[list[int]]:
        now[0] = max(free_at[0], now[0]) + 1
        return sampling.argmax_tokens(logits)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(acceptance, "argmax_tokens", read)
    seconds = SpeculativeDecoder(Far(), Repeats(), gamma=2).round(batch_of(1, temperature=0.0)).seconds
    assert seconds == {"draft_s": 0, "mask_s": 0, "verify_s": 20, "sample_s": 1, "detokenize_s": 0}


def test_masks_are_copied_beside_what_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            seen.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            seen.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            seen.append("off it")

    class There:
        def record_stream(self, stream: Stream) -> None:
            seen.append(f"used by {stream.name}")

    monkeypatch.setattr(device, "_copies", lambda at: Stream(f"copies of {at}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: Stream(f"passes of {at}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(device, "upload", lambda host, at: There())
    assert isinstance(upload_beside(torch.zeros(1), "cuda:1"), There)
    passes, copies = "passes of cuda:1", "copies of cuda:1"
    assert seen == [f"on {copies}", "off it", f"{passes} waits for {copies}", f"used by {passes}"]


def test_on_a_cpu_nothing_runs_beside_the_host() -> None:
    wait_for(CPU)
    host = torch.tensor([1])
    assert upload(host, CPU) is upload_beside(host, CPU) is device.pinned(host, "cpu") is host
    assert vector([1, 0], torch.zeros(1, dtype=torch.float64), torch.bool).tolist() == [True, False]
    assert vector([1, 0], torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
