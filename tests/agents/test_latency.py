"""What ``track_latency`` sees of agents, graphs and chains, and that its parts are the wall time, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import io
import runpy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from answering import Rule, answering, call
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_core.language_models import FakeMessagesListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from rich.console import Console
from tiny import llama

from agentspec import InvalidRequestError, LocalEngine, ModelDrafter, Request, SamplingParams, SpeculativeDecoder
from agentspec.errors import BudgetExceededError, EngineClosedError
from agentspec.models.causal_lm import CausalLM
from agentspec.report import AgentRun, RunRecord
from agentspec.stats import PHASES
from langchain_agentspec import BudgetWarning, ChatAgentSpec, LatencyHandler, track_latency

Made = Callable[..., ChatAgentSpec]
QUESTION = {"messages": [("user", "How is Paris?")]}


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def fail(city: str) -> str:
    """Fails."""
    raise ValueError("no weather today")


WEATHER: list[Rule] = [(r"sunny in Paris", "It is sunny."), (r"Paris", call("get_weather", '{"city": "Paris"}'))]


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes a chat model that answers by rules."""
    engines = []

    def make(rules: Sequence[Rule], **settings: Any) -> ChatAgentSpec:
        engine, _ = answering([*rules, (r"", "Nothing to say.")])
        engines.append(engine)
        return ChatAgentSpec(engine=engine, max_tokens=200, **settings)

    yield make
    for engine in engines:
        engine.close()


def expect_whole(run: AgentRun) -> RunRecord:
    """That the parts of a run are its wall time, of each iteration its seconds, of each call its own."""
    record = run.record
    assert record.model_s + record.tool_s + record.framework_s == pytest.approx(record.total_s, rel=1e-9)
    assert min(record.model_s, record.tool_s, record.framework_s, record.idle_s) >= -1e-9
    if record.iterations:
        assert sum(i.seconds for i in record.iterations) == pytest.approx(record.total_s, rel=1e-9)
    for iteration in record.iterations:
        shares = (iteration.model_s, iteration.tool_s, iteration.framework_s)
        assert sum(shares) == pytest.approx(iteration.seconds, abs=1e-9)
    for model in record.model_calls:
        if model.phases is not None:
            phases = model.phases.model_dump()
            assert sum(phases.values()) == pytest.approx(model.seconds, abs=1e-9)
            assert min(phases.values()) >= -1e-6
        for step in model.steps:
            named = [v for k, v in step.model_dump().items() if k in model.phases.model_dump()] if model.phases else []
            assert sum(named) == pytest.approx(step.total_s, abs=1e-9)
            assert step.total_s <= model.seconds
    return record


# What runs


@pytest.mark.parametrize("parallel", [False, True])
def test_an_agent(made: Made, parallel: bool) -> None:
    both_began = threading.Barrier(1 + parallel, timeout=30)

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        both_began.wait()
        return f"sunny in {city}"

    @tool
    def get_time(zone: str) -> str:
        """The time of day in a zone."""
        both_began.wait()
        return f"noon in {zone}"

    both = call("get_weather", '{"city": "Paris"}') + "\n" + call("get_time", '{"zone": "UTC"}')
    rules: list[Rule] = [(r"sunny.*noon", "Sunny at noon."), (r"sunny", "Sunny."), (r"Paris", both)]
    agent: Any = create_agent(made(rules, parallel_tool_calls=parallel), tools=[get_weather, get_time])
    began = time.time()
    with track_latency("agent") as run:
        messages = agent.invoke(QUESTION)["messages"]
    record = expect_whole(run)
    assert began <= record.began_at <= time.time()
    assert [len(i.tools) for i in record.iterations] == [1 + parallel, 0]
    assert [i.models[0].node for i in record.iterations] == ["model", "model"]
    tools = record.iterations[0].tools
    assert {t.tool_call_id for t in tools} == {c["id"] for c in messages[1].tool_calls}
    assert record.tool_s > 0
    if parallel:  # the one did not wait for the other
        assert tools[1].start_s < tools[0].end_s
        assert record.tool_s < tools[0].seconds + tools[1].seconds
    for model in record.model_calls:
        assert model.phases is not None
        assert model.phases.template_s > 0
        assert model.ttft_s is not None
        assert 0 < model.ttft_s < model.seconds
        assert (model.provider, model.streamed) == ("agentspec", False)
        assert model.input_tokens == model.step.prompt_tokens  # type: ignore[union-attr]
    assert record.model_calls[0].finish_reason == "tool_calls"
    assert AgentRun.from_dict(run.to_dict()).record == record


