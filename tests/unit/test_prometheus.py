"""What an engine counts is what a known set of requests did, and Prometheus can read it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enumeration import TableModel
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from agentspec import (
    EngineClosedError,
    InvalidRequestError,
    LocalEngine,
    PromptLookupDrafter,
    Request,
    RequestTimeoutError,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.engine.metrics import OUTCOMES, EngineMetrics, Meter
from agentspec.engine.prometheus import EngineCollector, render
from agentspec.stats import RoundStats, RowStats

pytestmark = pytest.mark.usefixtures("one_thread")

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """The samples of an exposition in format 0.0.4; refuses whatever the format does not allow."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if head := re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line):
            sort, name, rest = head.groups()
            if sort == "HELP":
                assert name not in helped
                assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)+", rest)
                helped.add(name)
            else:
                assert rest in ("counter", "gauge", "histogram", "summary", "untyped")
                assert name not in kinds
                kinds[name] = rest
            continue
        sample = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", line)
        assert sample, line
        name, braced, value = sample.groups()
        assert name in kinds, "the type comes first"
        assert name in helped
        assert name.endswith("_total") == (kinds[name] == "counter")
        labels = re.findall(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"', braced or "")
        assert ",".join(f'{key}="{told}"' for key, told in labels) == (braced or "")
        plain = tuple((key, re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), told)) for key, told in labels)
        plain = tuple(sorted(plain))
        assert (name, plain) not in samples
        samples[name, plain] = float(value)
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"agentspec_{name}", tuple(sorted(labels.items()))]


class Slow(TableModel):
    """A table model whose passes may be made to wait, or to fail."""

    max_context, max_rows = 10_000, 2
    before: Callable[[], None] = staticmethod(lambda: None)

    def cached_tokens(self, context: list[int]) -> int:
        return min(2, len(context))

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        if any(last):
            self.before()
        return super().next_logits(contexts, last)


@pytest.fixture
def model() -> Slow:
    return Slow(5, 1)


@pytest.fixture
def engine(model: Slow) -> Iterator[LocalEngine]:
    engine = LocalEngine(SpeculativeDecoder(model, PromptLookupDrafter(), gamma=2), end_tokens=())
    yield engine
    engine.close()


def request(tokens: int = 12, **settings: Any) -> Request:
    return Request([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_tokens=tokens, seed=3), **settings)


def eventually(engine: LocalEngine, holds: Callable[[EngineMetrics], bool]) -> EngineMetrics:
    """The worker counts a cancelled request at its next round."""
    for _ in range(2000):
        if holds(engine.metrics()):
            return engine.metrics()
        time.sleep(0.005)
    raise AssertionError(f"never came: {engine.metrics()}")


def test_a_known_set_of_requests_is_counted_exactly(engine: LocalEngine) -> None:
    done = [sample for samples in engine.generate([request(), request(7, n=2)]) for sample in samples]
    told = engine.metrics()
    assert told.requests == {**dict.fromkeys(OUTCOMES, 0), "completed": 2}
    assert told.samples == {"length": 3}
    assert told.prompt_tokens == sum(sample.stats.prompt_tokens for sample in done) == 24
    assert told.cached_tokens == sum(sample.stats.cached_tokens for sample in done) == 6
    assert told.generated_tokens == sum(len(sample.tokens) for sample in done) == 26
    drafted = sum(sample.stats.drafted_tokens for sample in done)
    assert sum(told.drafted.values()) == drafted > 0
    assert sum(told.accepted.values()) == sum(sample.stats.accepted_tokens for sample in done)
    assert told.rows == sum(sample.stats.rounds for sample in done)
    assert told.rows / 2 <= told.rounds < told.rows  # two places, sometimes both taken
    assert {"queue_s", "prefill_s", "draft_s", "verify_s", "sample_s"} <= told.seconds.keys()
    assert told.seconds["queue_s"] == pytest.approx(sum(sample.stats.seconds["queue_s"] for sample in done))
    assert told.seconds["prefill_s"] == pytest.approx(sum(sample.stats.seconds["prefill_s"] for sample in done))
    assert told.seconds["verify_s"] <= sum(sample.stats.seconds["verify_s"] for sample in done)
    assert told.max_running == 2


