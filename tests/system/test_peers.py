"""The benchmark against other systems runs at toy size, its statistics are right, and no system can end it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from enumeration import TableModel

from agentspec import (
    Cascade,
    CausalLM,
    Grammar,
    LocalEngine,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.grammars import compiler
from agentspec.stats import RowStats, StepStats

BENCHMARK = Path(__file__).resolve().parents[2] / "examples" / "benchmark"
ECHO = """
import sys
sys.path.insert(0, {folder!r})
from protocol import serve

class Echo:
    about = "echo 1"
    def forget(self): print("noise on stdout")
    def answer(self, request):
        if request["max_tokens"] == 13:
            raise ValueError("unlucky")
        if request["max_tokens"] == 14:
            sys.exit("gone for good")
        return {{"samples": [request["prompt"]] * request["n"], "seconds": 0.5, "prompt_s": None}}

serve(Echo)
"""


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], Any]]:
    """Modules of the benchmark's folder."""
    sys.path.insert(0, str(BENCHMARK))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARK))


@pytest.fixture
def work(load: Callable[[str], Any]) -> Any:
    return load("comparison.work")


def workload(work: Any, rows: int = 1, **params: Any) -> Any:
    """Rows of one request each."""
    request = Request([1, 2, 3], SamplingParams(**{"temperature": 0, "max_tokens": 4, **params}))
    return work.Workload("w", "a workload", tuple(work.Row(f"row {i}", (work.Item(request),)) for i in range(rows)))


class Fake:
    """A system that takes the seconds it is given, and says 7, 8, 9."""

    def __init__(self, answer: Any, seconds: float = 1.0, prompt_s: float | None = 0.25) -> None:
        self._make, self._seconds, self._prompt_s = answer, seconds, prompt_s
        self.same_weights, self.calls, self.log = True, 0, []
        self.ids = (7, 8, 9)

    def refusal(self, workload: Any) -> str | None:
        return None

    def begin(self) -> None:
        self.log.append("begin")

    def end(self) -> None:
        self.log.append("end")

    def answer(self, item: Any, seed: int) -> Any:
        self.calls += 1
        self.log.append(seed)
        return self._make((self.ids,), self._seconds, self._prompt_s)

    def close(self) -> None:
        self.log.append("close")


def test_ratios_are_of_pairs(load: Callable[[str], Any]) -> None:
    ratios = load("comparison.ratios")
    slow, fast = [[2.0, 40.0, 6.0], [9.0, 9.0, 9.0]], [[1.0, 10.0, 2.0], [3.0, 1.0, 1.0]]
    found = ratios.paired(slow, fast)
    assert found.median == statistics.median([2, 4, 3, 3, 9, 9]) == 3.5
    assert found.total == (6 + 9) / (2 + 1)
    assert found.low <= found.median <= found.high
    assert found == ratios.paired(slow, fast)


def test_an_interval_holds_what_it_should(load: Callable[[str], Any]) -> None:
    """Of a single row it spans the repeats; of many rows it narrows; of equal ratios it is a point."""
    ratios = load("comparison.ratios")
    assert ratios.interval([[1.0, 2.0, 3.0]]) == (1.0, 3.0)
    assert ratios.interval([[2.0, 2.0], [2.0, 2.0]]) == (2.0, 2.0)
    low, high = ratios.interval([[float(i % 10), float(i % 10)] for i in range(100)])
    assert 2 <= low <= 4.5 <= high <= 7
    rows = [[1.0] * 9, [5.0]]  # rows are drawn whole: the long one does not outvote every draw
    assert ratios.interval(rows) == (1.0, 5.0)


@pytest.mark.parametrize(
    ("slow", "fast"), [([], []), ([[1.0]], [[1.0, 2.0]]), ([[1.0]], []), ([[]], [[]]), ([[1.0]], [[0.0]])]
)
def test_ratios_of_what_is_not_paired_are_refused(load: Callable[[str], Any], slow: Any, fast: Any) -> None:
    with pytest.raises(ValueError, match="Expected"):
        load("comparison.ratios").paired(slow, fast)


def test_rows_are_taken_of_every_kind(work: Any) -> None:
    rows = [{"k": kind, "i": i} for i, kind in enumerate("aaabbc")]
    assert [row["i"] for row in work.round_robin(rows, "k", 5)] == [0, 3, 5, 1, 4]