async def test_the_same_by_async_with_and_streaming(made: Made) -> None:
    agent: Any = create_agent(made(WEATHER), tools=[get_weather])
    async with track_latency() as run:
        async for _ in agent.astream(QUESTION, stream_mode="messages"):
            pass
    record = expect_whole(run)
    assert [len(i.tools) for i in record.iterations] == [1, 0]
    assert record.model_calls[1].streamed
    assert record.model_calls[1].phases is not None


def test_a_graph_and_its_nodes(made: Made) -> None:
    class State(TypedDict):
        messages: Annotated[list[AnyMessage], add_messages]

    model = made([(r"Paris", "Nice.")])

    def think(state: State) -> dict[str, Any]:
        first = model.invoke(state["messages"])
        return {"messages": [first, model.invoke([("user", "Sure?")])]}

    graph = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("again", think)
    graph.add_edge(START, "think")
    graph.add_edge("think", "again")
    graph.add_edge("again", END)
    with track_latency() as run:
        graph.compile().invoke(QUESTION)  # type: ignore[arg-type]
    record = expect_whole(run)
    assert [len(i.models) for i in record.iterations] == [2, 2]  # a node is an iteration
    assert [i.models[0].node for i in record.iterations] == ["think", "again"]


def test_a_chain_and_what_is_idle(made: Made) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{q}")]) | made([]) | RunnableLambda(lambda m: time.sleep(0.03))
    with track_latency() as run:
        time.sleep(0.05)
        chain.invoke({"q": "Hi"})
    record = expect_whole(run)
    assert record.idle_s >= 0.05
    assert record.framework_s - record.idle_s >= 0.03  # the chain's own work is not idle


def test_an_agent_within_a_tool(made: Made) -> None:
    expert: Any = create_agent(made(WEATHER), tools=[get_weather])

    @tool
    def ask_expert(question: str) -> str:
        """Ask."""
        return str(expert.invoke({"messages": [("user", question)]})["messages"][-1].text)

    rules: list[Rule] = [(r"It is sunny", "Yes."), (r"Paris", call("ask_expert", '{"question": "Paris"}'))]
    agent: Any = create_agent(made(rules), tools=[ask_expert])
    with track_latency() as run:
        agent.invoke(QUESTION)
    record = expect_whole(run)
    assert [len(i.models) for i in record.iterations] == [1, 1]
    [asked] = record.iterations[0].tools
    assert [len(i.tools) for i in asked.iterations] == [1, 0]
    assert 0 < asked.model_s < asked.seconds
    assert len(record.model_calls) == 4
    assert record.model_s < sum(c.seconds for c in record.model_calls)
    assert sum(i.seconds for i in asked.iterations) == pytest.approx(asked.seconds)


async def test_an_agent_within_an_async_tool(made: Made) -> None:
    expert: Any = create_agent(made(WEATHER), tools=[get_weather])

    @tool
    async def ask_expert(question: str) -> str:
        """Ask."""
        return str((await expert.ainvoke({"messages": [("user", question)]}))["messages"][-1].text)

    rules: list[Rule] = [(r"It is sunny", "Yes."), (r"Paris", call("ask_expert", '{"question": "Paris"}'))]
    agent: Any = create_agent(made(rules), tools=[ask_expert])
    async with track_latency() as run:
        await agent.ainvoke(QUESTION)
    record = expect_whole(run)
    assert len(record.iterations) == 2
    assert len(record.iterations[0].tools[0].iterations) == 2


