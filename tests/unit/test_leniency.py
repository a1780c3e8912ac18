"""What is left out of a schema: as little as an engine asks for, and never more than the schema forbids."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import foreign_tokenizers as foreign
import pytest

from agentspec import Grammar
from agentspec.errors import GrammarError
from agentspec.grammars import compiler, expressible_parameters
from agentspec.grammars.llguidance import why_inexpressible
from agentspec.grammars.schema_tools import in_json_form
from agentspec.grammars.schema_tools.leniency import ALL_TRIES, expressible, left_open, repeatable
from agentspec.grammars.schema_tools.tightening import other_than, tightened
from agentspec.grammars.schema_tools.validator import validator
from agentspec.runtime.spelling import spell

TOKENIZER = foreign.make("bpe-bytes", "none", "ByteLevel-False-True")
VALUES = [
    1,
    4,
    7,
    "a",
    "ba",
    "ab",
    None,
    True,
    [],
    [1],
    [1, 1],
    [1, "a"],
    {},
    {"a": 1},
    {"a": "b"},
    {"b": [1]},
    {"c": 1, "a": 2},
]


def why_not(schema: Any) -> str | None:
    return why_inexpressible(in_json_form(schema))


def made_at_random(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {}
    inner = lambda: made_at_random(rng, depth - 1) if depth else {"type": rng.choice(["integer", "string"])}  # noqa: E731
    choices: list[tuple[str, Any]] = [
        ("type", lambda: rng.choice(["object", "array", "string", "integer"])),
        ("properties", lambda: {name: inner() for name in rng.sample("abc", 2)}),
        ("required", lambda: rng.sample("abc", 1)),
        ("additionalProperties", lambda: rng.choice([False, True, inner()])),
        ("patternProperties", lambda: {rng.choice(["^a", "^(?=b)", r"\bc"]): inner()}),
        ("propertyNames", lambda: {"pattern": "^[ab]"}),
        ("items", inner),
        ("uniqueItems", lambda: True),
        ("contains", lambda: {"type": "integer"}),
        ("minContains", lambda: 1),
        ("pattern", lambda: rng.choice(["^a", "^(?!b)", r"(a|b)\1"])),
        ("format", lambda: rng.choice(["iri", "date", "regex"])),
        ("minimum", lambda: 3),
        ("not", lambda: {"const": rng.choice([1, "a", []])}),
        ("if", lambda: {"required": ["a"]}),
        ("then", lambda: {"required": ["b"]}),
        ("oneOf", lambda: [inner(), inner()]),
        ("anyOf", lambda: [inner(), inner()]),
        ("dependentRequired", lambda: {"a": ["b"]}),
        ("minProperties", lambda: 1),
    ]
    for keyword, make in rng.sample(choices, rng.randrange(1, 5)):
        schema[keyword] = make()
    return schema


def test_what_a_schema_allows_its_lenient_form_allows_and_engines_take_it() -> None:
    rng, changed = random.Random(0), 0
    for _ in range(100):
        schema = made_at_random(rng, 2)
        lenient, left_out = expressible(schema, why_not)
        assert why_not(lenient) is None, schema
        changed += bool(left_out)
        if left_out:
            before, after = validator(json.dumps(schema)), validator(json.dumps(left_open(lenient)))
            for value in map(json.dumps, VALUES):
                assert before(value) is not None or after(value) is None, (schema, lenient, value)
        else:
            assert lenient is schema
    assert changed > 35


def test_as_little_as_possible_is_left_out() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {
                "type": "array",
                "minItems": 1,
                "uniqueItems": True,
                "items": {"type": "string", "pattern": "^(?=x)"},
            },
            "b/c": {"type": "string", "pattern": "^x+$", "format": "iri"},
        },
        "not": {"required": ["z"]},
        "required": ["a"],
    }
    lenient, left_out = expressible(schema, why_not)
    assert set(left_out) == {
        *("not at #", "uniqueItems at #/properties/a", "pattern at #/properties/a/items"),
        "format at #/properties/b~1c",
    }
    assert lenient["properties"]["b/c"] == {"type": "string", "pattern": "^x+$"}
    assert lenient["properties"]["a"]["minItems"] == 1
    assert lenient["required"] == ["a"]


def test_tries_are_bounded() -> None:
    tried = 0

    def never(schema: Any) -> str | None:
        nonlocal tried
        tried += 1
        return "no" if "x" in json.dumps(schema) else None

    nested: Any = {"x": 1}
    for _ in range(3):
        nested = {"type": "object", "properties": {f"x{k}": nested for k in range(9)}}
    expressible(nested, never)
    assert tried <= ALL_TRIES


def test_the_same_tool_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"function": {"name": "t", "parameters": {"type": "object", "properties": {"once": {"not": {}}}}}}
    first = expressible_parameters(tool)
    monkeypatch.setattr("agentspec.grammars.llguidance.why_inexpressible", None)
    assert expressible_parameters(json.loads(json.dumps(tool))) == first


def test_keys_that_may_repeat_are_named() -> None:
    counted = {"type": "object", "minProperties": 2}
    assert list(repeatable({"properties": {"a": counted}})) == ["repeated keys at #/properties/a"]
    assert not list(repeatable({**counted, "additionalProperties": False, "properties": {"a": {}, "b": {}}}))


LOOKING = [r"^(?!x)a+$", r"\bfoo\b", r"^(a)\1$", "^(?<=b)a"]


@pytest.mark.parametrize("engine", ["llguidance", "outlines", "auto"])
@pytest.mark.parametrize("pattern", LOOKING)
def test_a_pattern_that_looks_around_is_left_to_the_check_where_there_is_one(engine: str, pattern: str) -> None:
    grammars = compiler(TOKENIZER, len(TOKENIZER), engine)
    schema = json.dumps({"type": "string", "pattern": pattern, "maxLength": 3})
    with pytest.raises(GrammarError):
        grammars.matcher(Grammar("json_schema", schema))
    matcher = grammars.matcher(Grammar("json_schema", schema, lenient=True))
    assert all(matcher.accept_token(i) for i in spell(TOKENIZER, '"xyz'))
    assert not any(matcher.accept_token(i) for i in spell(TOKENIZER, "z"))  # what can be expressed still is


def accepts(schema: Any, text: str) -> bool:
    matcher = compiler(TOKENIZER, len(TOKENIZER)).matcher(Grammar.json_schema(schema))
    return all(matcher.accept_token(i) for i in spell(TOKENIZER, text)) and matcher.is_accepting()


def test_a_declared_key_cannot_be_spelled_in_escapes() -> None:
    typed = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "": {"type": "integer"}, 'q"\\': {"type": "null"}},
        "required": ["a"],
    }
    for others in ({}, {"additionalProperties": {"type": "string"}}):
        schema = {**typed, **others}
        assert accepts(schema, '{"a": 1, "b": "x"}')
        assert accepts(schema, '{"a": 1, "aa": "x", "\u00e9": "y"}')
        for key in (r"\u0061", r"\u0062", "a", "", r"q\"\\", r"q\u0022\\", r"\/"):
            assert not accepts(schema, f'{{"a": 1, "{key}": "x"}}'), key


def test_other_texts_are_found_and_these_are_not() -> None:
    rng = random.Random(2)
    texts = ["".join(letters) for size in range(4) for letters in itertools.product('ab"\\-', repeat=size)]
    for _ in range(60):
        named = rng.sample(texts, rng.randrange(1, 6))
        source = other_than(named)
        assert all((re.search(source, text) is None) == (text in named) for text in [*texts, "\u00e9a"])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-12-31"], ["0000-01-01", "2023-02-29", "1900-02-29", "2023-04-31"]),
        ("time", ["23:59:59Z", "00:00:00.123456-23:59"], ["23:59:60Z", "24:00:00Z", "00:00:00"]),
        (
            "date-time",
            ["2024-02-29T00:00:00Z"],
            ["2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z", "2016-12-31T23:59:60Z"],
        ),
    ],
)
def test_days_and_seconds_are_those_of_the_calendar(name: str, good: list[str], bad: list[str]) -> None:
    for schema in ({"type": "string", "format": name}, {"type": "string", "format": name, "pattern": "[0-9]"}):
        assert all(accepts(schema, f'"{text}"') for text in good)
        assert not any(accepts(schema, f'"{text}"') for text in bad)
    assert tightened({"const": {"format": "date"}}) == {"const": {"format": "date"}}


@pytest.mark.parametrize(
    "source", ['^[^"]{1,2}$', r"^[^\\]+$", r'^[^"\\]*$', r"^a[^\"x]$", "^[^a]$", r"^[^\n]$", r"^\[\^a$"]
)
def test_a_character_that_a_pattern_leaves_out_is_not_written_as_an_escape(source: str) -> None:
    for value in ('"', "\\", 'a"', "a\\", "ab", "a", "b", 'b"', "[^a"):
        written = json.dumps(value)
        assert accepts({"type": "string", "pattern": source}, written) == (re.search(source, value) is not None), value


def test_the_classes_of_other_patterns_are_left_as_they_are() -> None:
    for pattern in ("^[^a]$", r"^\[^\"]$", r"[\^\"]", '["]', r"\\"):
        assert tightened({"pattern": pattern}) == {"pattern": pattern}


def test_properties_with_the_names_of_keywords_stay_properties() -> None:
    named = {name: {"type": "object"} for name in ("properties", "additionalProperties", "pattern", "format", "anyOf")}
    schema = {"type": "object", "properties": named, "additionalProperties": False}
    assert tightened(schema) == schema
