"""LangChain's own standard tests: the wiring, with a model that answers right."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from answering import answering, call
from langchain_core.caches import BaseCache
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import AsyncCacheTestSuite, ChatModelIntegrationTests, SyncCacheTestSuite
from langchain_tests.unit_tests import ChatModelUnitTests

from agentspec import LocalEngine
from langchain_agentspec import AgentSpecCache, ChatAgentSpec


class Declared:
    """What ``ChatAgentSpec`` can do."""

    chat_model_class = ChatAgentSpec
    supports_json_mode = True
    supports_model_override = True
    supported_usage_metadata_details: Any = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012
    cached_model: ChatAgentSpec

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """A prompt that was read before."""
        self.cached_model.invoke("Hello")
        if not stream:
            return self.cached_model.invoke("Hello")
        first, *others = self.cached_model.stream("Hello")
        whole: Any = first.__add__(others)
        return whole


class TestUnit(Declared, ChatModelUnitTests):
    """Without a call of a model."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "embedded"}  # which is not loaded


JOKE = {"setup": "Why do cats purr?", "punchline": "They are on standby."}
RULES = [
    (r"Hello!", call("magic_function", '{"input": 3}')),
    (r"magic_function\(3\)", call("magic_function", '{"input": 3}')),
    (r"magic_function_no_args", call("magic_function_no_args")),
    (r"Pirate greeting", call("greeting_generator", '{"answer_style": "Pirate"}')),
    (
        r"Create a customer named '(.*?)'",
        lambda m: call("unicode_customer", json.dumps({"customer_name": m[1], "description": ""}, ensure_ascii=False)),
    ),
    (r"joke", json.dumps(JOKE)),
    (r"weather in San Francisco", call("get_weather", '{"location": "San Francisco, CA"}')),
    (r"sunny", "It is sunny there."),
    (r"", "Hello, how are you? I am well."),
]


@functools.cache
def answering_engine() -> LocalEngine:
    return answering(RULES)[0]


class TestAnswering(Declared, ChatModelIntegrationTests):
    """With a model that answers right, nothing is excused."""

    @property
    def cached_model(self) -> ChatAgentSpec:  # type: ignore[override]
        return ChatAgentSpec(engine=answering_engine())

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": answering_engine(), "model": "answering", "max_tokens": 200}

    @property
    def model_override_value(self) -> str:
        return "answering"


class TestCache(SyncCacheTestSuite):
    """The cache of answers."""

    @pytest.fixture
    def cache(self, tmp_path: Path) -> BaseCache:
        return AgentSpecCache(tmp_path / "answers")


class TestAsyncCache(AsyncCacheTestSuite):
    """The cache of answers, asked from an event loop."""

    @pytest.fixture
    async def cache(self, tmp_path: Path) -> BaseCache:
        return AgentSpecCache(tmp_path / "answers")
