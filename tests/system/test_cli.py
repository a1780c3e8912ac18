"""The command line: what it prints, and its exit status where things are not as they should be."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import recorded
import torch
from scripted import tokenizer
from tiny import llama

import langchain_agentspec
from agentspec import CausalLM, Completion, LocalEngine, PromptLookupDrafter, Request, SpeculativeDecoder
from agentspec.cli import COMMANDS, bench, doctor, engines, main, verify
from agentspec.models.backends.native import KernelsMissingError
from agentspec.report import AgentRun, RunRecord

pytestmark = pytest.mark.usefixtures("one_thread")


def written(path: Path, runs: Sequence[RunRecord]) -> Path:
    for run in runs:
        AgentRun(run).append_to(path)
    return path


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl", [recorded.simple(), recorded.simple(), recorded.busy()])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """A tiny random model of the tests' own tokens, in place of any requested model."""
    known = tokenizer("qwen3")
    target = CausalLM(llama(vocab_size=len(known), max_position_embeddings=1024))
    engine = LocalEngine(SpeculativeDecoder(target, PromptLookupDrafter(), gamma=3), known)
    monkeypatch.setattr(engines, "load_engine", lambda spec: engine)
    close = engine.close
    monkeypatch.setattr(engine, "close", lambda: None)  # a command closes its own engine; this one is asked again
    yield engine
    close()


# --- report -----------------------------------------------------------------------------------------------------------


