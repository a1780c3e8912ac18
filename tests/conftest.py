"""What every test stands on: no hub, two threads."""

from __future__ import annotations

import os

# Read once, when transformers is imported: so before any import that leads there.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scripted import QUESTION, Says, ScriptedModel, tokenizer

from agentspec import Cascade, LocalEngine, PromptLookupDrafter, SpeculativeDecoder
from agentspec.chat import ChatFormat
from langchain_agentspec import ChatAgentSpec

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of many tiny tensors: threads gain nothing there, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def says() -> Iterator[Says]:
    """Makes a chat model that wants to answer the question in these words."""
    engines = []

    def make(script: str, template: str = "qwen3", prompt: list[int] | None = None, **settings: Any) -> ChatAgentSpec:
        known = tokenizer(template)
        tools = settings.pop("tools", [])
        thinks = {} if settings.get("reasoning") is None else {"enable_thinking": settings["reasoning"]}
        prompt = prompt or ChatFormat(known).render([{"role": "user", "content": QUESTION}], tools, **thinks)
        end = known.convert_tokens_to_ids("<|im_end|>")
        model = ScriptedModel(len(known), len(prompt), [*known.encode(script), end])
        decoder = SpeculativeDecoder(model, Cascade([PromptLookupDrafter()]), 4)
        engines.append(LocalEngine(decoder, known, end_tokens=[end]))
        return ChatAgentSpec(engine=engines[-1], max_tokens=120, **settings)

    yield make
    for engine in engines:
        engine.close()