def test_counters_only_grow(engine: LocalEngine) -> None:
    engine.generate([request()])
    first = engine.metrics()
    engine.generate([request()])
    second = engine.metrics()
    assert second.requests["completed"] == 2
    assert second.generated_tokens == 2 * first.generated_tokens
    assert second.seconds["verify_s"] > first.seconds["verify_s"]


def test_a_request_that_fails_is_counted_before_its_caller_hears_of_it(engine: LocalEngine, model: Slow) -> None:
    def fail() -> None:
        raise RuntimeError("no power")

    model.before = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no power"):
        engine.generate([request(n=2)])
    assert engine.metrics().requests == {**dict.fromkeys(OUTCOMES, 0), "failed": 1}


def test_a_request_whose_time_is_up_is_counted(engine: LocalEngine, model: Slow) -> None:
    model.before = lambda: time.sleep(0.02)  # type: ignore[method-assign]
    with pytest.raises(RequestTimeoutError):
        engine.generate([request(400, timeout_s=0.05)])
    told = engine.metrics()
    assert told.requests["timeout"] == 1
    assert 0 < told.generated_tokens < 400  # what was emitted counts, whatever became of it


def test_a_cancelled_request_is_counted_once(engine: LocalEngine, model: Slow) -> None:
    model.before = lambda: time.sleep(0.005)  # type: ignore[method-assign]
    deltas = engine.stream(request(400, n=3))  # for two places
    next(deltas)
    deltas.close()
    told = eventually(engine, lambda metrics: metrics.requests["cancelled"] > 0)
    engine.generate([request()])
    told = engine.metrics()
    assert told.requests == {**dict.fromkeys(OUTCOMES, 0), "cancelled": 1, "completed": 1}
    eventually(engine, lambda metrics: metrics.running == metrics.waiting == 0)


def test_running_and_waiting_sequences_are_counted(engine: LocalEngine, model: Slow) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert go_on.wait(30)

    model.before = wait  # type: ignore[method-assign]
    asking = threading.Thread(target=lambda: engine.generate([request(4, n=5)]))
    asking.start()
    assert entered.wait(30)
    told = engine.metrics()
    go_on.set()
    asking.join()
    assert (told.running, told.waiting) == (2, 3)
    eventually(engine, lambda metrics: metrics.running == metrics.waiting == 0)


def test_requests_that_end_with_their_engine_are_counted(model: Slow) -> None:
    engine = LocalEngine(SpeculativeDecoder(model), end_tokens=())
    entered, errors = threading.Event(), []

    def wait() -> None:
        entered.set()
        time.sleep(0.01)

    def ask() -> None:
        try:
            engine.generate([request(4000)])
        except EngineClosedError as error:
            errors.append(error)

    model.before = wait  # type: ignore[method-assign]
    asking = threading.Thread(target=ask)
    asking.start()
    assert entered.wait(30)
    engine.close()
    asking.join()
    assert len(errors) == 1
    assert engine.metrics().requests["closed"] == 1


def test_prometheus_reads_what_the_engine_counted(engine: LocalEngine) -> None:
    engine.generate([request(), request(7, n=2)])
    told = engine.metrics()
    samples = parse(render(told))
    assert value(samples, "requests_total", outcome="completed") == 2
    assert value(samples, "requests_total", outcome="failed") == 0
    assert value(samples, "samples_total", finish_reason="length") == 3
    assert value(samples, "prompt_tokens_total") == 24
    assert value(samples, "cached_tokens_total") == 6
    assert value(samples, "generated_tokens_total") == 26
    [drafter] = told.drafted
    assert value(samples, "drafted_tokens_total", drafter=drafter) == told.drafted[drafter]
    assert value(samples, "accepted_tokens_total", drafter=drafter) == told.accepted[drafter]
    assert value(samples, "rounds_total") == told.rounds
    assert value(samples, "round_rows_total") == told.rows
    for phase, seconds in told.seconds.items():
        if phase != "queue_s":
            assert value(samples, "phase_seconds_total", phase=phase.removesuffix("_s")) == seconds
    assert value(samples, "queue_seconds_total") == told.seconds["queue_s"]
    assert value(samples, "running_rows") == value(samples, "waiting_rows") == 0
    assert value(samples, "max_running_rows") == 2


