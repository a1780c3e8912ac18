"""A chat model in a forked child: what gunicorn --preload, Celery and multiprocessing do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork"),
]

SCRIPT = """
import os, signal
from langchain_agentspec import ChatAgentSpec

model = ChatAgentSpec(max_tokens=6)
expected = model.invoke("Hi").content

def in_child(work):
    child = os.fork()
    if child == 0:
        signal.alarm(150)
        os._exit(0 if work() == expected else 3)
    print("status", os.waitpid(child, 0)[1], flush=True)

def answer():
    return model.invoke("Hi").content

in_child(answer)
stream = model.stream("Count to one hundred", max_tokens=200)
next(stream)  # from here on the engine is busy: a child has to load its own
in_child(answer)
in_child(lambda: ChatAgentSpec(max_tokens=6).invoke("Hi").content)
stream.close()
assert answer() == expected
"""


def test_a_chat_model_answers_in_a_forked_child() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["status 0"] * 3
