"""The host beside a device: it waits once a round, and the seconds it waited go to what it waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumeration import AutomatonMatcher, TableModel
from torch import Tensor

from agentspec import sampling, speculative
from agentspec.batch import Batch
from agentspec.drafters import Draft, Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.model import ModelDrafter
from agentspec.grammars import GrammarCursor
from agentspec.runtime import device
from agentspec.runtime.device import Stopwatch, upload, upload_beside, vector, wait_for
from agentspec.sampling import SamplingParams
from agentspec.sequence import Sequence as TokenSequence
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import Laps

CPU = torch.device("cpu")
BEST = int(TableModel().logits([0, 1, 2]).argmax())
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__")


class Says(Drafter):
    """Drafts the same token again and again."""

    name = "says"

    def propose(self, batch: Batch, gamma: Sequence[int], cursor: GrammarCursor) -> Draft:
        return Draft.of_spans([[1] * n for n in gamma], batch.device)


def batch_of(rows: int, **settings: Any) -> Batch:
    params = SamplingParams(max_tokens=9, **settings)
    return Batch([TokenSequence([0, 1, 2], params, seed=seed) for seed in range(rows)])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("drafter", "settings", "expected"),
    [
        (Says(), {"temperature": 0.0}, 1),
        (Says(), {"temperature": 0.8, "top_k": 2, "min_p": 0.1}, 1),
        (Says(), {"temperature": 0.8, "top_p": 0.9}, 2),  # whether a sort is needed
        (ModelDrafter(TableModel(seed=5)), {"temperature": 0.8}, 4),
        (Cascade([Says(), ModelDrafter(TableModel(seed=5))]), {"temperature": 0.8}, 1),
    ],
    ids=["greedy", "top-k", "top-p", "a draft model of three tokens", "a cascade"],
)
def test_the_host_reads_once_a_round_and_once_for_each_token_that_a_draft_model_draws(
    drafter: Drafter, settings: dict[str, Any], expected: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(TableModel(), drafter, gamma=3)
    assert len(reads_of(decoder, batch_of(rows, **settings), monkeypatch)) == expected


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("edges", "more"), [({0: 0, 1: 0, 2: 0}, 0), ({BEST: 0}, 0), ({(BEST + 1) % 3: 0}, 1)])
def test_under_a_grammar_the_host_reads_again_only_where_the_best_token_is_not_legal(
    edges: dict[int, int], more: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens are legal, or the best one alone, or another one alone, whose score is looked at."""
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


def test_seconds_that_a_phase_waited_for_another_are_booked_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Stopwatch):
        """As if the device had been at the pass until a moment ago."""

        def runs_past(self, moment: float) -> float:
            assert 0 < moment <= time.perf_counter()
            return time.perf_counter() - moment

    decoder = SpeculativeDecoder(TableModel())
    plain = decoder.round(batch_of(1, temperature=0.0)).seconds
    monkeypatch.setattr(speculative, "Stopwatch", Late)
    late = decoder.round(batch_of(1, temperature=0.0)).seconds
    assert plain["sample_s"] > 0
    assert late["sample_s"] == pytest.approx(0, abs=1e-9)  # no more than was booked there is moved
    assert late["verify_s"] > 0


def test_no_more_seconds_are_moved_than_there_are() -> None:
    laps = Laps()
    laps.lap("a")
    total = laps.total_s
    laps.move(100.0, "a", to="b")
    assert laps.seconds["a"] == 0
    assert laps.total_s == total


def test_a_stopwatch_of_a_device_tells_how_long_it_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            self.recorded = stream == "of cuda:1"

        def elapsed_time(self, end: Event) -> float:
            assert self.recorded
            assert end.recorded
            return 250.0  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    with Stopwatch(torch.device("cuda:1")) as watch:
        began = time.perf_counter()
    assert watch.runs_past(began + 0.05) == pytest.approx(0.2, abs=0.01)
    assert watch.runs_past(began + 1) == 0.0


def test_masks_are_copied_beside_what_a_device_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = str(name)

        def wait_stream(self, other: Stream) -> None:
            told.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            told.append(f"on {self.name}")

        def __exit__(self, *_: object) -> None:
            told.append("off it")

    class There:
        def record_stream(self, stream: Stream) -> None:
            told.append(f"used by {stream.name}")

    monkeypatch.setattr(device, "_copies", lambda at: Stream(f"copies of {at}"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda at: Stream(f"passes of {at}"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(device, "upload", lambda host, at: There())
    assert isinstance(upload_beside(torch.zeros(1), "cuda:1"), There)
    passes, copies = "passes of cuda:1", "copies of cuda:1"
    assert told == [f"on {copies}", "off it", f"{passes} waits for {copies}", f"used by {passes}"]


def test_on_a_cpu_nothing_runs_beside_the_host() -> None:
    with Stopwatch(CPU) as watch:
        pass
    assert watch.runs_past(0.0) == 0.0
    wait_for(CPU)
    host = torch.tensor([1])
    assert upload(host, CPU) is upload_beside(host, CPU) is device.pinned(host, "cpu") is host
    assert vector([1, 0], torch.zeros(1, dtype=torch.float64), torch.bool).tolist() == [True, False]
    assert vector([1, 0], torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
