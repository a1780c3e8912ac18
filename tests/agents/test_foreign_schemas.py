"""Tools whose schemas no grammar expresses whole: their calls are checked, the others stay enforced, all is stated."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from answering import answering, call
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk

from agentspec import GrammarError
from langchain_agentspec import ChatAgentSpec

OPEN = {"type": "object"}


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def field(said: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": said}, "required": ["x"], **beside}


# Parameters, a keyword that no grammar expresses, arguments that it allows, and some that it refuses.
SCHEMAS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unique": (
        field({"type": "array", "uniqueItems": True}),
        "uniqueItems at #/properties/x",
        '{"x": [1, 2]}',
        '{"x": [1, 1]}',
    ),
    "if": (
        field({"type": "integer"}, **{"if": {"properties": {"x": {"minimum": 5}}}, "then": {"required": ["y"]}}),
        "if at #",
        '{"x": 1}',
        '{"x": 7}',
    ),
    "not": (field({"not": {"type": "string"}}), "not at #/properties/x", '{"x": 1}', '{"x": "a"}'),
    "contains": (
        field({"type": "array", "contains": {"type": "null"}}),
        "contains at",
        '{"x": [1, null]}',
        '{"x": [1]}',
    ),
    "lookahead": (field({"type": "string", "pattern": "^(?!b)[ab]+$"}), "pattern at", '{"x": "ab"}', '{"x": "ba"}'),
    "backreference": (field({"type": "string", "pattern": r"^(a|b)\1$"}), "pattern at", '{"x": "aa"}', '{"x": "ab"}'),
    "format": (field({"type": "string", "format": "json-pointer"}), "format at", '{"x": "/a"}', '{"x": "a"}'),
    "iri": (field({"type": "string", "format": "iri"}), "format at", '{"x": "http://\u00e9"}', '{"x": "\u00e9"}'),
    "oneOf": (
        field({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}),
        "oneOf at",
        '{"x": 1}',
        '{"x": 4}',
    ),
    "names": ({**OPEN, "propertyNames": {"pattern": "^a"}}, "propertyNames at #", '{"ab": 1}', '{"b": 1}'),
    "patterns": (
        {**OPEN, "patternProperties": {"^(?=a)": {"type": "integer"}}, "additionalProperties": False},
        "patternProperties at #",
        '{"ab": 1}',
        '{"ab": "c"}',
    ),
    "elsewhere": (
        field({"$ref": "http://example.invalid/schema"}, **{"not": {"required": ["y"]}, "additionalProperties": True}),
        "x",
        '{"x": {"a": 1}}',
        '{"x": 1, "y": 2}',
    ),
}
PLAIN = tool("plain", **field({"type": "integer"}))


def chat(says: str, tools: list[dict[str, Any]], **settings: Any) -> tuple[Any, Any]:
    engine, _ = answering([(r"", says)])
    return engine, ChatAgentSpec(engine=engine, max_tokens=120, **settings).bind_tools([PLAIN, *tools])


def ask(says: str, tools: list[dict[str, Any]], **settings: Any) -> AIMessage:
    engine, bound = chat(says, tools, **settings)
    try:
        return bound.invoke("Go on.")
    finally:
        engine.close()


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_call_that_the_schema_refuses_is_an_invalid_call_with_the_reason(name: str) -> None:
    parameters, left_out, good, bad = SCHEMAS[name]
    tools = [tool("foreign", **parameters)]
    fine, refused = ask(call("foreign", good), tools), ask(call("foreign", bad), tools)
    assert [made["name"] for made in fine.tool_calls] == ["foreign"]
    assert not fine.invalid_tool_calls
    assert fine.response_metadata["finish_reason"] == "tool_calls"
    assert not refused.tool_calls
    assert refused.response_metadata["finish_reason"] == "stop"
    [made] = refused.invalid_tool_calls
    assert made["name"] == "foreign"
    assert made["args"] == bad
    assert made["id"]
    assert made["error"]
    assert "$" in made["error"]
    for message in (fine, refused):
        [stated] = message.response_metadata["agentspec"]["checked_tools"]
        assert stated["name"] == "foreign"
        assert any(left_out in text for text in stated["left_out"])
    assert refused.response_metadata["agentspec"]["invalid_calls"] == {made["id"]: made["error"]}


def test_a_reference_that_leads_nowhere_is_stated_as_unchecked() -> None:
    parameters, _, good, _ = SCHEMAS["elsewhere"]
    [stated] = ask(call("foreign", good), [tool("foreign", **parameters)]).response_metadata["agentspec"][
        "checked_tools"
    ]
    assert stated["unchecked"] == ["$ref to http://example.invalid/schema"]


def test_what_can_be_expressed_of_such_a_schema_is_enforced() -> None:
    """The model wants to write a string: the grammar still demands an array of integers."""
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    message = ask(call("foreign", '{"x": "ab"}'), [tool("foreign", **field(items))])
    made = [*message.tool_calls, *message.invalid_tool_calls]
    assert '"ab"' not in str(made)
    assert made[0]["name"] == "foreign"


def test_the_other_tools_stay_enforced_and_unmarked() -> None:
    message = ask(call("plain", '{"x": "ab"}'), [tool("foreign", **SCHEMAS["unique"][0])])
    assert isinstance(message.tool_calls[0]["args"]["x"], int)
    engine, bound = chat(call("plain", '{"x": 1}'), [])
    assert "checked_tools" not in bound.invoke("Go on.").response_metadata["agentspec"]
    engine.close()


def test_streams_and_samples_are_checked_too() -> None:
    tools = [tool("foreign", **SCHEMAS["unique"][0])]
    engine, bound = chat(call("foreign", '{"x": [1, 1]}'), tools, temperature=0)
    try:
        chunks = list(bound.stream("Go on."))
        assert chunks[-1].invalid_tool_calls[0]["error"].startswith("$.x")
        whole = functools.reduce(AIMessageChunk.__add__, chunks)
        assert not whole.tool_calls
        [made] = whole.invalid_tool_calls
        assert list(whole.response_metadata["agentspec"]["invalid_calls"]) == [made["id"]]
        result = bound.bind(n=3, temperature=1.0, seed=1).invoke("Go on.")
        assert not result.tool_calls
        assert result.invalid_tool_calls[0]["error"]
        both = bound.bind(parallel_tool_calls=True)
        assert both.invoke("Go on.").invalid_tool_calls[0]["error"]
    finally:
        engine.close()


async def test_an_event_loop_gets_the_same() -> None:
    engine, bound = chat(call("foreign", '{"x": [1, 1]}'), [tool("foreign", **SCHEMAS["unique"][0])])
    try:
        assert (await bound.ainvoke("Go on.")).invalid_tool_calls[0]["error"].startswith("$.x")
        chunks = [chunk async for chunk in bound.astream("Go on.")]
        assert not chunks[-1].tool_calls
        assert chunks[-1].invalid_tool_calls[0]["error"]
    finally:
        engine.close()


def test_of_parallel_calls_each_is_judged_by_itself() -> None:
    tools = [tool("foreign", **SCHEMAS["unique"][0])]
    said = call("foreign", '{"x": [1, 2]}') + "\n" + call("foreign", '{"x": [2, 2]}') + "\n" + call("plain", '{"x": 3}')
    message = ask(said, tools, parallel_tool_calls=True)
    assert [(made["name"], made["args"]) for made in message.tool_calls] == [
        ("foreign", {"x": [1, 2]}),
        ("plain", {"x": 3}),
    ]
    assert [made["args"] for made in message.invalid_tool_calls] == ['{"x": [2, 2]}']


def test_a_call_that_repeats_a_key_is_invalid() -> None:
    parameters = {**OPEN, "additionalProperties": {"type": "integer"}, "not": {"required": ["z"]}}
    message = ask(call("foreign", '{"a": 1, "a": 2}'), [tool("foreign", **parameters)])
    assert "repeats the key 'a'" in message.invalid_tool_calls[0]["error"]


def test_function_calling_names_the_reason() -> None:
    engine, _ = answering([(r"", call("Answer", '{"x": [1, 1]}'))])
    schema = {"title": "Answer", "description": "x", **SCHEMAS["unique"][0]}
    model = ChatAgentSpec(engine=engine, max_tokens=60).with_structured_output(schema, method="function_calling")
    with pytest.raises(OutputParserException, match="non-unique"):
        model.invoke("Go on.")
    engine.close()


def test_a_final_schema_beside_tools_is_refused_by_the_name_of_the_keyword() -> None:
    engine, bound = chat("{}", [])
    for name in ("unique", "if", "lookahead", "format"):
        parameters, left_out, _, _ = SCHEMAS[name]
        form = {"type": "json_schema", "json_schema": {"schema": parameters}}
        with pytest.raises(GrammarError, match=left_out.split(" at")[0]):
            bound.bind(response_format=form).invoke("Go on.")
    engine.close()


def test_parameters_that_are_no_schema_are_refused_with_the_name_of_the_tool() -> None:
    with pytest.raises(GrammarError, match=r"(?s)'broken'.*type"):
        ask("Hello.", [tool("broken", **field({"type": "text"}))])


def test_null_keywords_of_a_checked_tool_are_absent() -> None:
    parameters = {**SCHEMAS["unique"][0], "additionalProperties": None, "description": None}
    message = ask(call("foreign", '{"x": [1, 1]}'), [tool("foreign", **parameters)])
    assert "non-unique" in message.invalid_tool_calls[0]["error"]


def test_parameters_beyond_the_bounds_are_refused_with_the_name_of_the_tool() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    with pytest.raises(GrammarError, match=r"'deep'.*levels"):
        ask("Hello.", [tool("deep", **field(deep))])
