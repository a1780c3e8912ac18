"""Schemas that move into another document keep their root."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from random_schemas import instances, random_schema, random_value

from agentspec import Grammar
from agentspec.chat.dialects import DIALECTS
from agentspec.grammars.schema_tools import embedded, localized


def validator(schema: Any) -> Any:
    return jsonschema.Draft202012Validator(schema)


def host(schema: Any, at: str) -> dict[str, Any]:
    """A document with traps of the same names, in which a schema stands at a place."""
    traps = {name: {"const": "wrong"} for name in ("X", "Y", "Z", "node")}
    made: dict[str, Any] = {"type": "object", "$defs": traps, "definitions": traps, "properties": {"a": {"const": 0}}}
    name = at.rpartition("/")[2]
    made["properties"][name] = embedded(schema, at)
    return {**made, "required": [name], "additionalProperties": False}


@pytest.mark.parametrize("seed", range(40))
def test_a_value_is_valid_where_it_was(seed: int) -> None:
    for index in range(10):
        rng = random.Random(f"embedded {seed}.{index}")
        schema = random_schema(rng)
        before, after = validator(schema), validator(host(schema, "#/properties/here"))
        for value in [*instances(rng, schema, 20), *(random_value(rng, schema, schema) for _ in range(20))]:
            assert after.is_valid({"here": value}) is before.is_valid(value), json.dumps([schema, value])


NODE = {"type": "object", "properties": {"v": {"type": "string"}}, "required": ["v"]}
LIST = {"type": "array"}

ROOTS: list[tuple[str, dict[str, Any], Any, Any]] = [
    (
        "the root",
        {**NODE, "properties": {"v": {}, "kids": {**LIST, "items": {"$ref": "#"}}}},
        {"v": 1, "kids": [{"v": 1}]},
        {"v": 1, "kids": [{}]},
    ),
    ("a property", {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "x"}),
    ("a definition", {"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, {"v": "x"}, {}),
    ("old definitions", {"definitions": {"node": NODE}, "$ref": "#/definitions/node"}, {"v": "x"}, {}),
    (
        "a place no draft knows",
        {
            "components": {"schemas": {"A": {"items": {"$ref": "#/components/schemas/B"}, **LIST}, "B": NODE}},
            "$ref": "#/components/schemas/A",
        },
        [{"v": "x"}],
        [{}],
    ),
    ("an escaped name", {"$defs": {"a/b ~%": NODE}, "$ref": "#/$defs/a~1b%20~0%25"}, {"v": "x"}, {}),
    ("a name that is not quoted", {"$defs": {"Page[int]": NODE}, "$ref": "#/$defs/Page%5Bint%5D"}, {"v": "x"}, {}),
    ("an anchor", {"$defs": {"n": {"$anchor": "here", **NODE}}, "$ref": "#here"}, {"v": "x"}, {}),
    (
        "an identifier",
        {"$id": "https://a.example/b", "$defs": {"n": NODE}, "$ref": "https://a.example/b#/$defs/n"},
        {"v": "x"},
        {},
    ),
    (
        "a relative identifier",
        {"$id": "https://a.example/b", "$defs": {"n": {"$id": "c", **NODE}}, "$ref": "c"},
        {"v": "x"},
        {},
    ),
    (
        "a resource within",
        {
            "$defs": {"n": {"$id": "https://a.example/n", "$defs": {"m": NODE}, "$ref": "#/$defs/m"}, "m": True},
            "$ref": "https://a.example/n",
        },
        {"v": "x"},
        {},
    ),
    ("an index", {"allOf": [{"type": "object"}], "properties": {"a": {"$ref": "#/allOf/0"}}}, {"a": {}}, {"a": 1}),
    (
        "a dynamic reference",
        {"$dynamicAnchor": "node", **NODE, "properties": {"v": {}, "kid": {"$dynamicRef": "#node"}}},
        {"v": 1, "kid": {"v": 1}},
        {"v": 1, "kid": {}},
    ),
    (
        "data",
        {"properties": {"a": {"const": {"$ref": "#"}}, "$ref": {"type": "integer"}}},
        {"a": {"$ref": "#"}, "$ref": 1},
        {"a": {"$ref": "#/properties/here"}},
    ),
    (
        "data in a list",
        {"enum": [{"$ref": "#"}], "default": {"$ref": "#"}, "examples": [{"$id": "x"}]},
        {"$ref": "#"},
        {},
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), [case[1:] for case in ROOTS], ids=[case[0] for case in ROOTS])
def test_every_kind_of_reference_keeps_its_root(schema: dict[str, Any], right: Any, wrong: Any) -> None:
    before, after = validator(schema), validator(host(schema, "#/properties/here"))
    local = validator(localized(schema))
    for value, wanted in ((right, True), (wrong, False)):
        assert before.is_valid(value) is wanted
        assert local.is_valid(value) is wanted
        assert after.is_valid({"here": value}) is wanted


def test_what_needs_no_change_is_not_changed() -> None:
    for schema in (
        True,
        {"type": "object"},
        {"$defs": {"a": NODE}, "$ref": "#/$defs/a"},
        {"$ref": "https://a.example/b"},
    ):
        assert localized(schema) is schema
    assert embedded({"$ref": "https://a.example/b"}, "#/properties/x") == {"$ref": "https://a.example/b"}


def _schemas(source: str) -> list[dict[str, Any]]:
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(source, found.end())[0] for found in re.finditer("%json ", source)]


@pytest.mark.parametrize("final", [None, NODE])
@pytest.mark.parametrize("dialect", sorted(DIALECTS))
@pytest.mark.parametrize(("schema", "right", "wrong"), [case[1:] for case in ROOTS], ids=[case[0] for case in ROOTS])
def test_parameters_mean_the_same_in_every_dialect(
    dialect: str, final: Any, schema: dict[str, Any], right: Any, wrong: Any
) -> None:
    form = DIALECTS[dialect].form
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"in": {}}, **schema}}}
    keys = form.object_keys if final is not None else None
    is_last = keys is not None or dialect == "harmony"  # beside the answer's
    written = _schemas(Grammar.tools([tool], required=False, final=final, form=form).source)[-1 if is_last else 0]
    for value, wanted in ((right, isinstance(right, dict)), (wrong, False)):
        instance = value if keys is None else {keys[0]: "f", keys[1]: value}
        assert validator({k: v for k, v in written.items() if k != "x-guidance"}).is_valid(instance) is wanted


def test_two_tools_and_an_answer_share_no_definition() -> None:
    schemas = [
        {"$ref": "#/$defs/T", "$defs": {"T": {"type": "object", "properties": {"a": {"const": k}}}}} for k in range(3)
    ]
    tools = [{"type": "function", "function": {"name": f"t{k}", "parameters": schemas[k]}} for k in range(2)]
    form = DIALECTS["llama3"].form
    answer, *calls = _schemas(Grammar.tools(tools, required=False, final=schemas[2], form=form).source)[-3:]
    assert validator(answer).is_valid({"a": 2})
    for k, call in enumerate(calls):
        assert validator(call).is_valid({"name": f"t{k}", "parameters": {"a": k}})
        assert not validator(call).is_valid({"name": f"t{k}", "parameters": {"a": 2}})
