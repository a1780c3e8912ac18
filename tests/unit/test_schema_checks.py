"""Schemas are looked at before any work: their size, and whether their keywords have values of their type."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from agentspec import Grammar, GrammarError
from agentspec.grammars.outlines.json_regex import json_regex
from agentspec.grammars.schema_tools import checked, closed, to_json


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", "parameters": parameters}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def many(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(count)}, **more}


def chain(count: int) -> dict[str, Any]:
    links = {f"d{k}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{k + 1}"}}} for k in range(count)}
    return {"$defs": {**links, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


SELF: dict[str, Any] = {"type": "object"}
SELF["properties"] = {"a": SELF}

TOO_LARGE: list[tuple[str, Any, str]] = [
    ("levels", nested(900), "100 levels"),
    ("levels of lists", {"items": json.loads("[" * 400 + "]" * 400)}, "100 levels"),
    ("a circle of objects", SELF, "100 levels"),
    ("optional properties", many(5_000), "5,000 optional properties; the limit is 500"),
    ("some of them required", many(1_000, required=["p0", "p1"]), "998 optional properties; the limit is 500"),
    ("further down", {"anyOf": [{"items": many(501)}]}, "501 optional properties"),
    (
        "required properties",
        many(6_000, required=[f"p{k}" for k in range(6_000)]),
        "6,000 properties; the limit is 5,000",
    ),
    ("parts", {"enum": [[]] * 60_000}, "50,000 objects and arrays"),
    ("bytes", {"description": "x" * 1_000_001}, "1,000,0.. bytes; the limit is 1,000,000"),
    ("bytes of wide letters", {"description": "é" * 600_000}, "1,200,0.. bytes"),
    ("a chain of references", chain(3_000), "400 schemas deep"),
]


@pytest.mark.parametrize(("schema", "message"), [case[1:] for case in TOO_LARGE], ids=[case[0] for case in TOO_LARGE])
def test_what_is_too_large_is_refused_before_any_work(schema: Any, message: str) -> None:
    for way in (
        Grammar.json_schema,
        lambda schema: Grammar.tools([tool(schema)]),
        lambda schema: Grammar.tools([tool({"type": "object"})], required=False, final=schema),
        lambda schema: Grammar.of({"type": "json_schema", "json_schema": {"schema": schema}}),
        json_regex,
    ):
        with pytest.raises(GrammarError, match=message):
            way(schema)


def test_many_properties_take_no_memory() -> None:
    tracemalloc.start()
    for count in (450, 5_000):
        with pytest.raises(GrammarError):
            json_regex(many(count, additionalProperties=False))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_the_tool_that_is_too_large_is_named() -> None:
    with pytest.raises(GrammarError, match="tool 'find' is more than 100 levels deep; the limit is 100 levels"):
        Grammar.tools([tool(nested(60))])


@pytest.mark.parametrize(
    "schema", [nested(45), many(500), many(2_000, required=[f"p{k}" for k in range(2_000)]), chain(120)]
)
def test_what_is_large_is_taken(schema: Any) -> None:
    assert json.loads(Grammar.json_schema(schema).source) == schema
    assert '"additionalProperties": false' in Grammar.tools([tool(schema)]).source
    assert to_json(closed(schema)).count("additionalProperties") == to_json(schema).count('"properties"')


def test_a_regular_expression_is_counted_before_it_is_built() -> None:
    with pytest.raises(GrammarError, match="more than 300,000"):
        json_regex(many(400, additionalProperties=False))
    assert json_regex(many(40, additionalProperties=False))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar.regex("a" * 300_000),
        lambda: Grammar.choice(["a" * 600_000, "b" * 600_000]),
        lambda: Grammar.lark("start: " + "a" * 9_000_000),
        lambda: Grammar("json_schema", json.dumps({"description": "a" * 1_100_000})),
    ],
)
def test_sources_of_every_kind_are_bounded(make: Any) -> None:
    with pytest.raises(GrammarError, match="the limit is"):
        make()


ABSENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (many(1, required=None), many(1)),
    (many(1, anyOf=None, allOf=None, additionalProperties=None, **{"$ref": None, "$defs": None}), many(1)),
    ({"type": None, "properties": None, "minimum": None, "pattern": None, "title": None}, {}),
    ({"items": None, "type": "array", "maxItems": None, "uniqueItems": None}, {"type": "array"}),
    ({"properties": {"a": None, "b": {"enum": None, "format": None}}}, {"properties": {"a": {}, "b": {}}}),
    ({"anyOf": [{"required": None}, {"items": {"$ref": None}}]}, {"anyOf": [{}, {"items": {}}]}),
    ({"const": None, "default": None, "x-go": None}, {"const": None, "default": None, "x-go": None}),
    ({"enum": [None], "examples": [None]}, {"enum": [None], "examples": [None]}),
    (
        {"properties": {"required": {"type": "string", "required": None}}},
        {"properties": {"required": {"type": "string"}}},
    ),
]


@pytest.mark.parametrize(("schema", "without"), ABSENT)
def test_null_is_absent(schema: dict[str, Any], without: dict[str, Any]) -> None:
    assert checked(schema) == without
    assert Grammar.json_schema(schema) == Grammar.json_schema(without)
    assert Grammar.tools([tool(schema)]) == Grammar.tools([tool(without)])


def test_a_schema_without_nulls_is_the_same_object() -> None:
    schema = many(2, required=["p0"], default=None)
    assert checked(schema) is schema


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"properties": {"b": {}}, "required": False}}}, "required: False at #/properties/a"),
    ({"required": [1]}, "required"),
    ({"required": "a"}, "required"),
    ({"properties": []}, "properties"),
    ({"properties": {"a": "string"}}, "'string' at #/properties/a"),
    ({"patternProperties": {"^a": 1}}, "1 at #/patternProperties/"),
    ({"anyOf": {}}, "anyOf"),
    ({"anyOf": [None]}, "None at #/anyOf/0"),
    ({"allOf": [1]}, "1 at #/allOf/0"),
    ({"items": 3}, "items"),
    ({"additionalProperties": "no"}, "additionalProperties: 'no'"),
    ({"type": 3}, "type: 3"),
    ({"type": ["string", None]}, "type"),
    ({"enum": "a"}, "enum: 'a'"),
    ({"$ref": 1}, "ref: 1"),
    ({"minLength": "3"}, "minLength: '3'"),
    ({"minItems": -1}, "minItems: -1"),
    ({"maxItems": 1.5}, "maxItems: 1.5"),
    ({"maxLength": float("inf")}, "maxLength: inf"),
    ({"minimum": "0"}, "minimum: '0'"),
    ({"multipleOf": True}, "multipleOf: True"),
    ({"uniqueItems": 1}, "uniqueItems: 1"),
    ({"pattern": 1}, "pattern: 1"),
    ({"dependentRequired": {"a": "b"}}, "dependentRequired"),
    ({"$defs": {"a": {"not": []}}}, "not: .* at #/.defs/a"),
]


@pytest.mark.parametrize(("schema", "message"), WRONG)
def test_a_value_of_a_wrong_type_is_named(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Grammar.json_schema(schema)
    with pytest.raises(GrammarError, match=f"tool 'find'.*{message}"):
        Grammar.tools([tool(schema)])
    with pytest.raises(GrammarError, match=f"answer.*{message}"):
        Grammar.tools([], required=False, final=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"minLength": 3.0, "type": "string"},
        {"exclusiveMinimum": True, "minimum": 1, "$schema": "http://json-schema.org/draft-04/schema#"},
        {"items": [{}, {}], "$schema": "http://json-schema.org/draft-07/schema#"},
        {"properties": {"a": {"required": True}}, "$schema": "http://json-schema.org/draft-03/schema#"},
        {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
        {"description": 5, "x-vendor": [None], "readOnly": "yes"},
    ],
)
def test_what_some_draft_allows_is_taken(schema: dict[str, Any]) -> None:
    assert checked(schema) is schema


@pytest.mark.parametrize("parameters", ["{}", 3, ["a"]])
def test_parameters_that_are_no_schema_are_named(parameters: Any) -> None:
    with pytest.raises(GrammarError, match="tool 'find' is a dict or a bool"):
        Grammar.tools([tool(parameters)])
