"""Captured passes compute what launched ones do: in any order of shapes, after K and V moved, where capture fails."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tape import TapeRecorder
from test_causal_lm import ask, cursor, uncached
from tiny import ARCHITECTURES, MAX_CONTEXT, VOCABULARY, llama
from torch import Tensor

from agentspec import (
    Cascade,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.models.causal_lm import CausalLM
from agentspec.models.graphs import CudaRecorder, Graphs, recorder_for, round_live, round_width
from agentspec.rng import Acceptance

CPU = torch.device("cpu")


def captured(model: CausalLM, most: int = 64) -> TapeRecorder:
    """Let ``model`` capture its passes on a tape."""
    recorder = TapeRecorder()
    model._forward.capture_with(recorder)
    model._forward.graphs._most = most
    return recorder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_scores_equal_uncached_ones_on_a_random_walk(name: str) -> None:
    lm = CausalLM(ARCHITECTURES[name](), rows=3, prefill_chunk=16)
    recorder = captured(lm)
    cursor(lm, ARCHITECTURES[name](), seed=1, steps=40)
    assert recorder.recorded == len(lm._forward.graphs) > 3
    assert lm._forward.graphs.replays > 5


def test_a_walk_in_which_graphs_give_way_stays_correct() -> None:
    lm = CausalLM(llama(), rows=3)
    recorder = captured(lm, most=4)
    cursor(lm, llama(), seed=2, steps=60)
    kept = len(lm._forward.graphs)
    assert kept <= 4 < recorder.recorded


def test_a_block_is_captured_the_second_time_and_replayed_from_then_on() -> None:
    lm = CausalLM(llama(), rows=2)
    recorder = captured(lm)
    context = [1, 2, 3]
    recorded, replayed = [], []
    for token in range(4, 8):
        context.append(token)
        ask(lm, llama(), [list(context)], [1])
        recorded.append(recorder.recorded)
        replayed.append(lm._forward.graphs.replays)
    assert recorded == [0, 0, 1, 1]  # the first block was of four tokens, those behind it of one
    assert replayed == [0, 0, 0, 1]


def test_scores_that_were_handed_out_do_not_change_with_the_next_pass() -> None:
    lm = CausalLM(llama(), rows=2)
    captured(lm)
    context, kept = [1, 2, 3, 4], []
    for token in range(5, 10):
        context.append(token)
        kept.append(lm.next_logits([list(context)], [1]).values[0])
    for end, logits in enumerate(kept, 5):
        torch.testing.assert_close(logits, uncached(llama(), context[:end])[-1:], rtol=1e-4, atol=1e-5)


def test_graphs_are_dropped_when_keys_and_values_move() -> None:
    lm = CausalLM(llama(), rows=2)
    recorder = captured(lm)
    context = [1, 2, 3]
    for token in range(4, 8):
        context.append(token)
        lm.next_logits([list(context)], [1])
    assert len(lm._forward.graphs) == 1
    assert recorder.forgotten == 0
    layout = lm.kv.layout
    long = [random.Random(0).randrange(VOCABULARY) for _ in range(MAX_CONTEXT - 40)]
    lm.kv.clear()
    ask(lm, llama(), [long], [1])
    assert lm.kv.layout != layout
    ask(lm, llama(), [[*context, 9]], [1])
    assert len(lm._forward.graphs) == 0
    assert recorder.forgotten == 1


def test_graphs_are_captured_anew_in_another_thread() -> None:
    graphs, table = Graphs(recorder := TapeRecorder()), torch.tensor([[1, 2]])

    def run_thrice() -> None:
        for _ in range(3):
            assert graphs.run(lambda numbers: numbers * 2.0, table, CPU, "a", 0).tolist() == [[2, 4]]

    run_thrice()
    assert (recorder.recorded, recorder.forgotten, graphs.replays) == (1, 0, 1)
    thread = threading.Thread(target=run_thrice)
    thread.start()
    thread.join()
    assert (recorder.recorded, recorder.forgotten, graphs.replays) == (2, 1, 2)


def test_graphs_go_all_together_where_there_are_too_many() -> None:
    graphs, table = Graphs(recorder := TapeRecorder(), most=2), torch.tensor([[1, 2]])
    for shape in "aaabbbccc":
        assert graphs.run(lambda numbers: numbers * 2.0, table, CPU, shape, 0).tolist() == [[2, 4]]
    assert (recorder.recorded, recorder.forgotten, len(graphs)) == (3, 1, 1)


class Failing:
    """Fails to record, the first ``times`` times."""

    def __init__(self, times: int = 99) -> None:
        self.times = times
        self.tries = 0
        self.tape = TapeRecorder()

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        self.tries += 1
        if self.tries <= self.times:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.tape(function)

    def forget(self) -> None:
        self.tape.forget()


@pytest.mark.filterwarnings("error")
def test_a_capture_that_fails_once_is_tried_again() -> None:
    lm = CausalLM(llama(), rows=3)
    lm._forward.capture_with(Failing(times=1))
    cursor(lm, llama(), seed=1, steps=30)
    assert lm.captures
    assert lm.replayed_passes > 0


@pytest.mark.filterwarnings("error")
def test_a_graph_that_computes_something_else_is_not_used() -> None:
    class Wrong(TapeRecorder):
        def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
            replay, result = super().__call__(function)
            return lambda: (replay(), result.mul_(1.01)), result

    lm = CausalLM(llama(), rows=3)
    lm._forward.capture_with(Wrong())
    with pytest.warns(RuntimeWarning, match="the captured pass computes something else") as warned:
        cursor(lm, llama(), seed=1, steps=30)
    assert len(warned) == 1
    assert lm.replayed_passes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_capture_leaves_the_thread_on_its_stream_and_begins_a_pool_for_every_generation(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch.cuda that writes down what it is asked for."""
    log: list[Any] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            log.append(("wait", self, other))

        def synchronize(self) -> None:
            log.append(("synchronize", self))

    usual = Stream()
    current = [usual]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    @contextmanager
    def graph(graph: object, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        log.append(("capture", pool, stream, capture_error_mode))
        current.append(stream)
        yield
        if fails:
            raise RuntimeError("capture failed")  # torch then leaves the stream where it is
        current.pop()

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        log.append(("device", chosen.index))
        yield

    fake = {
        "Stream": Stream,
        "stream": on,
        "graph": graph,
        "device": device,
        "current_stream": lambda device=None: current[-1],
        "set_stream": lambda stream: current.append(stream),
        "graph_pool_handle": object,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
    }
    for name, value in fake.items():
        monkeypatch.setattr(torch.cuda, name, value)
    recorder, ran = CudaRecorder(torch.device("cuda:1")), []

    def compute() -> Tensor:
        ran.append(current[-1])
        return torch.zeros(1)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="capture failed") if fails else nullcontext():
            recorder(compute)
        assert current[-1] is usual
    recorder.forget()
    assert ("synchronize", usual) in log
    with suppress(RuntimeError):
        recorder(compute)
    captures = [entry for entry in log if entry[0] == "capture"]
    assert [entry[1] for entry in log if entry[0] == "device"] == [1, 1, 1]
    assert {entry[3] for entry in captures} == {"thread_local"}
    assert captures[0][1] is captures[1][1] is not captures[2][1]  # pools
    assert set(ran) == {captures[0][2]}  # warmed up and captured on one stream, and never on the usual one
    assert usual not in ran