def test_a_report_shows_percentiles(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(a)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{a}: 3 runs"
    rows = {line.split("  ")[0].strip() or line.split()[0]: line.split()[-4:] for line in lines[2:]}
    assert rows["total"] == ["3", "8.0000", "9.6000", "9.9600"]
    assert any(line.startswith("  verify") and line.split()[-4] == "2" for line in lines)
    assert any(line.startswith("iteration 3") and line.split()[-4] == "1" for line in lines)


def test_lines_that_cannot_be_read_are_named_and_the_rest_is_read(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with a.open("a") as file:
        file.write('nonsense\n{"schema": "agentspec.run/2"}\n{"schema": "agent')
    assert main(["report", str(a)]) == 0
    shown = capsys.readouterr().out
    assert "3 runs" in shown
    assert "not read, line 4: not JSON" in shown
    assert "not read, line 5: a run of schema 'agentspec.run/2'" in shown
    assert "not read, line 6: cut off" in shown


def test_one_file_is_compared_with_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [recorded.run([recorded.turn(0, t, t, 0, models=[recorded.model(0, t)])], t) for t in (2.0, 6.0, 4.0)]
    fast = [recorded.run([recorded.turn(0, t, t, 0, models=[recorded.model(0, t)])], t) for t in (1.0, 3.0, 2.0)]
    files = [str(written(tmp_path / "a.jsonl", slow)), str(written(tmp_path / "b.jsonl", fast))]
    assert main(["report", *files]) == 0
    shown = capsys.readouterr().out
    assert "3 pairs, by order" in shown
    assert "Student" in shown
    [total] = [line for line in shown.splitlines() if line.startswith("total") and " to " in line]
    assert total.split() == ["total", "3", "4.0000", "2.0000", "2.000", "2.000", "to", "2.000"]
    [tools] = [line for line in shown[shown.index("pairs") :].splitlines() if line.startswith("tools")]
    assert tools.split()[-2:] == ["-", "-"]  # 0 seconds over 0 seconds

    written(Path(files[1]), fast[:1])
    assert main(["report", *files]) == 0
    shown = capsys.readouterr().out
    assert "not paired" in shown
    assert "Welch" in shown


def test_a_report_as_json(a: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(a), str(a), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "agentspec.report/1"
    assert [file["runs"] for file in told["files"]] == [3, 3]
    assert told["files"][0]["percentiles"][0] == {"name": "total", "count": 3, "p50": 8.0, "p90": 9.6, "p99": 9.96}
    assert told["comparison"]["ratios"][0]["ratio"] == 1.0
    assert told["comparison"]["paired_by"] == "order"
    assert main(["report", str(a), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"] is None


def test_one_run_becomes_a_page_and_a_trace(a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "run.html", tmp_path / "run.json"
    assert main(["report", str(a), "--html", str(page), "--trace", str(trace)]) == 0
    assert "Run 3 of 3 written" in capsys.readouterr().out
    assert "the day is over" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert main(["report", str(a), "--html", str(page), "--run", "1"]) == 0
    assert "the day is over" not in page.read_text()
    assert main(["report", str(a), "--html", str(page), "--run", "4"]) == 2
    assert "holds 3 runs that can be read; there is no run 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("", 1, "the file is empty"),
        ('{"schema": "agentspec.run/2"}\n', 1, "line 1: a run of schema"),
        ('{"schema": "agentsp', 1, "line 1: cut off"),
        ("a,b\n1,2\n", 2, "line 1: not JSON"),
        ("\x00\x01\n", 2, "line 1: not JSON"),
    ],
)
def test_a_file_without_runs_is_reported_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int, said: str
) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    assert main(["report", str(path), "--html", str(tmp_path / "x.html")]) == status
    assert said in capsys.readouterr().out
    assert not (tmp_path / "x.html").exists()


def test_files_that_cannot_be_opened_are_a_line_on_stderr(
    a: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "no" / "x")
    for arguments in ([str(tmp_path / "missing.jsonl")], [str(tmp_path)], [str(a), "--html", nowhere]):
        assert main(["report", *arguments]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("agentspec report: ")
        assert shown.count("\n") == 1
        assert arguments[-1] in shown


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["report"], ["verify", "--seeds", "0"]])
def test_wrong_arguments_end_with_2_and_name_what_is_expected(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: agentspec" in capsys.readouterr().err


def test_every_command_describes_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_it_runs_as_a_module(a: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "agentspec", "report", str(a)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{a}: 3 runs")


def test_the_doctor_reports_and_never_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path / "cache"))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert torch.__version__ in shown
    assert "will be made" in shown
    assert "python -m agentspec.models.embedded" in shown
    assert f"{torch.get_num_threads()} of " in shown
    assert "langchain" in shown

    (tmp_path / "cache" / "entries").mkdir(parents=True)
    (tmp_path / "cache" / "entries").chmod(0o755)
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name == "torch" else doctor_missing(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "kernels", no_kernels)
    assert main(["doctor", "--no-load"]) == 0
    shown = capsys.readouterr().out
    assert "none: there is no C++ compiler" in shown
    assert "install a C++ compiler (g++)" in shown
    assert "chmod 700" in shown
    assert "failed: ZeroDivisionError" in shown
    assert "pip install 'langchain-agentspec[otel]'" in shown


def no_kernels() -> None:
    raise KernelsMissingError("there is no C++ compiler")


def doctor_missing(name: str) -> str:
    raise doctor.PackageNotFoundError(name)


@pytest.mark.embedded
def test_the_doctor_shows_the_bound_of_the_kv_cache(
    capsys: pytest.CaptureFixture[str], embedded_model: tuple[CausalLM, Any]
) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "present" in shown
    assert "bytes a token" in shown


def test_verify_finds_a_model_exact(engine: LocalEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--seeds", "2", "--tokens", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Exact."
    assert sum(line.endswith("same") for line in lines) == 9  # three tasks: greedy twice, drawn once
    assert sum("rounding" in line for line in lines) == 3


def test_verify_finds_what_is_not_exact(
    engine: LocalEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = engine.generate

    def other(requests: Sequence[Request]) -> list[list[Completion]]:
        """Speculation that gets the third token wrong, and drops the rest."""
        [[completion]] = generate(requests)
        if requests[0].gamma == 0:
            return [[completion]]
        kept = completion.tokens[:2]
        return [[dataclasses.replace(completion, tokens=(*kept, (completion.tokens[2] + 1) % 50))]]

    monkeypatch.setattr(engine, "generate", other)
    assert main(["verify", "--seeds", "2", "--tokens", "8"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS at token 2" in shown
    assert "their logits by" in shown
    assert "seed 2" in shown
    assert "NOT exact: 9 checks differ." in shown


def test_verify_finds_cached_logits_that_differ(
    engine: LocalEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "TOLERANCE", {torch.float32: 0.0})
    target: Any = engine.decoder.target
    forward = target.model.forward

    def off(*arguments: Any, **settings: Any) -> Any:
        out = forward(*arguments, **settings)
        out.logits += 0.5 * ("cache" not in settings and "past_key_values" not in settings)
        return out

    monkeypatch.setattr(target.model, "forward", off)
    assert main(["verify", "--seeds", "1", "--tokens", "4"]) == 1
    assert "DIFFERS: more than rounding" in capsys.readouterr().out


def test_bench_compares_on_and_off(engine: LocalEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--repeats", "2", "--tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:5]}
    assert set(rows) == {task.name for task in engines.TASKS}
    assert rows["prose"][0] == "8"
    assert " to " in lines[2]
    assert lines[-1] == "The same texts on and off: yes"
    assert main(["bench", "--repeats", "1", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith("-")  # a single pair has no interval


def test_bench_reports_texts_that_differ(
    engine: LocalEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = bench._decode

    def other(engine: LocalEngine, request: Request, is_on: bool) -> Completion:
        completion = decode(engine, request, is_on)
        return dataclasses.replace(completion, tokens=(*completion.tokens, 7)) if is_on else completion

    monkeypatch.setattr(bench, "_decode", other)
    assert main(["bench", "--repeats", "1", "--tokens", "4"]) == 1
    assert "on and off: NO" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_a_line_on_stderr(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in ("verify", "bench"):
        assert main([command, "--model", str(tmp_path / "no-model")]) == 2
        assert str(tmp_path / "no-model") in capsys.readouterr().err


def test_the_demo_without_langchain_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "langchain_agentspec.demo", raising=False)
    monkeypatch.delattr(langchain_agentspec, "demo", raising=False)  # where another test imported it
    for name in ("langchain", "langchain.agents"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == 2
    assert "pip install 'langchain-agentspec[examples]'" in capsys.readouterr().err


@pytest.mark.embedded
def test_the_demo_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    shown = capsys.readouterr().out
    assert "calls get_price(item='desk')" in shown
    assert "Same conversation with and without speculation: yes" in shown


@pytest.mark.embedded
def test_the_embedded_model_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--seeds", "2", "--tokens", "24", "--device", "cpu"]) == 0
    assert "Exact." in capsys.readouterr().out