def test_requests_of_a_chat_model_are_recorded(work: Any) -> None:
    answers = TableModel(seed=1)
    engine = LocalEngine(SpeculativeDecoder(answers))
    request = Request([1], SamplingParams(temperature=0, max_tokens=3), timeout_s=9.0)
    with work.recorded(engine) as requests:
        deltas = list(engine.stream(request, 1e9))
    assert requests == [dataclasses.replace(request, timeout_s=None)]
    assert len(deltas) == 2
    assert engine.stream.__name__ == "stream"
    engine.close()


def test_systems_take_turns_and_forget_between_rows(load: Callable[[str], Any], work: Any) -> None:
    answer = load("comparison.systems").Answer
    fakes = {"a": Fake(answer), "b": Fake(answer, 2.0)}
    played = load("comparison.timing").play(workload(work, rows=2), fakes, repeats=3)
    assert played["b"].seconds == [[2.0] * 3] * 2
    assert played["b"].decode_s == [[1.75] * 3] * 2
    assert played["a"].tokens == [[3] * 3] * 2
    turns = [("begin", seed, "end") for seed in (1000, 1000, 2000, 2000, 3000, 3000)]
    assert fakes["a"].log == [entry for turn in turns for entry in turn]


def test_a_system_that_fails_is_reported_and_ends_nothing(load: Callable[[str], Any], work: Any) -> None:
    peers, answer = load("peers"), load("comparison.systems").Answer

    class Failing(Fake):
        def answer(self, item: Any, seed: int) -> Any:
            if self.calls == 3:
                raise RuntimeError("out of luck")
            return super().answer(item, seed)

    fakes = {"agentspec": Fake(answer), "failing": Failing(answer), "slow": Fake(answer, 3.0, None)}
    played = load("comparison.timing").play(workload(work, rows=2), fakes, repeats=2)
    told = peers.measured(played["failing"])
    assert told == {"status": "failed", "reason": "RuntimeError: out of luck"}
    assert fakes["failing"].log[-2:] == ["begin", "end"]
    assert peers.measured(played["slow"])["median_s"] == 6.0
    found = peers.ratios(played)
    assert list(found) == ["slow"]
    assert found["slow"]["end_to_end"] == {"median": 3.0, "low": 3.0, "high": 3.0, "total": 3.0}
    assert found["slow"]["without_prompts"] is None


def test_texts_that_differ_are_told_with_their_place(load: Callable[[str], Any], work: Any) -> None:
    """Where texts should be equal; of others only how many differ. Texts without ids are compared as texts."""
    peers, answer = load("peers"), load("comparison.systems").Answer
    fakes = {name: Fake(answer) for name in ("text", "standard", "short", "other", "free")}
    fakes["text"] = Fake(lambda *told: answer(*told, is_exact=False))
    fakes["text"].ids = (7, 80, 9)
    fakes["short"].ids = (7, 8)
    fakes["other"].ids = fakes["free"].ids = (7, 5, 9)
    fakes["free"].same_weights = False
    asked = workload(work)
    played = load("comparison.timing").play(asked, fakes, repeats=2)

    class Tokenizer:
        """Encodes the text of id 8 as 80."""

        def decode(self, ids: Any, skip_special_tokens: bool) -> Any:
            return list(ids)

        def encode(self, text: Any, add_special_tokens: bool) -> Any:
            return [80 if token == 8 else token for token in text]

    def model(ids: Any, logits_to_keep: int) -> Any:
        assert ids.tolist() == [[1, 2, 3, 7]]
        return SimpleNamespace(logits=torch.arange(10.0)[None, None])

    told = peers.equality(asked, played, fakes, Tokenizer(), model)
    assert told["reference"] == "standard"
    differing = {name: count["differing"] for name, count in told["systems"].items()}
    assert differing == {"text": 0, "short": 1, "other": 1, "free": 1}
    place = {"row": "row 0", "item": 0}
    assert told["differences"] == [
        {"system": "short", **place, "position": 2, "gap": None},
        {"system": "other", **place, "position": 1, "gap": 3.0},
    ]


def test_end_tokens_are_not_counted(load: Callable[[str], Any]) -> None:
    up_to = load("comparison.systems")._up_to
    assert up_to([5, 6, 0, 0, 7], end=0) == (5, 6)
    assert up_to([5, 6], end=0) == (5, 6)


def step(rounds: int, drafted: int, accepted: int, rejected: int, verify_s: float, draft_s: float) -> StepStats:
    """A step of equal rounds, whose other seconds are 1."""
    stats = StepStats(prompt_tokens=10, cached_tokens=4)
    for _ in range(rounds):
        kept = RowStats({"lookup": drafted}, {"lookup": accepted}, accepted + 1)
        stats.add_round(kept, {"verify_s": verify_s, "draft_s": draft_s}, 1 + drafted)
    stats.rejections = rejected
    stats.seconds["prefill_s"] = 5.0
    stats.total_s = sum(stats.seconds.values()) + 1
    return stats