def test_forced_tokens_are_counted_apart() -> None:
    meter = Meter()
    row = RowStats({"forced": 3, "lookup": 2}, {"forced": 3, "lookup": 1}, 5, 4)
    meter.add_round(RoundStats((row, row), {"verify_s": 0.5}, 6))
    samples = parse(render(meter.read()))
    assert value(samples, "forced_tokens_total") == 6
    assert value(samples, "accepted_tokens_total", drafter="lookup") == 2
    assert value(samples, "generated_tokens_total") == 10
    assert value(samples, "phase_seconds_total", phase="verify") == 0.5


def test_labels_are_escaped() -> None:
    meter = Meter()
    evil = 'a"b\\c\nd} 7'
    meter.add_round(RoundStats((RowStats({evil: 1}, {evil: 1}, 2),), {}))
    samples = parse(render(meter.read(), {"model": 'Qwen/\\\n"'}))
    assert value(samples, "drafted_tokens_total", model='Qwen/\\\n"', drafter=evil) == 1
    assert value(samples, "rounds_total", model='Qwen/\\\n"') == 1


@pytest.mark.parametrize("name", ["outcome", "drafter", "__x", "1x", "a-b", ""])
def test_labels_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="A label is"):
        render(Meter().read(), {name: "x"})


def test_nothing_yet_is_zero_and_not_missing() -> None:
    samples = parse(render(Meter().read()))
    assert value(samples, "rounds_total") == 0
    assert {labels[0][1] for (name, labels) in samples if name == "agentspec_requests_total"} == set(OUTCOMES)


BEFORE = """\
agentspec_requests_total{model="m",outcome="completed"} 2
agentspec_requests_total{model="m",outcome="failed"} 0
agentspec_samples_total{model="m",finish_reason="length"} 3
agentspec_prompt_tokens_total{model="m"} 24
agentspec_cached_tokens_total{model="m"} 6
agentspec_generated_tokens_total{model="m"} 12345678
agentspec_forced_tokens_total{model="m"} 4
agentspec_drafted_tokens_total{model="m",drafter="forced"} 4
agentspec_drafted_tokens_total{model="m",drafter="suffix"} 9
agentspec_accepted_tokens_total{model="m",drafter="forced"} 4
agentspec_accepted_tokens_total{model="m",drafter="suffix"} 7
agentspec_rounds_total{model="m"} 11
agentspec_round_rows_total{model="m"} 13
agentspec_phase_seconds_total{model="m",phase="draft"} 0.25
agentspec_phase_seconds_total{model="m",phase="verify"} 1.000000123
agentspec_queue_seconds_total{model="m"} 0.5
agentspec_running_rows{model="m"} 1
agentspec_waiting_rows{model="m"} 2
agentspec_max_running_rows{model="m"} 8
agentspec_threads{model="m"} 2
"""
"""What 0.1 wrote, before prometheus_client did."""


def test_names_labels_and_values_are_those_of_the_first_release() -> None:
    metrics = EngineMetrics(
        {"completed": 2, "failed": 0},
        {"length": 3},
        prompt_tokens=24,
        cached_tokens=6,
        generated_tokens=12_345_678,
        drafted={"forced": 4, "suffix": 9},
        accepted={"forced": 4, "suffix": 7},
        seconds={"verify_s": 1.000000123, "queue_s": 0.5, "draft_s": 0.25},
        rounds=11,
        rows=13,
        running=1,
        waiting=2,
        max_running=8,
        threads=2,
    )
    text = render(metrics, {"model": "m"})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    heads = sorted({f"# TYPE {line.split('{')[0]} " for line in BEFORE.splitlines()})
    assert sorted(line.rsplit(" ", 1)[0] + " " for line in text.splitlines() if line.startswith("# TYPE")) == heads

    def samples(lines: list[str]) -> Samples:
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    assert samples(lines) == samples(BEFORE.splitlines())


def test_a_registry_reads_the_engine_at_every_scrape(engine: LocalEngine) -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine.metrics))
    assert value(parse(generate_latest(registry).decode()), "generated_tokens_total") == 0
    engine.generate([request()])
    assert value(parse(generate_latest(registry).decode()), "generated_tokens_total") == 12


def test_a_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import agentspec.engine.prometheus"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "pip install 'langchain-agentspec[prometheus]'" in found.stderr
