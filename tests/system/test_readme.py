"""What the README tells a newcomer to type works as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)

pytestmark = pytest.mark.embedded


def test_the_agent_example_runs_and_accounts_for_its_time() -> None:
    example = BLOCKS[0]
    assert "create_agent" in example
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(r"total, s .*\d", run.stdout)


def test_the_engine_example_counts(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block for block in BLOCKS if "LocalEngine(" in block]
    scope: dict[str, object] = {}
    exec(example + "\nengine.close()", scope)
    assert "four" in capsys.readouterr().out


def test_the_vote_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [block for block in BLOCKS if "SelfConsistency(" in block]
    exec(example, {})
    share = float(capsys.readouterr().out.split()[-1])
    assert 0 < share <= 1


def test_the_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for command in re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE):
        assert command in targets


def test_the_tests_it_names_exist() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "README.md").read_text())
    assert len(named) >= 10
    for name in named:
        assert f"def {name}(" in tests, name
