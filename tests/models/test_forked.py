"""A forked child has an answer, or an error at once that names the way out. It never hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
HERE = Path(__file__).resolve().parent

PARENT = """
import os, signal, sys, threading, time
sys.path[:0] = {paths!r}
import torch
from tiny import llama
from agentspec import *
from agentspec.errors import EngineClosedError

target, draft = CausalLM(llama(), rows=4), CausalLM(llama(seed=1), rows=4)
engine = LocalEngine(SpeculativeDecoder(target, Cascade([SuffixDrafter(), ModelDrafter(draft)]), 3))
request = Request([3, 4, 5], SamplingParams(temperature=0, max_tokens=12))
endless = Request([4], SamplingParams(max_tokens=240, stop_token_ids=()), n=64)

def answer(engine=engine):
    return engine.generate([request])[0][0].tokens

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
            os._exit(3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("status", status, flush=True)

def same():
    assert answer() == expected, "another text"
"""

CASES = {
    "an idle engine": """
expected = answer()
(torch.randn(300, 300) @ torch.randn(300, 300)).sum()  # the forking thread has computed as well
for _ in range(3):
    in_child(same)
same()
""",
    "an engine that never ran": """
plain = LocalEngine(SpeculativeDecoder(CausalLM(llama(), rows=4)))
expected = answer(plain)
plain.close()
in_child(same)
same()
""",
    "a grandchild": """
expected = answer()
def grand():
    same()
    in_child(same)
in_child(grand)
""",
    "the child's child engine goes on beside the parent's": """
expected = answer()
def both():
    for _ in range(20):
        same()
thread = threading.Thread(target=both)
def child():
    for _ in range(5):
        same()
    engine.close()
    assert engine.is_closed
in_child(child)
thread.start(); thread.join()
""",
    "a new engine over the model of a busy one": """
expected = answer()
stream = engine.stream(endless)
next(stream)
def anew():
    assert LocalEngine(SpeculativeDecoder(target)).generate([request])[0][0].tokens == expected
in_child(anew)
stream.close()
same()
""",
    "a lock of the budget of threads that another thread holds": """
from agentspec.runtime.thread_budget import BUDGET
from agentspec.runtime.threads import run_apart
def work():
    assert run_apart(lambda: 5, "test", on_idle_cores=True) == 5
    assert BUDGET.threads(2) in (1, 2)
with BUDGET._lock:
    in_child(work)
""",
    "a lock of a recorder that another thread holds": """
from agentspec.report.recorder import Recorder
recorder, held, done = Recorder(), threading.Event(), threading.Event()
def hold():
    with recorder._going_on("none"):
        held.set()
        done.wait(100)
thread = threading.Thread(target=hold)
thread.start()
held.wait(100)
def tell():
    recorder.begin("a", "llm", "a model")
    recorder.end("a")
    assert len(recorder.now()[1]) == 1
in_child(tell)
done.set(); thread.join()
""",
    "a lock of control tokens that another thread holds": """
from scripted import tokenizer
from agentspec.chat.control_tokens import ControlTokens, Rendered
pid, known, held, done = os.getpid(), tokenizer(), threading.Event(), threading.Event()
control = ControlTokens(known, "")
def slow():
    if os.getpid() == pid:
        held.set()
        done.wait(100)
    return known
control._tokenizer = slow
thread = threading.Thread(target=lambda: control.encode(Rendered("a")))
thread.start()
held.wait(100)
def encode():
    assert control.encode(Rendered("a")) == known.encode("a", add_special_tokens=False)
in_child(encode)
done.set(); thread.join()
""",
}

REFUSED = {
    "a busy engine": """
expected = answer()
stream = engine.stream(endless)
next(stream)
in_child(same)
stream.close()
same()
""",
    "a stream that was begun": """
expected = answer()
stream = engine.stream(endless)
next(stream)
in_child(lambda: list(stream))
assert next(stream)
stream.close()
same()
""",
    "a fork from within the worker": """
pid = os.getpid()
def fork(prefix, logits):
    if os.getpid() == pid and len(prefix) == 5:
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            def ask():
                try:
                    answer()
                except EngineClosedError as error:
                    print(type(error).__name__, error, flush=True)
                    os._exit(3)
                os._exit(0)
            threading.Thread(target=ask).start()
            time.sleep(50)
        print("status", os.waitpid(child, 0)[1], flush=True)
    return logits
engine.generate([Request([3, 4], SamplingParams(max_tokens=8, logits_processor=(fork,)))])
""",
}


def run(scripts: dict[str, str]) -> dict[str, list[str]]:
    """What each script prints, all in one process: importing takes longest."""
    paths = [str(HERE.parents[1]), str(HERE.parents[1] / "integrations"), str(HERE.parent), str(HERE.parent / "unit")]
    parts = [PARENT.format(paths=paths)]
    for name, script in scripts.items():
        parts += [f"print({f'# {name}'!r}, flush=True)", script]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout
    told = [part.splitlines() for part in done.stdout.split("# ")[1:]]
    assert [lines[0] for lines in told] == list(scripts)
    return {lines[0]: lines[1:] for lines in told}


def test_a_child_has_an_answer() -> None:
    for name, told in run(CASES).items():
        assert told, name
        assert set(told) == {"status 0"}, (name, told)


def test_a_child_of_a_busy_engine_gets_an_error_with_advice() -> None:
    for name, told in run(REFUSED).items():
        assert told[-1] == "status 768", (name, told)  # exited with 3, before any alarm
        assert told[0].startswith("EngineClosedError This process was forked"), (name, told)
        assert "gunicorn" in told[0]
