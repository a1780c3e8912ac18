"""The demo: two tool calls and an answer, the same with and without speculation, and totals that add up."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage

pytestmark = pytest.mark.embedded

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "agent_loop.py"


@pytest.fixture(scope="module")
def runs() -> dict[str, Any]:
    run = runpy.run_path(str(EXAMPLE))["run"]
    return {"speculative": run("auto", "speculative"), "plain": run(0, "plain")}


def test_the_loop_takes_two_tools_and_an_answer(runs: dict[str, Any]) -> None:
    messages, _ = runs["speculative"]
    calls = [call["name"] for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    assert calls == ["get_price", "convert_dollars"]
    assert [m.text for m in messages if isinstance(m, ToolMessage)] == [
        "The desk costs 120.0 dollars.",
        "120.0 dollars are 18000.00 yen.",
    ]
    assert messages[-1].text


def test_speculation_changes_nothing_that_is_said(runs: dict[str, Any]) -> None:
    said = {name: [(m.type, m.text) for m in messages] for name, (messages, _) in runs.items()}
    assert said["speculative"] == said["plain"]


def test_speculation_saves_target_calls(runs: dict[str, Any]) -> None:
    calls = {name: sum(call.step.target_calls for call in run.model_calls) for name, (_, run) in runs.items()}
    assert calls["speculative"] * 3 <= calls["plain"]


@pytest.mark.parametrize("name", ["speculative", "plain"])
def test_the_account_adds_up(runs: dict[str, Any], name: str) -> None:
    told = runs[name][1].to_dict()
    assert told["model_s"] + told["tool_s"] + told["framework_s"] == pytest.approx(told["total_s"])
    assert len(told["iterations"]) == 3
    for iteration in told["iterations"]:
        assert iteration["models"][0]["step"]["total_s"] <= iteration["model_s"]
    steps = [iteration["models"][0]["step"] for iteration in told["iterations"]]
    assert steps[1]["cached_tokens"] > steps[0]["prompt_tokens"]
