"""What readers of this code found wrong: each stays right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

import jsonschema
import pytest
from answering import answering, call
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import OutputParserException
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel
from scripted import QUESTION, Says, ScriptedModel, tokenizer

from agentspec import (
    Grammar,
    GrammarError,
    InvalidRequestError,
    LocalEngine,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.chat import AnswerParser, ChatFormat
from agentspec.chat.dialects import DIALECTS, detect_dialect
from agentspec.grammars import compiler
from agentspec.grammars.schema_tools import closed
from agentspec.grammars.tool_calls import ReasoningFormat
from langchain_agentspec import AgentSpecLLM, ChatAgentSpec
from langchain_agentspec.messages import to_chat
from langchain_agentspec.structured_output import described, json_schema_of


def get_weather(city: str, days: int = 1) -> str:
    """The weather."""
    return "sunny"


@pytest.mark.parametrize("length", [200, 257, 258, 900])
def test_a_long_prompt_of_a_model_without_a_cache_is_read(length: int) -> None:
    known = tokenizer()
    model = ScriptedModel(len(known), length, known.encode("Hi"))
    engine = LocalEngine(SpeculativeDecoder(model), known)
    request = Request([300] * length, SamplingParams(temperature=0, max_tokens=2), timeout_s=30)
    assert engine.generate([request])[0][0].tokens[:1] == tuple(known.encode("Hi"))[:1]
    engine.close()


@pytest.mark.parametrize("limit", range(4, 24, 3))
@pytest.mark.parametrize("template", ["llama3", "qwen", "mistral", "mistral_args"])
def test_a_call_cut_short_is_never_a_valid_call(says: Says, template: str, limit: int) -> None:
    model = says("anything", template)
    bound = model.bind_tools([get_weather], tool_choice="any")
    whole = bound.invoke(QUESTION)
    for answer in (bound.invoke(QUESTION, max_tokens=limit), bound.invoke(QUESTION, stop=['"city'])):
        if answer.response_metadata["finish_reason"] != "tool_calls":
            assert answer.tool_calls == []
            assert answer.invalid_tool_calls or answer.content != whole.content


def test_schemas_reach_the_grammar_whole() -> None:
    for schema in (
        {"title": "Colours", "type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1},
        {"title": "One", "enum": ["a", "b"]},
        {"title": "Either", "anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"name": "f", "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    ):
        sent = json_schema_of(schema)
        assert {key: sent[key] for key in schema} == schema


class Node(BaseModel):
    """A node."""

    name: str
    children: list[Node] = []


def plant(root: Node) -> str:
    """Plant a tree."""
    return root.name


@pytest.mark.parametrize("schema", [json_schema_of(Node), described(plant)["function"]["parameters"]])
def test_types_that_refer_to_themselves_are_enforced(schema: dict[str, Any]) -> None:
    wrong = {"name": "a", "children": [17, "x"]}
    value = {"root": wrong} if "root" in json.dumps(schema.get("properties")) else wrong
    assert not jsonschema.Draft202012Validator(schema).is_valid(value)


def test_a_function_needs_no_docstring() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    assert described(add)["function"]["parameters"]["required"] == ["a", "b"]


def test_a_recursive_class_comes_back_as_an_instance(says: Says) -> None:
    wanted = '{"name": "a", "children": [{"name": "b", "children": []}]}'
    made = says(wanted, "qwen").with_structured_output(Node).invoke(QUESTION)
    assert made == Node(name="a", children=[Node(name="b")])


@pytest.mark.parametrize("budget", range(9))
def test_a_budget_that_ends_inside_a_character_closes_the_thought_behind_it(says: Says, budget: int) -> None:
    answer = says("<think>\n😀😀😀😀😀", thinking_budget=budget).invoke(QUESTION, max_tokens=40)
    thought = answer.additional_kwargs.get("reasoning_content", "")
    assert thought == "😀" * len(thought)
    assert len(thought) <= 1 + budget // 4


def test_no_text_ends_in_a_thought_that_has_to_be_closed() -> None:
    """Where the language would let it end, the closing still comes first."""
    known = tokenizer("qwen3")
    end = known.eos_token_id
    thought = ReasoningFormat()
    grammar = Grammar.tools([described(get_weather)], required=False, thought=thought, thinking_budget=2)
    for more in range(4):
        script = [*known.encode("<think>\n"), *known.encode("a" * more), end, end, end, end]
        engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 1, script)), known)
        [[done]] = engine.generate([Request([1], SamplingParams(temperature=0, max_tokens=30), grammar)])
        assert done.tokens[-1] == end or done.finish_reason == "length"
        assert more < 1 or "</think>" in done.text
        engine.close()


@pytest.mark.parametrize("begins", ["<think>One", "\n<think>\nOne", "<think>\n\nOne"])
def test_a_thought_is_one_whatever_blanks_it_begins_with(says: Says, begins: str) -> None:
    answer = says(f"{begins}, two.</think>\n\nHi.").invoke(QUESTION)
    assert (answer.additional_kwargs["reasoning_content"], answer.content) == ("One, two.", "Hi.")


def test_engines_that_come_and_go_share_no_cached_answers() -> None:
    set_llm_cache(InMemoryCache())
    try:
        for number in range(6):
            engine, _ = answering([(r"", f"Number {number}.")])
            assert ChatAgentSpec(engine=engine).invoke("Hi").text == f"Number {number}."
            engine.close()
            del engine
    finally:
        set_llm_cache(None)


@pytest.fixture
def llm() -> Iterator[AgentSpecLLM]:
    known = tokenizer()
    engine = LocalEngine(SpeculativeDecoder(ScriptedModel(len(known), 1, known.encode(" Hello"))), known)
    yield AgentSpecLLM(engine=engine, max_tokens=8)
    engine.close()


def test_settings_of_a_call_are_part_of_a_plain_models_cache_key(llm: AgentSpecLLM) -> None:
    set_llm_cache(InMemoryCache())
    try:
        assert [llm.invoke("x", grammar=[word]) for word in ("yes", "no")] == ["yes", "no"]
        assert llm.bind(grammar=["maybe"]).invoke("x") == "maybe"
        assert llm.batch(["x"], grammar=["hm"]) == ["hm"]
        assert len(llm.invoke("x", max_tokens=1)) < len(llm.invoke("x"))
    finally:
        set_llm_cache(None)


def test_a_stop_string_may_stand_alone(says: Says, llm: AgentSpecLLM) -> None:
    model = says("The end. Observation: none.", "qwen")
    assert model.invoke(QUESTION, stop="Observation:").content == "The end. "  # type: ignore[arg-type]
    assert "Hel" in llm.invoke("x", stop="zz")  # type: ignore[arg-type]


def test_ids_of_the_history_go_nowhere_else() -> None:
    known = tokenizer("mistral")
    chat = ChatFormat(known)
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "INST"}]
    spelled = [known.encode(letter)[0] for letter in "INST"]
    told = [history[0], {**history[1], "token_ids": spelled}, {"role": "user", "content": "And?"}]
    plain = [*history, {"role": "user", "content": "And?"}]
    assert chat.render(told) == chat.render(plain)
    qwen = ChatFormat(tokenizer("qwen"))
    foreign = AIMessage("hello there", response_metadata={"agentspec": {"token_ids": [50_000, 60_000]}})
    assert max(qwen.render(to_chat([HumanMessage("Hi"), foreign, HumanMessage("And?")]))) < len(tokenizer("qwen"))


UNIQUE = {
    "title": "Numbers",
    "type": "array",
    "items": {"type": "integer", "not": {"const": 3}},
    "minItems": 1,
    "maxItems": 2,
}


async def test_an_invalid_answer_is_reported_where_that_was_asked_for(says: Says) -> None:
    model = says("[3]", "qwen", validate_output=True)
    both = model.with_structured_output(UNIQUE, include_raw=True)
    for made in (both.invoke(QUESTION), await both.ainvoke(QUESTION)):
        assert made["parsed"] is None
        assert isinstance(made["parsing_error"], OutputParserException)
        assert made["raw"].content == "[3]"
    with pytest.raises(OutputParserException, match="not"):
        model.with_structured_output(UNIQUE).invoke(QUESTION)
    with pytest.raises(OutputParserException, match="not"):
        model.invoke(QUESTION, response_format={"type": "json_schema", "json_schema": {"schema": UNIQUE}})


@pytest.mark.parametrize("body", ["<function={{ c.name }}>", "{{ c.name }}<arg_key>"])
def test_templates_that_write_calls_as_xml_are_not_hermes(body: str) -> None:
    template = "{% for c in message.tool_calls %}<tool_call>" + body + "</tool_call>{% endfor %}"
    assert detect_dialect(template).name == "plain"


def test_no_call_is_read_where_none_may_be_made() -> None:
    known = tokenizer("qwen")
    known.response_template = {"version": 1, "start_anchor": "assistant\n", "fields": {"content": {}}}
    chat = ChatFormat(known)
    assert isinstance(chat.parser([1], []), AnswerParser)
    text = "Say <tool_call>hello</tool_call> and more."
    parser = chat.parser([1], [])
    assert parser.push(text).text + parser.finish()[0].text == text


def test_closing_a_schema_never_empties_it() -> None:
    known = tokenizer()
    for schema in (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {
            "$defs": {"B": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            "$ref": "#/$defs/B",
            "properties": {"c": {"type": "integer"}},
            "required": ["c"],
        },
    ):
        compiler(known, len(known)).matcher(Grammar.json_schema(closed(schema)))


class Inner(TypedDict):
    """Within."""

    n: int


class Outer(TypedDict):
    """Around."""

    a: str
    b: NotRequired[str]
    inner: list[Inner]


def test_typed_dicts_may_nest_and_leave_out(says: Says) -> None:
    schema = json.loads(Grammar.of(Outer).source)
    assert sorted(schema["required"]) == ["a", "inner"]
    wanted = '{"a": "x", "inner": [{"n": 1}]}'
    assert says(wanted, "qwen").with_structured_output(Outer).invoke(QUESTION) == json.loads(wanted)
    tools = [convert_to_openai_tool(json_schema_of(Outer))]
    by_call = says(call("Outer", wanted), "qwen", tools=tools).with_structured_output(Outer, method="function_calling")
    assert by_call.invoke(QUESTION) == json.loads(wanted)


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), "5"])
def test_a_timeout_that_makes_no_sense_is_refused(says: Says, timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        says("Hi.", "qwen").invoke(QUESTION, timeout=timeout)


def test_a_choice_is_of_texts_and_not_of_letters() -> None:
    with pytest.raises(GrammarError, match="'yes'"):
        Grammar.choice("yes")


def test_a_stop_token_ends_no_grammar_in_its_middle() -> None:
    known = tokenizer()
    [stop] = known.encode("x")
    model = ScriptedModel(len(known), 1, known.encode('{"a": "x"}'))
    engine = LocalEngine(SpeculativeDecoder(model), known)
    grammar = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(stop,))
    [[done]] = engine.generate([Request([1], params, grammar)])
    assert done.finish_reason == "length" or json.loads(done.text)
    engine.close()


def test_final_json_that_looks_like_a_call_of_no_tool_is_json() -> None:
    parser = AnswerParser(DIALECTS["llama3"].form, begins_with_call=True, names={"now"})
    text = '{"name": "Bob", "parameters": {}}'
    assert parser.push(text).text + parser.finish()[0].text == text
    parser = AnswerParser(DIALECTS["llama3"].form, begins_with_call=True, names={"now"})
    parser.push('{"name": "now", "parameters": {}}')
    assert [found.name for found in parser.finish()[1]] == ["now"]


async def test_an_error_of_one_prompt_leaves_no_other_behind(llm: AgentSpecLLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        await llm.agenerate(["hello", ""], max_tokens=5000)
    assert llm.engine is not None
    assert llm.invoke("x", max_tokens=2)