def test_theory_is_compared_with_what_was_measured(load: Callable[[str], Any]) -> None:
    checks = load("comparison.checks")
    off, on = [step(20, 0, 0, 0, 1.0, 0.0)], [step(5, 4, 3, 5, 2.0, 0.4)]
    found = checks.theory(on, off, lambda rows, width: {1: 1.0, 5: 1.6}[width])
    alpha = 15 / 20
    expected = (1 - alpha**5) / (1 - alpha)
    assert found["alpha"] == alpha
    assert found["c"] == pytest.approx(0.1)
    assert found["v"] == pytest.approx(2.0)
    assert found["measured"] == pytest.approx((21 / 20) / (13 / 20))
    assert found["paper"] == pytest.approx(expected / 1.4)
    assert found["paper_at_v"] == pytest.approx(expected / 2.4)
    assert found["by_cost"] == pytest.approx(4 / 1.6)
    assert found["measured_over_by_cost"] == pytest.approx(found["measured"] / found["by_cost"])
    assert checks.theory([], off, None) is None


def test_overhead_and_reuse_are_shares(load: Callable[[str], Any]) -> None:
    checks = load("comparison.checks")
    shares = checks.overhead([step(5, 4, 3, 5, 2.0, 0.4)])
    assert shares["outside_target"] == pytest.approx(3 / 13)
    assert shares["other"] == pytest.approx(1 / 13)
    assert sum(share for name, share in shares.items() if name != "outside_target") == pytest.approx(1)
    assert checks.prefix_reuse([step(1, 0, 0, 0, 1.0, 0.0)])["computed_share"] == 0.6


def test_workers_answer_fail_and_leave(load: Callable[[str], Any], work: Any, tmp_path: Path) -> None:
    workers = load("comparison.workers")
    script, log = tmp_path / "echo.py", tmp_path / "log"
    script.write_text(ECHO.format(folder=str(BENCHMARK / "workers")))
    worker = workers.Worker([sys.executable, str(script)], workers.Abilities(), log)
    item = workload(work).rows[0].items[0]
    try:
        assert worker.about == "echo 1"
        worker.begin()
        assert worker.answer(item, 1).samples == ((1, 2, 3),)
        with pytest.raises(workers.PeerError, match="ValueError: unlucky"):
            worker.answer(workload(work, max_tokens=13).rows[0].items[0], 1)
        assert worker.answer(item, 1).seconds == 0.5
        with pytest.raises(workers.PeerError, match="gone for good"):
            worker.answer(workload(work, max_tokens=14).rows[0].items[0], 1)
    finally:
        worker.close()
    assert "noise on stdout" in log.read_text()


def test_a_worker_that_does_not_load_says_why(load: Callable[[str], Any], tmp_path: Path) -> None:
    workers = load("comparison.workers")
    script = tmp_path / "broken.py"
    script.write_text("import a_module_that_nobody_has")
    with pytest.raises(workers.PeerError, match="a_module_that_nobody_has"):
        workers.Worker([sys.executable, str(script)], workers.Abilities(), tmp_path / "log")
    script.write_text(ECHO.format(folder=str(BENCHMARK / "workers")).replace("serve(Echo)", "serve(lambda: 1 / 0)"))
    with pytest.raises(workers.PeerError, match=r"^ZeroDivisionError"):
        workers.Worker([sys.executable, str(script)], workers.Abilities(), tmp_path / "log")
    with pytest.raises(workers.PeerError, match="cannot be run"):
        workers.Worker([str(tmp_path / "no python")], workers.Abilities(), tmp_path / "log")


def test_peers_without_masks_or_tools_take_no_part(load: Callable[[str], Any], work: Any, tmp_path: Path) -> None:
    workers = load("comparison.workers")
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(folder=str(BENCHMARK / "workers")))
    worker = workers.Worker([sys.executable, str(script)], workers.Abilities(chats=True), tmp_path / "log")
    worker.close()
    request = Request([1], grammar=Grammar.regex("a"))
    constrained = work.Workload("c", "c", (work.Row("r", (work.Item(request, ({"role": "user"},)),)),))
    assert "grammar" in worker.refusal(constrained)
    assert "tools" in worker.refusal(workload(work))


