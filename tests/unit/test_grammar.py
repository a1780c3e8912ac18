"""Descriptions of languages: every usual form is read, equal ones are equal, errors name what was expected."""

from __future__ import annotations

import dataclasses
import enum
import json
import typing
from typing import Any, Literal

import pydantic
import pydantic.v1
import pytest
from scripted import chatml_tokenizer

from agentspec import Grammar, GrammarError
from agentspec.grammars import compiler
from agentspec.grammars.schema_tools import closed
from agentspec.grammars.tool_calls import ToolCallFormat


class Point(pydantic.BaseModel):
    x: int
    y: int | None = None


class OldPoint(pydantic.v1.BaseModel):
    x: int


class PointDict(typing.TypedDict):
    x: int


@dataclasses.dataclass
class PointData:
    x: int


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.Enum):
    SMALL = 1
    LARGE = 2


class Plain:
    """Nothing that pydantic could describe."""


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}

FORMS: list[tuple[Any, list[str], list[str]]] = [
    (Point, ['{"x": 1}', '{"x": 1, "y": null}'], ['{"y": 1}', '{"x": "1"}']),
    (OldPoint, ['{"x": 1}'], ["{}"]),
    (PointDict, ['{"x": 1}'], ["{}"]),
    (PointData, ['{"x": 1}'], ["{}"]),
    (Colour, ["red", "blue"], ['"red"', "green"]),
    (Size, ["1", "2"], ["3"]),
    (Literal["yes", "no"], ["yes"], ["maybe"]),
    (Literal[1, 2], ["2"], ["3", "yes"]),
    (list[int], ["[1, 2]"], ['["1"]']),
    (int | None, ["7", "null"], ["x"]),
    (["yes", "no"], ["no"], ["maybe"]),
    (SCHEMA, ['{"x": 1}'], ['{"x":1}']),
    ({"type": "json_object"}, ["{}", '{"a": [1]}'], ["[]"]),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, ['{"x": 1}'], ["[]"]),
    (TOOL, ['<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>'], ["move", '{"x": 1}']),
    ([TOOL], ['<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>'], ["move"]),
    (Grammar.regex("[ab]+"), ["a", "abba"], ["", "c"]),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Any:
    return compiler(tokenizer, len(tokenizer))


