"""Closed schemas: every instance is one of the open schema, and no declared property is taken away."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from typing import Any

import jsonschema
import pytest
from random_schemas import byte_tokenizer, instances, less_unnamed, named_paths, random_schema, written_orders

from agentspec import Grammar, GrammarError
from agentspec.grammars.llguidance import Compiler, LLGuidanceMatcher
from agentspec.grammars.schema_tools import arguments_schema, closed

SWEEPS = int(os.environ.get("AGENTSPEC_SCHEMA_SWEEPS", "1"))  # the last layer makes more schemas
SEEDS = 14
BLOCK = 12  # schemas of a seed
DEPTH = 3  # names within each other that are looked for


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = byte_tokenizer()
    return Compiler(tokenizer, len(tokenizer))


def takes(matcher: LLGuidanceMatcher, value: Any) -> bool:
    """Whether a grammar over single bytes takes a value, its properties in any order."""
    return any(_reads(matcher, json.dumps(order)) for order in itertools.islice(written_orders(value), 60))


def _reads(matcher: LLGuidanceMatcher, text: str) -> bool:
    ids = byte_tokenizer_ids(text)
    taken = len(list(itertools.takewhile(matcher.accept_token, ids)))
    read = taken == len(ids) and matcher.is_accepting()
    matcher.rollback(taken)
    return read


_TOKENIZER = byte_tokenizer()


def byte_tokenizer_ids(text: str) -> list[int]:
    ids: list[int] = _TOKENIZER.encode(text)
    return ids


@pytest.mark.parametrize("seed", range(SEEDS * SWEEPS))
def test_closing_takes_no_declared_property_away(seed: int) -> None:
    for index in range(BLOCK):
        rng = random.Random(f"{seed}.{index}")
        schema = random_schema(rng)
        shut = closed(schema)
        known = list(instances(rng, schema, 40))
        written = json.dumps([schema, shut])
        found = list(instances(rng, shut, 30))
        assert all(is_valid(schema, value) for value in found), f"allows more: {written}"
        tried = [*known, *(less_unnamed(value, [schema], schema) for value in known)]
        found += [value for value in tried if is_valid(shut, value)]
        wanted = {path for value in known for path in named_paths(value, schema, schema) if len(path) <= DEPTH}
        for tries in (0, 100, 300, 1000, 3000):  # what the first tries did not find
            found += instances(rng, shut, tries)
            tried = [less_unnamed(value, [schema], schema, rng) for value in instances(rng, schema, tries)]
            found += [value for value in tried if is_valid(shut, value)]
            left = wanted - {path for value in found for path in named_paths(value, schema, schema)}
            if not left and (found or not known):
                break
        assert found or not known, f"empty: {written}"
        assert not left, f"{left} can no longer occur: {written}"


@pytest.mark.parametrize("seed", range(8 * SWEEPS))
def test_the_grammar_of_a_closed_schema_says_every_declared_property(compiler: Compiler, seed: int) -> None:
    compiled = 0
    for index in range(BLOCK):
        rng = random.Random(f"grammar {seed}.{index}")
        schema = random_schema(rng, is_plain=True)
        shut = closed(schema)
        known = list(instances(rng, schema, 30))
        known += [less_unnamed(value, [schema], schema) for value in known]
        found = [value for value in known if is_valid(shut, value)] + list(instances(rng, shut, 30))
        if not found:
            continue
        try:
            matcher = compiler.matcher(Grammar.json_schema(shut))
        except GrammarError as error:  # what it does not build; never for want of a text
            if re.search("nsatisfiable|nothing matches|No text has an end", str(error)):
                with pytest.raises(GrammarError):
                    compiler.matcher(Grammar.json_schema(schema))
            continue
        compiled += 1
        left = {path for value in found for path in named_paths(value, schema, schema)}
        for value in sorted(found, key=lambda value: len(json.dumps(value))):
            named = set(named_paths(value, schema, schema))
            if named & left and takes(matcher, value):
                left -= named
        assert not left, f"{left} cannot occur: {json.dumps([schema, shut])}"
    assert compiled


def part(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


def needs(name: str) -> dict[str, Any]:
    return part(name, required=[name])


ID = part("id", required=["id"])
DEFINITIONS = {"M": needs("m"), "N": needs("n"), "Base": part("a", required=["a"])}
REFS = [{"$ref": "#/$defs/M"}, {"$ref": "#/$defs/N"}]

CASES: list[tuple[str, dict[str, Any], list[Any], list[Any]]] = [
    ("allOf of a reference", {"allOf": [{"$ref": "#/$defs/Base"}]}, [{"a": 1}], [{}, {"a": 1, "z": 1}]),
    ("a reference", {"$ref": "#/$defs/Base"}, [{"a": 1}], [{"a": 1, "z": 1}]),
    ("inheritance", {"allOf": [{"$ref": "#/$defs/Base"}, part("b")]}, [{"a": 1, "b": 1}], [{"b": 1}, {"a": 1, "z": 1}]),
    ("beside a reference", {**part("b"), "$ref": "#/$defs/Base"}, [{"b": 1, "a": 1}], [{"b": 1}, {"a": 1, "z": 1}]),
    ("beside anyOf", {**ID, "anyOf": [needs("m"), needs("n")]}, [{"id": 1, "m": 1}, {"id": 1, "n": 1}], [{"id": 1}]),
    ("anyOf at once", {**ID, "anyOf": REFS}, [{"id": 1, "m": 1, "n": 1}], [{"id": 1, "m": 1, "z": 1}]),
    ("a member's property", {**ID, "anyOf": REFS}, [{"id": 1, "m": 1}], [{"id": 1, "m": 1, "n": "x"}]),
    ("beside oneOf", {**ID, "oneOf": [needs("m"), needs("n")]}, [{"id": 1, "m": 1}], [{"id": 1, "m": 1, "n": 1}]),
    ("oneOf of references", {**ID, "oneOf": REFS}, [{"id": 1, "n": 1}], [{"id": 1}, {"id": 1, "n": 1, "z": 1}]),
    ("a union", {"oneOf": REFS}, [{"m": 1}, {"n": 1}], [{"m": 1, "n": 1}, {}, {"m": 1, "z": 1}]),
    ("one of two names", {**part("a", "b"), "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}], [{}]),
    ("some of two", {**part("a", "b"), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1, "b": 1}], [{}]),
    ("a name that is required only", part("a", required=["b"]), [{"a": 1, "b": "x"}], [{"a": 1}, {"b": 1, "z": 1}]),
    ("deep", {"properties": {"x": {**ID, "anyOf": REFS}}, "type": "object"}, [{"x": {"id": 1, "m": 1}}], [{"z": 1}]),
    (
        "in a list",
        {"type": "array", "items": {"allOf": REFS}},
        [[{"m": 1, "n": 1}]],
        [[{"m": 1}], [{"m": 1, "n": 1, "z": 1}]],
    ),
    ("both parts", {"allOf": [{"anyOf": REFS}, part("c")]}, [{"m": 1, "c": 1}, {"n": 1}], [{"c": 1}]),
    (
        "a part of two minds",
        {"allOf": [{"properties": {"x": part("a")}}, {"properties": {"x": part("b")}}], "type": "object"},
        [{"x": {"a": 1, "b": 1}}],
        [{"z": 1}],
    ),
    ("open on purpose", {**ID, "allOf": [{"additionalProperties": True}]}, [{"id": 1, "z": 1}], [{}]),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_objects_hold_what_their_schemas_name(
    compiler: Compiler, schema: dict[str, Any], inside: list[Any], outside: list[Any]
) -> None:
    shut = closed({**schema, "$defs": DEFINITIONS})
    matcher = compiler.matcher(Grammar.json_schema(shut))
    for value in inside:
        assert is_valid(shut, value)
        assert takes(matcher, value)
    for value in outside:
        assert not is_valid(shut, value)
        assert not takes(matcher, value)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (None, [{}]),
        ({"type": "object"}, [{}]),
        ({"type": "object", "properties": {}}, [{}]),
        ({"allOf": [{"$ref": "#/$defs/Base"}], "$defs": DEFINITIONS}, [{"a": 1}]),
        ({"$ref": "#/$defs/Base", "$defs": DEFINITIONS}, [{"a": 1}]),
        ({"anyOf": REFS, "$defs": DEFINITIONS}, [{"m": 1}, {"n": 1}]),
        ({"if": {"required": ["a"]}, "then": {"properties": {"b": {"const": 1}}}}, [{}, {"a": 1, "b": 1}]),
        ({"patternProperties": {"^x": {}}}, [{}, {"x1": 1}]),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"any": 1}]),
        ({"minProperties": 1}, [{"a": 1}]),
        ({"required": ["a"]}, [{"a": 1}]),
        ({"const": {"a": 1}}, [{"a": 1}]),
    ],
)
def test_a_tool_without_properties_takes_none_unless_it_says_so(parameters: Any, arguments: list[Any]) -> None:
    schema = arguments_schema({"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert all(is_valid(schema, value) for value in arguments)
    says_else = {"minProperties", "patternProperties", "additionalProperties"} & (parameters or {}).keys()
    assert is_valid(schema, {"z": 1}) is bool(says_else)


def test_a_definition_means_the_same_wherever_it_is_used() -> None:
    """As a value it is closed; as one of several schemas of a value, and under ``not``, it stays what it was."""
    schema = {
        "$defs": {"Base": part("a"), "Child": {"allOf": [{"$ref": "#/$defs/Base"}, part("b")]}},
        "type": "object",
        "properties": {
            "base": {"$ref": "#/$defs/Base"},
            "child": {"$ref": "#/$defs/Child"},
            "other": {"not": {"$ref": "#/$defs/Base"}},
            "again": {"$ref": "#/properties/base"},
        },
    }
    shut = closed(schema)
    assert is_valid(shut, {"base": {"a": 1}, "child": {"a": 1, "b": 1}, "again": {"a": 1}})
    for wrong in ({"base": {"b": 1}}, {"child": {"z": 1}}, {"again": {"b": 1}}, {"other": {"a": 1, "z": 1}}):
        assert not is_valid(shut, wrong)
    assert is_valid(shut, {"other": {"a": "x"}})


def test_what_recurs_is_closed_at_every_depth(compiler: Compiler) -> None:
    node = {
        "allOf": [
            {"$ref": "#/$defs/Base"},
            {"properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}},
        ]
    }
    schema = {"$ref": "#/$defs/Node", "$defs": {**DEFINITIONS, "Node": node}}
    shut = closed(schema)
    matcher = compiler.matcher(Grammar.json_schema(shut))
    for value, wanted in (({"a": 1, "kids": [{"a": 2}]}, True), ({"a": 1, "kids": [{"a": 2, "z": 1}]}, False)):
        assert is_valid(shut, value) is wanted
        assert takes(matcher, value) is wanted


def test_a_member_of_a_union_without_instances_takes_no_property_along() -> None:
    dead = {"type": "object", "properties": {"b": {"type": "integer"}, "c": False}, "required": ["b", "c"]}
    shut = closed({"anyOf": [part("a"), dead]})
    assert is_valid(shut, {"a": 1, "b": 1})
    assert not is_valid(shut, {"a": 1, "z": 1})


def test_members_of_a_oneof_that_overlap_are_not_narrowed() -> None:
    """What two members allow is no instance; were each closed, one of them would allow it alone."""
    members = [{"type": "object", "properties": {"x": part(name)}, "required": ["x"]} for name in ("a", "b")]
    for schema in ({"oneOf": members}, {**part("id"), "oneOf": members}):
        shut = closed(schema)
        assert not is_valid(schema, {"x": {"a": 1}})
        assert not is_valid(shut, {"x": {"a": 1}})
        assert is_valid(shut, {"x": {"a": 1, "b": "x"}})


def test_closing_again_changes_no_instance() -> None:
    for seed in range(60):
        rng = random.Random(f"again {seed}")
        schema = random_schema(rng)
        once = closed(schema)
        twice = closed(once)
        values = [*instances(rng, schema, 20), *instances(rng, once, 20)]
        assert [is_valid(once, v) for v in values] == [is_valid(twice, v) for v in values]


def test_what_would_grow_without_bound_stays_as_it_is() -> None:
    chain = {f"d{k}": {"allOf": [{"$ref": f"#/$defs/d{k + 1}"}, part(f"p{k}")]} for k in range(150)}
    schema = {"$defs": {**chain, "d150": part("end")}, "$ref": "#/$defs/d0"}
    assert is_valid(closed(schema), {"end": 1, "p3": 1})