def test_retries_are_one_iteration() -> None:
    class Flaky(FakeMessagesListChatModel):
        tries: list[int] = []  # noqa: RUF012 (a field of pydantic)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            self.tries.append(1)
            if len(self.tries) % 2:
                raise ConnectionError("busy")
            return super()._generate(*args, **kwargs)

    model = Flaky(responses=[AIMessage("Hello.")])
    with track_latency() as run:
        model.with_retry(wait_exponential_jitter=False).invoke("Hi")
        again: Any = create_agent(model, middleware=[ModelRetryMiddleware(initial_delay=0, jitter=False)])
        again.invoke(QUESTION)
    record = expect_whole(run)
    failed = [[model.error is not None for model in i.models] for i in record.iterations]
    assert failed == [[True, False], [True, False]]


def test_models_of_others_have_unknown_phases() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("a b c"), AIMessage("d")]))
    with track_latency() as run:
        list(model.stream("Hi"))
        model.invoke("Hi")
    record = expect_whole(run)
    streamed, invoked = record.model_calls
    assert (streamed.phases, streamed.step, streamed.gain) == (None, None, None)
    assert streamed.streamed
    assert 0 < (streamed.ttft_s or 0) <= streamed.seconds
    assert (invoked.streamed, invoked.ttft_s) == (False, None)
    assert run.gain is None
    run.print()


def test_samples_stand_beside_each_other(made: Made) -> None:
    with track_latency() as run:
        made([], temperature=0.5).generate([[HumanMessage("Hi")]], n=3)
    [model] = expect_whole(run).model_calls
    assert len(model.steps) == 3
    assert model.output_tokens == sum(step.new_tokens for step in model.steps)


def test_a_cached_answer_is_not_counted(made: Made) -> None:
    model = made([])
    set_llm_cache(InMemoryCache())
    try:
        with track_latency() as run:
            for _ in range(2):
                model.invoke("Hi")
    finally:
        set_llm_cache(None)
    record = expect_whole(run)
    assert [c.cached for c in record.model_calls] == [False, True]
    assert record.gain == record.model_calls[0].gain
    run.print()


@pytest.mark.parametrize("has_draft", [False, True])
def test_the_drafts_prefill_has_a_name_of_its_own(has_draft: bool) -> None:
    class Slow(ModelDrafter):
        def prefill(self, contexts: Sequence[list[int]]) -> None:
            time.sleep(0.05)
            super().prefill(contexts)

    target, draft = CausalLM(llama(0)), CausalLM(llama(1))
    engine = LocalEngine(SpeculativeDecoder(target, Slow(draft) if has_draft else None, 2))
    request = Request(list(range(1, 40)), SamplingParams(max_tokens=4))
    stats = [engine.generate([request])[0][0].stats.to_dict() for _ in range(2)]
    engine.close()
    assert [told["cached_tokens"] for told in stats] == [0, 38]
    assert [told["draft_cached_tokens"] for told in stats] == ([0, 38] if has_draft else [None, None])
    assert stats[0]["prefill_s"] > 0
    assert not has_draft or stats[0]["draft_prefill_s"] >= 0.05
    assert all(sum(told[phase] for phase in PHASES) == pytest.approx(told["total_s"]) for told in stats)
    assert min(told[phase] for told in stats for phase in PHASES) >= 0  # no second is in two of them


# Who is told


