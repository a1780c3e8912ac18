"""JSON Schemas and patterns as regular expressions: what they write is valid, what is not built is refused by name."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from effort import effort

from agentspec import GrammarError
from agentspec.grammars.outlines import numbers
from agentspec.grammars.outlines.automaton import Automaton, build
from agentspec.grammars.outlines.formats import FORMATS
from agentspec.grammars.outlines.json_regex import json_regex
from agentspec.grammars.outlines.pattern import pattern

FIRST = 1


def matches(automaton: Automaton, text: str) -> bool:
    return bool(automaton.finals[automaton.after(FIRST, text.encode())])


def sample(automaton: Automaton, choose: random.Random) -> str | None:
    """A random text of the language; None where it got too long."""
    state, text = FIRST, bytearray()
    while len(text) < 2000:
        options = automaton.moves[state][automaton.classes].nonzero()[0].tolist()  # bytes
        if automaton.finals[state] and (not options or choose.random() < 0.4):
            return text.decode()
        closing = [byte for byte in options if byte in b'"]},'] if len(text) > 100 else []
        text.append(choose.choice(closing or options))
        state = automaton.after(state, text[-1:])
    return None


def is_valid(text: str, schema: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text)))


OBJECT = {"type": "object"}
AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, **OBJECT}
OLD = {"$schema": "http://json-schema.org/draft-04/schema#"}
KIND = {"properties": {"kind": {"const": "x"}, "n": {"type": "null"}}, "required": ["kind"], **OBJECT}
OTHER = {"properties": {"kind": {"const": "y"}, "s": {"type": "boolean"}}, "required": ["kind"], **OBJECT}
# Every keyword, alone and beside others; values that are in, and values that are not.
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [1, "a", [], [{"b": 1}]], []),
    ({"title": "t", "default": 3, "x-note": {"minimum": 3}, "_format": "date"}, [1, "a", None], []),
    ({"minLength": 2}, ["ab", 1, None, [], {}], ["a"]),
    ({"minimum": 2, "minItems": 1}, [2, "", [1]], [1, []]),
    ({"type": "string", "format": "date"}, ["2024-04-30"], ["2024-04-31", "24-04-30"]),
    ({"type": "string", "format": "color"}, ["red"], [3]),
    ({"type": "string", "format": "uuid", "maxLength": 36}, ["01234567-89ab-cdef-0123-456789abcdef"], ["x"]),
    ({"type": "string", "pattern": "^[ab]{2}$", "minLength": 2}, ["ab"], ["a"]),
    ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 10.5}, [1, 10], [0, 11]),
    ({**OLD, "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ({"type": "integer", "multipleOf": 1}, [4], [3.5]),
    ({"type": "number", "minimum": -1.0, "maximum": 2}, [-1, -0.25, 0, 1.75, 2], [-1.5, 2.5]),
    (
        {"enum": ["a", 1, 2.5, [1, {"b": None}], {"c": "\x7f\u2028"}]},
        ["a", [1, {"b": None}], {"c": "\x7f\u2028"}],
        ["b", True],
    ),
    ({"enum": ["a", 1, None], "type": ["string", "null"]}, ["a", None], [1]),
    ({"const": 10**25}, [10**25], [10**25 + 1]),
    ({"enum": [1e22, -0.0, 1.5e-9]}, [1e22, 1.5e-9], [1]),
    ({**AB, "required": ["b"]}, [{"b": 1}, {"a": 1, "b": 2}], [{"a": 1}, {}]),
    ({**OBJECT, "required": ["x"]}, [{"x": [1]}], [{}]),
    ({**AB, "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 1}], [{}]),
    ({**OBJECT, "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}]),
    ({**OBJECT, "minProperties": 1, "additionalProperties": {"type": "null"}}, [{"a": None}], [{}]),
    ({**OBJECT, "additionalProperties": False, "patternProperties": {"^x": {"const": 1}}}, [{"xa": 1}], [{"a": 1}]),
    ({**AB, "patternProperties": {"a": {"minimum": 3}}}, [{"a": 3}, {"b": 1}], [{"a": 2}]),
    ({**AB, "propertyNames": {"pattern": "^b"}}, [{"b": 1}], [{"a": 1}]),
    ({**OBJECT, "propertyNames": {"maxLength": 1}}, [{"b": 1}], [{"ab": 1}]),
    ({**AB, "dependencies": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}, {}], []),
    ({**AB, **OLD, "dependencies": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]),
    ({**AB, "dependentRequired": {"b": ["a"]}}, [{"a": 1}], [{"b": 1}]),
    ({**AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}]),
    ({**AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [KIND, OTHER]}, [{"kind": "x", "n": None}, {"kind": "y"}], [{"kind": "x", "n": 1}, {"kind": "z"}]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}, {"enum": [None]}]}, [1, "a", None], [1.5]),
    ({"allOf": [AB, {"required": ["a"], "properties": {"a": {"minimum": 3}}}]}, [{"a": 3}], [{"a": 2}, {}]),
    ({"allOf": [{**AB, "additionalProperties": False}, {"properties": {"c": {}}}]}, [{"a": 1}], [{"c": 1}]),
    ({**AB, "not": {"required": ["a"]}}, [{"b": 1}, {}], [{"a": 1}]),
    ({"not": {"type": ["object", "array", "number"]}}, ["a", None], [1, 1.5, []]),
    ({**AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}, {}], [{"a": 1}]),
    ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    ({"type": "array", "minItems": 2, "items": {"type": "null"}}, [[None] * 2], [[None], [1, 2]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ({**OLD, "items": [{"type": "null"}], "additionalItems": False, "type": "array"}, [[], [None]], [[1], [None, 1]]),
    ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2}, [[1, 2]], [[1], [2, 2]]),
    ({"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer"}}}, [3], [2]),
]


@pytest.mark.parametrize(("schema", "inside", "outside"), SCHEMAS, ids=[json.dumps(s)[:70] for s, _, _ in SCHEMAS])
def test_what_a_schema_writes_is_valid(schema: Any, inside: list[Any], outside: list[Any]) -> None:
    automaton = build(json_regex(schema), None)
    texts = [json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f") for value in inside]
    assert [text for text in texts if not matches(automaton, text) or not is_valid(text, schema)] == []
    assert [value for value in outside if matches(automaton, json.dumps(value, ensure_ascii=False))] == []
    choose = random.Random(0)
    written = [text for text in (sample(automaton, choose) for _ in range(60)) if text is not None]
    assert written
    assert [text for text in written if not is_valid(text, schema)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "number", "multipleOf": 0.1}, "multipleOf (at #)"),
        ({**OBJECT, "properties": {"a": {"type": "number", "exclusiveMinimum": 0}}}, "(at #/properties/a)"),
        ({"type": "array", "items": {"contains": {}}}, "contains (at #/items)"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": [{}]}, "list of items"),
        ({**AB, "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({**OBJECT, "minProperties": 2}, "minProperties 2"),
        ({**AB, "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"not": {"const": 1}}, "not"),
        ({"type": "string", "format": "ipv6"}, "format ipv6"),
        ({"type": "string", "pattern": "(?!a)b"}, "'(?!' in the pattern"),
        ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "cut the pattern"),
        ({"type": "string", "maxLength": 10**6}, "counted"),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 1}, "a bound true"),
        ({"enum": ["a"], "minLength": 2}, "minLength beside enum"),
        ({"enum": [float("inf")]}, "not finite"),
        ({"type": "integer", "maximum": float("inf")}, "infinite"),
        ({"type": "number", "maximum": 10**400}, "beyond 2**53"),
        ({"type": "string", "pattern": 3}, "pattern: 3"),
        ({"type": "string", "maxLength": 10**400}, "counted"),
        ({"$ref": "#/$defs/missing"}, "does not have"),
        ({"$ref": "other.json"}, "same document"),
        ({"properties": {"child": {"$ref": "#"}}}, "recursive $ref"),
        ({"anyOf": [{"type": "null"}, {"items": {"$ref": "#"}, "type": "array"}]}, "recursive $ref"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
        ({**AB, "patternProperties": {"^a": {}}, "not": {"required": ["a"]}}, "not"),
        ({**AB, "patternProperties": {"^a": {}}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({**OBJECT, "required": ["c"], "additionalProperties": False}, "required 'c'"),
        ({"type": "integer", "enum": ["a"]}, "without a value"),
        ({"properties": {"a": {"$id": "http://b/", "items": {"$ref": "#"}}}, **OBJECT}, "$id"),
    ],
)
def test_what_is_not_built_is_refused_by_name_and_place(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(named)):
        json_regex(schema)


@pytest.mark.parametrize("leaf", [{"type": "null"}, {"type": "string"}])
def test_schemas_that_grow_exponentially_are_refused(leaf: Any) -> None:
    for twice in (lambda part: {"anyOf": [part, part]}, lambda part: {"type": "array", "prefixItems": [part, part]}):
        parts = {f"d{k}": twice({"$ref": f"#/$defs/d{k + 1}"}) for k in range(40)}
        with pytest.raises(GrammarError, match="more than"):
            json_regex({"$ref": "#/$defs/d0", "$defs": {**parts, "d40": leaf}})


PATTERNS = [
    *("abc", "^a|b$", r"^\d+\.\w*$", r"[^\d\s]{2}", r"^\S\W?\D$", r"^[\w.-]+@x$", r"^(?:a|\u00e9)\x41?\/$"),
    *("^.{1,2}$", r"^[^\"\\]$", r"^(a)?(?:b)\-*?$", "", "(^a)", "(^a|b)x?$", "a$|^b"),
]


@pytest.mark.whole
@pytest.mark.parametrize("source", PATTERNS)
def test_what_a_pattern_writes_is_found_by_python(source: str) -> None:
    automaton = build(f'"{pattern(source).regex}"', None)
    choose = random.Random(1)
    for text in filter(None, (sample(automaton, choose) for _ in range(effort(quick=40, whole=200)))):
        assert re.search(source, json.loads(text)), text
    for text in ("abc", "a", "b", "12.x", "xy", "!-", "q.w@x", "aA/", 'a"', "ab-", ""):
        assert matches(automaton, json.dumps(text)) == (re.search(source, text) is not None), text


REFUSED = [
    *("a(?=b)", r"\bword", "a++", "a{2}{3}", "(a", "a)", "[z-a]", "[", r"\p{Greek}", r"(a)\1", "x{,3}"),
    *("[]a]", "*", "(?<=n)a", "(?i)a", "(^a)*", "^*", "a$\n", r"\Aa", "(?i:a)"),
]


@pytest.mark.parametrize("source", REFUSED)
def test_patterns_that_dialects_read_differently_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="in the pattern"):
        pattern(source)


def test_pattern_lengths_are_right() -> None:
    cases = (("^a{2,3}(b|cd)?$", 2, 5), ("a", 1, None), ("^a*$", 0, None), ("^(a|bcd)$", 1, 3), ("^a|b$", 1, None))
    for source, shortest, longest in cases:
        found = pattern(source)
        assert (found.shortest, found.longest) == (shortest, longest)


def test_bounds_of_integers_are_exact() -> None:
    choose = random.Random(0)
    edges = [(None, 5), (-7, None), (0, 0), (-1, -1), (10, None), (None, -20), (-105, 99)]
    edges += [tuple(sorted((choose.randint(-1200, 1200), choose.randint(-1200, 1200)))) for _ in range(20)]
    for low, high in edges:
        regex = re.compile(numbers.integer(low, high) or "a^")
        for value in range(-1300, 1300):
            expected = (low is None or value >= low) and (high is None or value <= high)
            assert bool(regex.fullmatch(str(value))) == expected, (low, high, value)
    assert numbers.integer(3, 2) is None
    assert numbers.number(3, 2) is None


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_jsonschema(name: str) -> None:
    form = FORMATS[name]
    automaton = build(f'"{form.regex}"', None)
    choose = random.Random(0)
    for text in filter(None, (sample(automaton, choose) for _ in range(100))):
        assert is_valid(text, {"type": "string", "format": name}), text
        length = len(json.loads(text))
        assert form.shortest <= length
        assert form.longest is None or length <= form.longest
