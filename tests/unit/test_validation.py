"""The check that completes a grammar: decimal multiples, patterns of ECMA 262, all formats, no repeated keys."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import foreign_tokenizers as foreign
import pytest

from agentspec import Grammar
from agentspec.errors import GrammarError
from agentspec.grammars import compiler
from agentspec.grammars.outlines.formats import FORMATS as OF_OUTLINES
from agentspec.grammars.schema_tools import FORMATS, ecma
from agentspec.grammars.schema_tools.formats import CHECKS
from agentspec.grammars.schema_tools.validator import validator
from agentspec.runtime.tokens import exact_decoder


def why(schema: Any, text: str) -> str | None:
    return validator(json.dumps(schema))(text)


def test_multiples_are_decimal() -> None:
    rng = random.Random(0)
    for _ in range(300):
        step = Decimal(rng.randrange(1, 500)).scaleb(-rng.randrange(4))
        value = step * rng.randrange(-50, 50)
        assert why({"multipleOf": float(step)}, str(value)) is None, (step, value)
        beside = value + step / 2
        assert "multipleOf" in (why({"multipleOf": float(step)}, str(beside)) or ""), (step, beside)
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "multipleOf": 0.1}
    assert why(old, "0.3") is None
    assert why({"multipleOf": 0.01}, "1e2") is None
    assert why({"multipleOf": 0.1}, "true") is None
    assert why({"multipleOf": 2}, "1e999") is not None


PATTERNS = [
    *((r"^(?!x)a+$", "aa", "xa"), (r"\bfoo\b", "a foo", "afoo"), (r"^\p{L}$", "\u00e9", "3"), (r"^\P{Lu}$", "a", "A")),
    *((r"^\p{Script=Greek}+$", "\u03b1", "a"), (r"^\d$", "3", "\u0663"), (r"^\w$", "_", "\u00e9"), ("^a$", "a", "a\n")),
    *(
        (r"^[^]$", "\n", ""),
        (r"^a[]|b$", "b", "a"),
        (r"^(?<n>a|b)\k<n>$", "bb", "ab"),
        (r"^\u{1F600}$", "\U0001f600", "x"),
    ),
    *(
        (r"^\cA\/$", "\x01/", "cA/"),
        (r"^[\w.-]+$", "a.b-", "a b"),
        (r"^[^\s\d]$", "a", "\ufeff"),
        (r"^\u0061$", "a", "b"),
    ),
    *(
        (r"^[[&&a]$", "&", "b"),
        (r"^[\b]$", "\b", "b"),
        (r"^\B.\B$", "!", "a"),
        (r"(?<=a)b", "ab", "b"),
        (r"^\S$", "a", " "),
    ),
    *(
        (r"^.$", "a", "\n"),
        (r"^\i$", "i", "\\i"),
        (r"^a{2}\D$", "aa-", "aa1"),
        (r"(a)\1", "aa", "ab"),
        (r"^[\D]$", "x", "1"),
    ),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_patterns_are_those_of_ecma_262(pattern: str, good: str, bad: str) -> None:
    assert ecma.matches(pattern, good)
    assert not ecma.matches(pattern, bad)
    schema = {"type": "string", "pattern": pattern}
    assert why(schema, json.dumps(good)) is None
    assert "(pattern)" in (why(schema, json.dumps(bad)) or "")
    named = {"patternProperties": {pattern: {"type": "integer"}}, "additionalProperties": False}
    assert why(named, json.dumps({good: 1})) is None
    assert why(named, json.dumps({bad: 1})) is not None
    assert why(named, json.dumps({good: "x"})) is not None


def test_patterns_of_plain_characters_mean_what_python_says() -> None:
    rng = random.Random(1)
    parts = ["a", "b", ".", "[ab]", "[^a]", "(?:a|b)", "(a)", "a?", "b*", "[a-b]+", "(?=a)", "(?!b)", "^", r"\.", "a|b"]
    for _ in range(300):
        source = "".join(rng.choices(parts, k=rng.randrange(1, 5)))
        for text in ("", "a", "b", "ab", "ba", "aab", ".", "b.a"):
            assert ecma.matches(source, text) == (re.search(source, text) is not None), (source, text)


def test_a_search_that_takes_too_long_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecma, "SECONDS", 0.01)
    assert "cannot be checked" in (
        why({"pattern": r"^((a|a?)+)+\1$"}, json.dumps("a" * 28 + "!")) or "cannot be checked"
    )


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"\$\.pattern"):
        validator('{"pattern": "("}')
    with pytest.raises(GrammarError, match=r"\$\.type"):
        validator('{"type": "text"}')


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": 1, "\\u0061": 2}', '[{"b": {"x": 1, "y": 2, "x": 1}}]'])
def test_a_repeated_key_is_seen(text: str) -> None:
    assert "repeats the key" in (why({}, text) or "")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "-Infinity", "{", "[" * 100_000, "1" * 5000, '"a" "b"'])
def test_what_is_no_json_is_a_reason(text: str) -> None:
    assert (why({}, text) or "").startswith("not JSON")


def test_nothing_is_fetched() -> None:
    assert "cannot be checked" in (why({"$ref": "http://example.invalid/x"}, "1") or "")
    assert why({"$ref": "http://json-schema.org/draft-07/schema#"}, '{"type": "string"}') is None


FORMAT_CASES = {
    "date": (["2024-02-29", "0001-01-01"], ["2023-02-29", "0000-01-01", "2023-2-1", "2023-02-30", "\u0662023-01-01"]),
    "time": (["23:59:59Z", "12:00:00.5+05:30"], ["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]),
    "date-time": (["2024-02-29T00:00:00Z", "2024-02-29t00:00:00z"], ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z"]),
    "duration": (["P1Y2M3DT4H5M6S", "PT1M", "P2W"], ["P", "PT", "P1", "P1W1D", "1D"]),
    "hostname": (["a-b.example", "x"], ["-a", "a..b", "a_b", "x" * 64]),
    "uri": (["http://a/b?c#d", "urn:x"], ["/a", "a b", "http://\u00e9"]),
    "uri-reference": (["/a", "a%20b"], ["a b", "%2", "\\"]),
    "iri": (["http://\u00e9"], ["\u00e9"]),
    "iri-reference": (["\u00e9"], ["a b"]),
    "uri-template": (["/a/{b}"], ["/a/{b", "{}"]),
    "json-pointer": (["", "/a~0b/~1"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "2#"], ["/a", "01"]),
    "regex": (["^(?!a)", r"\p{L}"], ["(", "[a"]),
}


@pytest.mark.parametrize("name", FORMAT_CASES)
def test_formats_are_checked(name: str) -> None:
    good, bad = FORMAT_CASES[name]
    for text in good:
        assert why({"format": name}, json.dumps(text)) is None, text
    for text in bad:
        assert "(format)" in (why({"format": name}, json.dumps(text)) or ""), text


def test_every_format_of_json_schema_is_checked() -> None:
    import jsonschema

    assert {*CHECKS, *jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers} >= FORMATS


@pytest.mark.parametrize("engine", ["llguidance", "outlines"])
def test_what_an_engine_writes_of_a_format_passes_the_check(engine: str) -> None:
    tokenizer = foreign.make("bpe-bytes", "none", "ByteLevel-False-True")
    grammars, decode = compiler(tokenizer, len(tokenizer), engine), exact_decoder(tokenizer, skip_special_tokens=True)
    rng = random.Random(3)
    names = (
        ["date", "time", "date-time", "duration", "hostname", "ipv4", "ipv6", "uuid"]
        if engine == "llguidance"
        else OF_OUTLINES
    )
    for name in names:
        schema = {"type": "string", "format": name}
        for _ in range(6):
            matcher, ids = grammars.matcher(Grammar.json_schema(schema)), []
            while not matcher.is_terminated() and len(ids) < 60:
                legal = matcher.token_mask().tensor().nonzero().flatten().tolist()
                if not legal:
                    break
                # What may end a string is taken often: some formats have no longest text.
                closing = [i for i in legal if decode([i]).startswith('"')] if ids else []
                ids.append(rng.choice(closing if closing and rng.random() < 0.3 else legal))
                assert matcher.accept_token(ids[-1])
            if matcher.is_accepting():
                assert why(schema, decode(ids)) is None, (name, decode(ids))
