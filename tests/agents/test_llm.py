"""The plain model, and answers kept in a cache: marked, not counted again, never mixed up, never executed."""

from __future__ import annotations

import asyncio
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import answering, call
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from scripted import ScriptedModel, tokenizer

from agentspec import Cascade, Grammar, InvalidRequestError, LocalEngine, SpeculativeDecoder
from agentspec.errors import CacheError
from langchain_agentspec import AgentSpecCache, AgentSpecLLM, ChatAgentSpec, track_latency

PROMPT = "One, two,"
WANTED = " three, four, five, six."


@pytest.fixture
def llm() -> Iterator[AgentSpecLLM]:
    known = tokenizer()
    script = [*known.encode(WANTED), known.eos_token_id]
    model = ScriptedModel(len(known), len(known.encode(PROMPT)), script, favour=9.0)
    engine = LocalEngine(SpeculativeDecoder(model, Cascade()), known)
    yield AgentSpecLLM(engine=engine, max_tokens=40)
    engine.close()


async def test_every_way_to_ask_gives_the_same_text(llm: AgentSpecLLM) -> None:
    assert llm.invoke(PROMPT) == WANTED
    assert await llm.ainvoke(PROMPT) == WANTED
    assert "".join(llm.stream(PROMPT)) == WANTED
    assert "".join([piece async for piece in llm.astream(PROMPT)]) == WANTED
    assert llm.batch([PROMPT, PROMPT]) == [WANTED, WANTED]
    assert await llm.abatch([PROMPT, PROMPT]) == [WANTED, WANTED]


async def test_samples_stops_and_counts(llm: AgentSpecLLM) -> None:
    settings: Any = {"n": 3, "temperature": 1.0, "seed": 1}
    for result in (llm.generate([PROMPT], **settings), await llm.agenerate([PROMPT], **settings)):
        texts = [generation.text for generation in result.generations[0]]
        assert len(texts) == len(set(texts)) == 3
        usage = (result.llm_output or {})["token_usage"]
        assert usage["completion_tokens"] >= 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert llm.invoke(PROMPT, stop=[", five"]) == " three, four"
    [[generation]] = llm.generate([PROMPT], max_tokens=2).generations
    assert generation.generation_info is not None
    assert generation.generation_info["finish_reason"] == "length"
    assert generation.generation_info["agentspec"]["new_tokens"] == 2


def test_a_grammar_holds_for_completions_too(llm: AgentSpecLLM) -> None:
    assert llm.invoke(PROMPT, grammar=["yes", "no"]) in ("yes", "no")
    assert llm.invoke(PROMPT, grammar=Grammar.regex(" three, t[a-z]{3}")).startswith(" three, t")


def test_wrong_settings_say_what_was_expected(llm: AgentSpecLLM) -> None:
    with pytest.raises(InvalidRequestError, match="frequency"):
        llm.invoke(PROMPT, frequency=1)
    with pytest.raises(InvalidRequestError, match="Only one sample"):
        list(llm.stream(PROMPT, n=2))
    with pytest.raises(InvalidRequestError, match="n is the number"):
        llm.invoke(PROMPT, n=0)
    with pytest.raises(InvalidRequestError, match="another model"):
        llm.invoke(PROMPT, model="other")


def test_a_plain_model_is_in_the_account(llm: AgentSpecLLM) -> None:
    with track_latency() as run:
        llm.invoke(PROMPT)
    assert run.to_dict()["iterations"][0]["models"][0]["step"]["new_tokens"] > 3


# The cache


@pytest.fixture
def chat() -> Iterator[ChatAgentSpec]:
    engine, _ = answering([(r"time", call("now")), (r"", "Hello, you.")])
    yield ChatAgentSpec(engine=engine, max_tokens=60)
    engine.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "answers"
    set_llm_cache(AgentSpecCache(folder))
    yield folder
    set_llm_cache(None)


def now() -> str:
    """The time."""
    return "noon"


@pytest.mark.usefixtures("kept")
def test_a_cached_answer_is_marked_and_not_counted_again(chat: ChatAgentSpec) -> None:
    bound = chat.bind_tools([now])
    with track_latency() as run:
        answers = [bound.invoke("What time is it?") for _ in range(2)]
    assert answers[1].tool_calls == answers[0].tool_calls
    assert answers[0].tool_calls[0]["name"] == "now"
    assert answers[1].response_metadata["agentspec"] == {"cached": True}
    told = [iteration["models"][0] for iteration in run.to_dict()["iterations"]]
    assert [call["cached"] for call in told] == [False, True]
    assert told[0]["step"]["new_tokens"] > 0
    assert told[1]["step"] is None
    run.print()


def test_answers_of_other_caches_are_recognised_too(chat: ChatAgentSpec) -> None:
    set_llm_cache(InMemoryCache())
    try:
        with track_latency() as run:
            for _ in range(2):
                chat.invoke("Hi")
    finally:
        set_llm_cache(None)
    assert [call.cached for call in run.model_calls] == [False, True]


@pytest.mark.usefixtures("kept")
def test_a_plain_models_answers_are_kept_too(llm: AgentSpecLLM) -> None:
    first, second = (llm.generate([PROMPT]).generations[0][0] for _ in range(2))
    assert second.text == first.text
    assert second.generation_info is not None
    assert second.generation_info["agentspec"] == {"cached": True}


@pytest.mark.usefixtures("kept")
def test_two_engines_and_two_settings_share_no_answers(chat: ChatAgentSpec) -> None:
    other, _ = answering([(r"", "Another answer.")])
    texts = [model.invoke("Hi").text for model in (chat, ChatAgentSpec(engine=other), chat)]
    assert texts == ["Hello, you.", "Another answer.", "Hello, you."]
    short = chat.invoke("Hi", max_tokens=1)
    assert short.text != "Hello, you."
    other.close()


class Executed:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_a_row_that_somebody_else_pickled_is_a_miss_and_not_executed(
    kept: Path, chat: ChatAgentSpec, tmp_path: Path
) -> None:
    assert "cached" not in chat.invoke("Hi").response_metadata["agentspec"]
    mark = tmp_path / "executed"
    with sqlite3.connect(kept / "cache.db") as connection:
        changed = connection.execute("UPDATE Cache SET mode = 4, value = ?", (pickle.dumps(Executed(mark)),)).rowcount
    connection.close()
    assert changed == 1
    assert "cached" not in chat.invoke("Hi").response_metadata["agentspec"]
    assert not mark.exists()
    assert chat.invoke("Hi").response_metadata["agentspec"] == {"cached": True}


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match=r"0777.*chmod 700"):
        AgentSpecCache(tmp_path)


@pytest.mark.usefixtures("kept")
async def test_the_cache_works_from_an_event_loop(chat: ChatAgentSpec) -> None:
    first = await chat.ainvoke("Hi")
    second = await asyncio.wait_for(chat.ainvoke("Hi"), 10)
    assert second.text == first.text
    assert second.response_metadata["agentspec"] == {"cached": True}


def test_forgetting_and_what_is_no_json(tmp_path: Path) -> None:
    from langchain_core.outputs import Generation

    cache = AgentSpecCache(tmp_path / "answers")
    cache.update("p", "m", [Generation(text="a")])
    assert cache.lookup("p", "m") == [Generation(text="a")]
    assert cache.lookup("p", "other") is None
    cache.update("q", "m", [Generation(text="a", generation_info={"no": object()})])
    assert cache.lookup("q", "m") is None
    cache.clear()
    assert cache.lookup("p", "m") is None