def test_runs_within_runs_and_beside_them_are_kept_apart(made: Made) -> None:
    model = made([])
    with track_latency("outer") as outer:
        model.invoke("One")
        with track_latency("inner") as inner:
            model.invoke("Two")
    assert [len(run.model_calls) for run in (outer, inner)] == [2, 1]

    def ask(times: int) -> None:
        with track_latency() as run:
            for _ in range(times):
                model.invoke("Hi")
        counts[times] = len(expect_whole(run).model_calls)

    counts: dict[int, int] = {}
    threads = [threading.Thread(target=ask, args=(times,)) for times in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {1: 1, 2: 2, 3: 3}


async def test_tasks_are_kept_apart(made: Made) -> None:
    model = made([])

    async def ask(times: int) -> int:
        async with track_latency() as run:
            for _ in range(times):
                await model.ainvoke("Hi")
        return len(expect_whole(run).model_calls)

    assert await asyncio.gather(ask(1), ask(2), ask(3)) == [1, 2, 3]


def test_a_block_within_a_tool_is_not_counted_twice_outside(made: Made) -> None:
    model = made([])
    inner = []

    @tool
    def ask(question: str) -> str:
        """Ask."""
        with track_latency("tool") as run:
            model.invoke(question)
        inner.append(run)
        return "sunny in Paris"

    agent: Any = create_agent(made([WEATHER[0], (r"Paris", call("ask", '{"question": "?"}'))]), tools=[ask])
    with track_latency() as outer:
        agent.invoke(QUESTION)
    record = expect_whole(outer)
    assert len(record.model_calls) == 3
    assert len(record.iterations[0].tools[0].iterations) == 1
    assert len(expect_whole(inner[0]).model_calls) == 1


def test_a_handler_attached_twice_and_beside_a_block_counts_once(made: Made) -> None:
    handler = LatencyHandler("mine")
    with track_latency() as run:
        made([]).invoke("Hi", config={"callbacks": [handler, handler]})
    assert len(handler.run.model_calls) == len(run.model_calls) == 1
    assert handler.run.name == "mine"
    expect_whole(handler.run)
    assert handler.run.record.idle_s == pytest.approx(handler.run.framework_s, abs=1e-9)


def test_a_clock_can_be_given(made: Made) -> None:
    ticks = iter(range(1000))
    with track_latency(clock=lambda: float(next(ticks))) as run:
        made([]).invoke("Hi")
    record = run.record
    assert record.total_s == int(record.total_s) > 0
    assert record.model_s + record.tool_s + record.framework_s == record.total_s


async def test_every_way_to_ask_tells_how_far_it_has_come(made: Made) -> None:
    model = made([(r"Hi", "one two one two one two one two")])
    handler = LatencyHandler()
    config: Any = {"callbacks": [handler, handler]}
    with track_latency():  # which is told too, and does not count tokens for the handler
        model.invoke("Hi", config)
        await model.ainvoke("Hi", config)
        list(model.stream("Hi", config))
        async for _ in model.astream("Hi", config):
            pass
    _, calls = handler.recorders[0].now()
    models = [call for call in calls if call.kind == "model"]
    assert [call.tokens for call in models] == [call.output_tokens for call in models]
    assert len({call.output_tokens for call in models}) == 1
    assert [call.streamed for call in models] == [False, False, True, True]
    assert [call.acceptance_rate for call in models] == [call.steps[0].acceptance_rate for call in models]
    assert models[0].acceptance_rate is not None


def test_a_terminal_is_told_while_the_block_runs(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = functools.partial(Console, file=screen, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    monkeypatch.setattr("agentspec.report.views.live.Console", terminal)
    with track_latency("shop", live=True) as run:
        made([]).invoke("Hi")
    assert "shop: " in screen.getvalue()
    assert len(run.model_calls) == 1


# What goes wrong


def test_an_exception_in_the_block_closes_the_run(made: Made) -> None:
    with pytest.raises(KeyError), track_latency() as run:
        {}[made([]).invoke("Hi").id]
    assert "KeyError" in (expect_whole(run).error or "")


def test_an_exception_in_a_tool(made: Made) -> None:
    agent: Any = create_agent(made([(r"Paris", call("fail", '{"city": "Paris"}'))]), tools=[fail])
    with pytest.raises(ValueError, match="no weather"), track_latency() as run:
        agent.invoke(QUESTION)
    record = expect_whole(run)
    assert "no weather" in (record.error or "")
    assert "no weather" in (record.tool_calls[0].error or "")
    run.print()


def test_a_tool_that_reports_its_failure_has_failed() -> None:
    @tool(response_format="content")
    def sorry(city: str) -> ToolMessage:
        """Reports."""
        return ToolMessage("no such city", tool_call_id="1", status="error")

    with track_latency() as run:
        sorry.invoke({"name": "sorry", "args": {"city": "x"}, "id": "1", "type": "tool_call"})
    [called] = run.tool_calls
    assert (called.name, called.tool_call_id, called.error) == ("sorry", "1", "no such city")


def test_an_exception_in_the_model(made: Made) -> None:
    model = made(WEATHER)
    agent: Any = create_agent(model, tools=[get_weather])
    model.engine.close()  # type: ignore[union-attr]
    with pytest.raises(EngineClosedError), track_latency() as run:
        agent.invoke(QUESTION)
    record = expect_whole(run)
    assert "EngineClosedError" in (record.model_calls[0].error or "")
    assert record.model_calls[0].phases is None


async def test_a_call_that_is_cancelled_adds_up(made: Made) -> None:
    @tool
    async def wait(city: str) -> str:
        """Waits."""
        await asyncio.sleep(60)
        return "late"

    agent: Any = create_agent(made([(r"Paris", call("wait", '{"city": "Paris"}'))]), tools=[wait])
    with pytest.raises(TimeoutError):
        async with track_latency() as run:
            await asyncio.wait_for(agent.ainvoke(QUESTION), 0.5)
    record = expect_whole(run)
    assert record.error is not None
    assert [call.error is not None for call in record.tool_calls] == [True]


# The budget


def test_a_run_within_its_budget_says_nothing(made: Made) -> None:
    with track_latency(budget_s=60) as run:
        made([]).invoke("Hi")
    assert (run.record.budget_s, run.record.over_budget_s) == (60, 0)


def test_a_run_over_its_budget_warns_with_the_numbers() -> None:
    with pytest.warns(BudgetWarning, match=r"shop took 3\.000 s, 2\.000 s more than its budget of 1 s.*tools") as told:
        expect_over("warn")
    assert told[0].filename == __file__


def test_a_run_over_its_budget_raises_where_that_is_wanted() -> None:
    with pytest.raises(BudgetExceededError, match=r"2\.000 s more"):
        expect_over("raise")


def expect_over(on_over_budget: Any) -> None:
    ticks = iter([0.0, 3.0, 3.0])
    with track_latency("shop", 1, on_over_budget=on_over_budget, clock=lambda: next(ticks)):
        pass


def test_an_error_is_not_hidden_by_the_budget() -> None:
    with pytest.warns(BudgetWarning), pytest.raises(KeyError), track_latency(budget_s=0, on_over_budget="raise"):
        raise KeyError("x")


@pytest.mark.parametrize("wrong", [{"budget_s": -1}, {"budget_s": float("nan")}, {"on_over_budget": "ignore"}])
def test_budgets_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="got"):
        track_latency(**wrong)


# The benchmark


def test_the_benchmark_of_the_account_runs(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "benchmark" / "accounting.py"
    benchmark = runpy.run_path(str(path))
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather of a city.", "parameters": parameters}
    script = {
        "id": "1",
        "tools": [{"type": "function", "function": function}],
        "turns": [[{"role": "user", "content": "How is Paris?"}]],
        "reference": [[{}]],
        "results": [["sunny in Paris"]],
    }
    model = made([*WEATHER, (r"Hi", "one two one two one two one two")])
    benchmark["estimates"](model, ["Hi", "Hi there"], 4, 1)
    benchmark["scripts"](model, [script], None)
    benchmark["cost"](model, "Hi", 2)
    told = capsys.readouterr().out
    assert "gamma 4, 2 prompts" in told
    assert "1 agent scripts, 2 model calls" in told
    assert "what the engine books" in told
    run = RunRecord(began_at=0, total_s=4, model_s=1, tool_s=1, framework_s=1, idle_s=0)
    assert benchmark["gaps"](run, 4.0)["parts and wall time"] == 0.25