@pytest.mark.filterwarnings("error")
def test_a_capture_that_fails_warns_once_and_changes_nothing() -> None:
    lm, failing = CausalLM(llama(), rows=3), Failing()
    lm._forward.capture_with(failing)
    with pytest.warns(RuntimeWarning, match="not permitted when stream is capturing") as warned:
        cursor(lm, llama(), seed=1, steps=30)
    assert len(warned) == 1
    assert failing.tries == 2
    assert not lm._forward.graphs.is_on


def test_what_reads_a_number_from_the_device_cannot_be_captured_and_is_launched() -> None:
    graphs = Graphs(TapeRecorder())
    table = torch.tensor([[1, 2]])

    def compute(numbers: Tensor) -> Tensor:
        return numbers * int(numbers.max())

    for _ in range(2):
        assert graphs.run(compute, table, CPU, "a", 0).tolist() == [[2, 4]]
    with pytest.warns(RuntimeWarning, match="was read from the device"):
        assert graphs.run(compute, table, CPU, "a", 0).tolist() == [[2, 4]]
    assert graphs.run(compute, table + 1, CPU, "a", 0).tolist() == [[6, 9]]


def test_cuda_graphs_is_auto_true_or_false() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            recorder_for("auto", CPU) is recorder_for(False, CPU) is recorder_for(False, torch.device("cuda")) is None
        )
    assert recorder_for("auto", torch.device("cuda")) is not None
    with pytest.warns(RuntimeWarning, match="on this cpu there is none to capture"):
        assert recorder_for(True, CPU) is None
    with pytest.raises(ValueError, match="cuda_graphs must be one of 'auto', True, False, got 'yes'"):
        CausalLM(llama(), cuda_graphs="yes")  # type: ignore[arg-type]


def test_cuda_graphs_true_on_a_cpu_warns_and_computes_the_same() -> None:
    with pytest.warns(RuntimeWarning, match="results are the same"):
        lm = CausalLM(llama(), cuda_graphs=True)
    ask(lm, llama(), [[1, 2, 3]], [2])


def test_shapes_are_rounded_up_to_a_few() -> None:
    assert [round_width(w) for w in (1, 2, 3, 5, 9, 17, 32)] == [1, 2, 4, 8, 16, 32, 32]
    assert [round_live(n, 10**6) for n in (1, 256, 257, 385, 513, 769, 1025)] == [256, 256, 384, 512, 768, 1024, 1536]
    assert round_live(700, 720) == 720
    for live in range(1, 3000, 7):
        assert live <= round_live(live, 10**6) <= max(256, 1.5 * live)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_texts_of_captured_models_are_those_of_launched_ones(acceptance: Acceptance) -> None:
    """Several rows that join and leave, a draft model, look-up and a grammar: every shape of block comes by."""
    prompts = [[1, 2, 3, 1, 2], [4, 5, 6, 7], [9, 8, 9, 8, 9]]
    requests = [
        Request(prompt, SamplingParams(temperature=0.8, seed=7, max_tokens=24 + 9 * row), gamma=gamma)
        for row, prompt in enumerate(prompts)
        for gamma in (1, 4)
    ]
    found = []
    for capture in (False, True):
        target, draft = CausalLM(llama(seed=1), rows=8), CausalLM(llama(seed=2), rows=8)
        recorders = [captured(model) for model in (target, draft)] if capture else []
        cascade = Cascade([PromptLookupDrafter(), ModelDrafter(draft)])
        engine = LocalEngine(SpeculativeDecoder(target, cascade, acceptance=acceptance))
        try:
            found.append([completion.tokens for [completion] in engine.generate(requests)])
        finally:
            engine.close()
        assert all(recorder.recorded > 2 for recorder in recorders)
        assert not capture or target.replayed_passes + draft.replayed_passes > 40
    assert found[0] == found[1]