def test_a_follower_takes_back_what_was_only_tried(
    load: Callable[[str], Any], embedded_model: tuple[CausalLM, Any]
) -> None:
    target, tokenizer = embedded_model
    matcher = compiler(tokenizer, target.vocab_size).matcher(Grammar.regex("ab*c"))
    follower = load("generate_peer").Follower(matcher, 2)
    a, b, c, d = (tokenizer.convert_tokens_to_ids(letter) for letter in "abcd")

    def legal(*ids: int) -> set[int]:
        allowed = follower.follow(torch.tensor([[0, 0, *ids]])).token_mask()
        return {token for token in (a, b, c, d) if token in allowed}

    assert legal() == {a}
    assert legal(a, b, c) == set()
    assert legal(a, b) == legal(a) == {b, c}
    assert legal(a, d, c) == {b, c}
    assert legal(a, b, b) == {b, c}


def test_grammars_reach_other_systems_in_one_form(
    load: Callable[[str], Any], embedded_model: tuple[CausalLM, Any]
) -> None:
    """The rules of a schema that are handed over have the masks of the schema."""
    workers, (target, tokenizer) = load("comparison.workers"), embedded_model
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 22]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    grammar = Grammar.json_schema(schema)
    grammars = compiler(tokenizer, target.vocab_size)
    ours, theirs = grammars.matcher(grammar), grammars.matcher(Grammar.lark(workers.lark(grammar)))
    for token in tokenizer.encode('{"n": 22}'):
        assert ours.token_mask() == theirs.token_mask()
        assert ours.accept_token(token)
        assert theirs.accept_token(token)
    assert ours.is_accepting()
    assert theirs.is_accepting()
    with pytest.raises(workers.PeerError, match="regex"):
        workers.lark(Grammar.regex("a"))


@pytest.mark.embedded
def test_systems_leave_no_thread_behind(
    load: Callable[[str], Any], work: Any, embedded_model: tuple[CausalLM, Any]
) -> None:
    """Threads that have computed, and stay, slow down the others; and a row finds nothing of the last."""
    systems, (target, tokenizer) = load("comparison.systems"), embedded_model
    engine = LocalEngine(SpeculativeDecoder(target), tokenizer)
    before = set(threading.enumerate())
    asked = workload(work, max_tokens=2).rows[0].items[0]
    pair = [systems.AgentSpec(engine, 0), systems.Generate(engine, target.model)]
    for system in pair * 2:
        system.begin()
        answer = system.answer(asked, seed=0)
        system.end()
        assert answer.tokens == 2
        assert answer.step is None or answer.step.cached_tokens == 0
        assert set(threading.enumerate()) <= before
    engine.close()


@pytest.mark.embedded
def test_the_benchmark_runs_at_toy_size(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    embedded_model: tuple[CausalLM, Any],
) -> None:  # fmt: skip
    peers = load("peers")
    target, tokenizer = embedded_model
    decoder = SpeculativeDecoder(target, Cascade([PromptLookupDrafter()]))
    monkeypatch.setattr(peers, "load_engine", lambda spec: LocalEngine(decoder, tokenizer))
    threads, written = torch.get_num_threads(), tmp_path / "out" / "peers.json"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    asked = {"id": "one", "category": "c", "messages": [{"role": "user", "content": "Call f."}], "tools": tools}
    (tmp_path / "tools.jsonl").write_text(json.dumps(asked))
    size = ["--rows", "1", "--max-tokens", "4", "--repeats", "1"]
    asked_for = ["--data", str(tmp_path), "--workloads", "repeat", "tools", "prose"]
    systems = ["--systems", "generate", "generate-masks-lookup", "agentspec", "vllm"]
    outputs = ["--json", str(written), "--plot", str(tmp_path / "peers.png")]
    found = peers.main([*size, *asked_for, *systems, *outputs, "--vllm", str(tmp_path / "python")])
    assert torch.get_num_threads() == threads
    assert found == json.loads(written.read_text())
    assert found["schema"] == "agentspec.peers/1"
    assert "cannot be run" in found["systems"]["vllm"]["reason"]
    assert found["skipped"] == {"prose": f"prompts.jsonl is not in the folder {tmp_path}, which --data names."}
    assert list(found["workloads"]) == ["repeat", "tools"]
    for work in found["workloads"].values():
        [(peer, of)] = [(n, of) for n, of in work["systems"].items() if n != "agentspec" and of["status"] == "ran"]
        assert of["tokens"] == work["systems"]["agentspec"]["tokens"] == [[4]]
        assert work["ratios"][peer]["end_to_end"]["median"] > 0
        assert work["ratios"][peer]["without_prompts"]["median"] > 0
        assert work["equality"]["systems"]["agentspec"]["differing"] == 0
        assert 0 <= work["overhead"]["agentspec"]["outside_target"] < 1
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "tools (tool calls): 1 rows" in shown
    assert "prose: skipped" in shown
