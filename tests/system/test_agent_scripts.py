"""Agent conversations: every call of every step is valid, and the next step finds the last one in the cache."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inputs import AGENT_SCRIPT
from langchain_core.messages import AIMessage

from agentspec import Cascade, CausalLM, LocalEngine, PromptLookupDrafter, SpeculativeDecoder
from langchain_agentspec import ChatAgentSpec

pytestmark = pytest.mark.embedded

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "benchmark" / "agent_scripts.py"


@pytest.fixture(scope="module")
def engine(embedded_model: tuple[CausalLM, Any]) -> Iterator[LocalEngine]:
    target, tokenizer = embedded_model
    engine = LocalEngine(SpeculativeDecoder(target, Cascade([PromptLookupDrafter()])), tokenizer)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_call_of_an_agent_script_is_valid(engine: LocalEngine, temperature: float) -> None:
    played = runpy.run_path(str(SCRIPT))
    model = ChatAgentSpec(engine=engine, temperature=temperature, seed=1, max_tokens=100)
    messages = played["play"](AGENT_SCRIPT, model, turns=2)
    found = played["count"](messages, AGENT_SCRIPT["tools"])
    assert found["calls"] >= 2
    assert found["invalid calls"] == 0
    steps = [message for message in messages if isinstance(message, AIMessage)]
    for before, after in itertools.pairwise(steps):
        told = [step.response_metadata["agentspec"] for step in (before, after)]
        assert told[1]["cached_tokens"] >= told[0]["prompt_tokens"] + told[0]["new_tokens"] - 1