def accepts(grammars: Any, tokenizer: Any, grammar: Grammar, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    return all(map(matcher.accept_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()


@pytest.mark.parametrize(("form", "inside", "outside"), FORMS, ids=[str(form)[:40] for form, _, _ in FORMS])
def test_a_description_means_its_language(
    grammars: Any, tokenizer: Any, form: Any, inside: list[str], outside: list[str]
) -> None:
    grammar = Grammar.of(form)
    assert all(accepts(grammars, tokenizer, grammar, text) for text in inside)
    assert not any(accepts(grammars, tokenizer, grammar, text) for text in outside)


@pytest.mark.parametrize("form", [form for form, _, _ in FORMS], ids=[str(form)[:40] for form, _, _ in FORMS])
def test_equal_descriptions_are_equal_and_survive_json(form: Any) -> None:
    one, other = Grammar.of(form), Grammar.of(form)
    assert one == other
    assert len({one, other}) == 1
    assert Grammar(**json.loads(json.dumps(dataclasses.asdict(one)))) == one


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.of("a string"), "Grammar.regex"),
        (lambda: Grammar.of(3), "can be made of"),
        (lambda: Grammar.of(Plain), "JSON Schema"),
        (lambda: Grammar.of({"type": "json_schema"}), "response format"),
        (lambda: Grammar.regex(""), "non-empty"),
        (lambda: Grammar.choice([]), "at least one option"),
        (lambda: Grammar.choice(["a", ""]), "non-empty"),
        (lambda: Grammar.tools([]), "at least one tool"),
        (lambda: Grammar.tools([{"name": "move"}]), "OpenAI tool dict"),
        (lambda: Grammar.tools([TOOL], parallel=0), "parallel=0"),
        (lambda: Grammar.json_schema({"enum": [object()]}), "JSON values"),
    ],
)
def test_what_describes_nothing_is_refused(make: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        make()


ENDLESS = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/n"}},
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(unclosed"), "regex"),
        (Grammar.regex("[^\\s\\S]"), "nothing matches"),
        (Grammar.json_schema(False), "no value satisfies"),
        (Grammar.json_schema({"type": "object", "if": {}, "unheard_of": 1, "not": {}}), "not"),
        (Grammar.lark("start: undefined"), "undefined"),
        (Grammar.json_schema({"$ref": "#"}), "nothing matches"),
        (Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "nothing matches"),
        (Grammar.json_schema({"$defs": {"n": {**ENDLESS}}, "$ref": "#/$defs/n"}), "No text has an end"),
        (Grammar.json_schema({"$ref": "https://example.org/there.json"}), "example.org"),
        (Grammar.json_schema({"enum": []}), "empty"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (Grammar.json_schema({"type": "string", "pattern": "a(?!b)"}), "look-around"),
    ],
)
def test_what_no_text_can_satisfy_is_refused_before_any_token(grammars: Any, grammar: Grammar, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        grammars.matcher(grammar)


def test_formats_that_json_schema_does_not_know_assert_nothing(grammars: Any, tokenizer: Any) -> None:
    properties = {"format": {"type": "string", "format": "color"}, "n": {"const": {"format": "x"}}}
    grammar = Grammar.json_schema({"type": "object", "properties": properties, "required": ["format", "n"]})
    assert accepts(grammars, tokenizer, grammar, '{"format": "red", "n": {"format": "x"}}')
    assert not accepts(grammars, tokenizer, grammar, '{"format": "red", "n": {}}')
    assert not accepts(grammars, tokenizer, Grammar.json_schema({"type": "string", "format": "uuid"}), '"red"')


def test_parallel_calls_are_bounded_and_each_is_valid(grammars: Any, tokenizer: Any) -> None:
    grammar = Grammar.tools([TOOL], parallel=2)
    call = '<tool_call>\n{"name": "move", "arguments": {"x": 1}}\n</tool_call>'
    assert accepts(grammars, tokenizer, grammar, call)
    assert accepts(grammars, tokenizer, grammar, f"{call}\n{call}")
    assert not accepts(grammars, tokenizer, grammar, f"{call}\n{call}\n{call}")
    assert not accepts(grammars, tokenizer, grammar, f"{call}\n{call.replace('1', 'one')}")


def test_closed_schemas_hold_what_they_name() -> None:
    part = {"type": "object", "properties": {"a": {"type": "integer"}}}
    shut = {**part, "additionalProperties": False}
    assert closed(part) == shut
    assert closed({"type": "array", "items": part})["items"] == shut
    assert closed({"properties": {"b": part}, "$defs": {"c": part}})["$defs"]["c"] == shut
    assert closed({"anyOf": [part, {"type": "null"}]}) == {"anyOf": [shut, {"type": "null"}]}
    assert closed({"allOf": [part]}) == {"allOf": [shut]}
    for as_it_is in ({"type": "object"}, {**part, "additionalProperties": True}, True):
        assert closed(as_it_is) == as_it_is


def test_outlines_types_are_read(grammars: Any, tokenizer: Any) -> None:
    types = pytest.importorskip("outlines.types")
    dsl = pytest.importorskip("outlines.types.dsl")
    for term, inside, outside in (
        (types.Regex("[ab]+"), "ab", "c"),
        (types.Choice(["yes", "no"]), "no", "maybe"),
        (types.JsonSchema(SCHEMA), '{"x": 1}', '{"y": 1}'),
        (types.CFG('start: "a" | "b"'), "b", "c"),
        (dsl.either("one", dsl.exactly(2, types.digit)), "42", "4"),
    ):
        grammar = Grammar.of(term)
        assert accepts(grammars, tokenizer, grammar, inside)
        assert not accepts(grammars, tokenizer, grammar, outside)


def test_another_form_of_calls(grammars: Any, tokenizer: Any) -> None:
    form = ToolCallFormat("[CALL]", ' {{"call": {name}, "with": ', "}}", between=";")
    grammar = Grammar.tools([TOOL], form=form)
    assert form.call("move", {"x": 1}) == '[CALL] {"call": "move", "with": {"x": 1}}'
    assert accepts(grammars, tokenizer, grammar, form.call("move", {"x": 1}))


def test_tools_that_change_between_calls_make_another_grammar() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
    before = Grammar.tools([tool])
    assert Grammar.tools([tool]) == before
    tool["function"]["parameters"]["properties"]["b"] = {}
    assert Grammar.tools([tool]) != before
    tool["function"]["parameters"]["properties"]["b"] = {"const": object()}
    with pytest.raises(GrammarError, match="'f'"):
        Grammar.tools([tool])
