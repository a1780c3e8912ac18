"""One suite for every grammar engine: what a matcher promises, and that both engines mean the same languages."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from scripted import chatml_tokenizer

from agentspec import (
    Grammar,
    GrammarError,
)
from agentspec.batch import Batch
from agentspec.grammars import GRAMMAR_ENGINES, GrammarCompiler, GrammarCursor, Matcher, compiler
from agentspec.grammars.token_mask import TokenMask
from agentspec.sequence import Sequence

ENGINES = ["llguidance", "outlines"]
SHOP = {
    "type": "object",
    "properties": {
        "item": {"enum": ["lamp", "sofa", "Öllampe 💡", 'a "b"']},
        "count": {"type": "integer", "minimum": 1, "maximum": 12},
        "note": {"type": ["string", "null"], "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["item", "count"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar.regex("(ab|a)*c{2,3}|[é-ü]{1,4}"),
    "choice": Grammar.choice(["yes", "yes, of course", "no", "né 💡"]),
    "schema": Grammar.json_schema(SHOP),
}
SHUT = {"additionalProperties": False}
LANGUAGES: list[tuple[Grammar, list[str], list[str]]] = [
    (Grammar.regex("a|ab"), ["a", "ab"], ["", "b", "abb"]),
    (Grammar.regex("^a+$"), ["a", "aa"], ["^a", "ab", ""]),
    (Grammar.regex(r"\Aab?\z"), ["a", "ab"], ["b"]),
    (Grammar.regex("a*?b??"), ["", "aa", "ab"], ["ba", "bb"]),
    (Grammar.regex(r"\d{2,3}-[^x]"), ["12-a", "123-💡", "٣٣-é"], ["1-a", "1234-a", "12-x"]),
    (Grammar.regex("(?i)straße"), ["STRAßE", "straße"], ["STRASSE"]),
    (Grammar.regex("."), ["é", "💡"], ["\n", "ab"]),
    (Grammar.choice(["a", "ab", "a.b", "(", "né\n💡"]), ["a", "ab", "a.b", "(", "né\n💡"], ["axb", "b", ""]),
    (
        Grammar.json_schema({"type": "string"}),
        ['""', '"é💡 / "', r'"\" \\ \n \b"', r'"\u0001\u007F"', '"\u2028\x85"'],
        ['"', '"\n"', r'"\/"', r'"\u0041"', '"\x7f"', "a", r'"\x"'],
    ),
    (
        Grammar.json_schema({"type": "string", "minLength": 2, "maxLength": 3}),
        ['"ab"', r'"\n\""', '"💡é💡"', r'"\u0001ab"'],
        ['"a"', '"abcd"', '"💡"'],
    ),
    (
        Grammar.json_schema({"type": "string", "pattern": "^a[^b]?$"}),
        ['"a"', '"ac"', r'"a\n"', r'"a\""', '"a💡"'],
        ['"ab"', '"ba"', '"acc"', '"a""'],
    ),
    (Grammar.json_schema({"type": "string", "pattern": "b|^c"}), ['"abc"', '"b"', '"cx"'], ['"ac"', '""']),
    (Grammar.json_schema({"type": "integer"}), ["0", "-0", "-12", "9" * 30], ["1.0", "1e3", "01", "+1"]),
    (Grammar.json_schema({"type": "number"}), ["0", "-1.50", "1e3", "1E-05", "2.5e+30"], ["1.", ".5", "01", "NaN"]),
    (Grammar.json_schema({"type": "integer", "minimum": -3, "maximum": 105}), ["-3", "0", "105"], ["-4", "106", "-03"]),
    (Grammar.json_schema({"type": "integer", "exclusiveMinimum": 9}), ["10", "99", "100"], ["9", "-10", "010"]),
    (Grammar.json_schema({"type": "number", "minimum": 0, "maximum": 1}), ["0", "0.5", "1", "1.0"], ["1.1", "-0.5"]),
    (Grammar.json_schema({"enum": [1, "a", None, True, {"b": [1, {"é": "x"}]}]}), ["1", '"a"', "null"], ["2", "false"]),
    (Grammar.json_schema({"const": {"b": [1, {"é": "x,:"}]}}), ['{"b": [1, {"é": "x,:"}]}'], ['{"b":[1,{"é":"x,:"}]}']),
    (Grammar.json_schema({"const": "a\x01\n"}), [r'"a\u0001\n"'], ['"a"']),
    (Grammar.json_schema({"type": ["integer", "null"]}), ["1", "null"], ["1.5", '"1"']),
    (Grammar.json_schema({"anyOf": [{"type": "boolean"}, {"const": 1}]}), ["true", "1"], ["0"]),
    (Grammar.json_schema({"oneOf": [{"type": "boolean"}, {"type": "null"}]}), ["true", "null"], ["0"]),
    (Grammar.json_schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}), ["null"], ["1"]),
    (Grammar.json_schema({"allOf": [{"type": "integer"}, {"minimum": 3}]}), ["3", "40"], ["2", '"a"']),
    (
        Grammar.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}),
        ["[null]", "[null, null]"],
        ["[]", "[null,null]", "[null, null, null]", "[1]"],
    ),
    (
        Grammar.json_schema({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}),
        ["[]", "[1]", "[1, 2]"],
        ["[2]", "[1, 2, 3]"],
    ),
    (
        Grammar.json_schema({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, **SHUT}),
        ["{}", '{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'],
        ['{"b": 2, "a": 1}', '{"a": 1,"b": 2}', '{"a": 1, }', '{"c": 1}', '{ "a": 1}'],
    ),
    (
        Grammar.json_schema(
            {"type": "object", "properties": {'q"\\é,:': {"const": 1}}, "required": ['q"\\é,:'], **SHUT}
        ),
        [r'{"q\"\\é,:": 1}'],
        ["{}", r'{"q\"\\é,:":1}'],
    ),
    (
        Grammar.json_schema({"type": "object", "additionalProperties": {"type": "null"}}),
        ["{}", '{"": null}', r'{"a\"": null, "b": null}'],
        ['{"a": 1}', '{"a": null, }'],
    ),
    (Grammar.json_schema(SHOP), ['{"item": "Öllampe 💡", "count": 12, "sizes": [true]}'], ['{"count": 1}']),
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def compilers(tokenizer: Any) -> dict[str, GrammarCompiler]:
    return {name: compiler(tokenizer, len(tokenizer), name) for name in GRAMMAR_ENGINES}


@pytest.fixture(params=ENGINES)
def grammars(request: pytest.FixtureRequest, compilers: dict[str, GrammarCompiler]) -> GrammarCompiler:
    return compilers[request.param]


@pytest.fixture(params=list(GRAMMARS))
def grammar(request: pytest.FixtureRequest) -> Grammar:
    return GRAMMARS[request.param]


def legal(matcher: Matcher) -> list[int]:
    return matcher.token_mask().tensor().nonzero()[:, 0].tolist()


def cursor(matcher: Matcher, seed: int, limit: int = 60) -> list[int]:
    """Random legal tokens, up to the end of the grammar or somewhere before."""
    choose, tokens = random.Random(seed), []
    while len(tokens) < limit and (options := legal(matcher)):
        if matcher.is_accepting() and choose.random() < 0.3:
            break
        tokens.append(choose.choice(options))
        assert matcher.accept_token(tokens[-1])
    return tokens


def accepts(grammars: GrammarCompiler, tokenizer: Any, grammar: Grammar, text: str) -> bool:
    matcher = grammars.matcher(grammar)
    return all(map(matcher.accept_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()


@pytest.mark.parametrize("seed", range(3))
def test_a_rollback_undoes_accepted_tokens(grammars: GrammarCompiler, grammar: Grammar, seed: int) -> None:
    tokens = cursor(grammars.matcher(grammar), seed)
    matcher, seen = grammars.matcher(grammar), []
    for token in tokens:
        seen.append((matcher.token_mask(), matcher.is_accepting()))
        matcher.accept_token(token)
    choose, place = random.Random(seed), len(tokens)
    while place:
        back = choose.randint(1, place)
        matcher.rollback(back)
        place -= back
        mask, is_complete = seen[place]
        assert matcher.token_mask() == mask
        assert matcher.is_accepting() == is_complete
        matcher.rollback(len(cursor(matcher, seed + 1, limit=2)))  # forth another way, and back
        assert matcher.token_mask() == mask
    matcher.rollback(0)
    assert matcher.token_mask() == seen[0][0]


def test_masks_along_a_draft_are_those_of_single_steps(grammars: GrammarCompiler, grammar: Grammar) -> None:
    drafts = [cursor(grammars.matcher(grammar), seed, limit=6) for seed in (0, 1)]
    batch = Batch([Sequence([0], matcher=grammars.matcher(grammar), end_tokens=[2]) for _ in drafts])
    for _ in range(2):  # after a reset it begins anew
        along = GrammarCursor(batch.sequences, batch.sequences[0].matcher.token_mask().size)
        masks = along.masks(drafts)
        along.reset()
        for row, draft in enumerate(drafts):
            alone = grammars.matcher(grammar)
            for k, token in enumerate(draft):
                # The cursor adds the end token where a sentence may end.
                assert masks.rows[row][k] == alone.token_mask().with_tokens([2], legal=alone.is_accepting())
                alone.accept_token(token)


def test_an_illegal_token_changes_nothing(grammars: GrammarCompiler, grammar: Grammar) -> None:
    matcher = grammars.matcher(grammar)
    for token in cursor(grammars.matcher(grammar), seed=0):
        before = matcher.token_mask()
        for illegal in (~before.tensor()).nonzero()[::9999, 0].tolist():
            assert not matcher.accept_token(illegal)
            assert matcher.token_mask() == before
        assert matcher.accept_token(token)
        matcher.rollback(1)
        assert matcher.token_mask() == before
        assert matcher.accept_token(token)


def test_the_caller_may_change_the_tensor_of_a_mask(grammars: GrammarCompiler, grammar: Grammar) -> None:
    matcher = grammars.matcher(grammar)
    before = TokenMask.of(matcher.token_mask().tensor().clone())
    matcher.token_mask().tensor().fill_(True)
    assert matcher.token_mask() == before
    assert grammars.matcher(grammar).token_mask() == before


def test_forced_tokens_are_taken(grammars: GrammarCompiler, tokenizer: Any) -> None:
    matcher = grammars.matcher(Grammar.json_schema({"const": {"a long name": "and a long value"}}))
    tokens = []
    while options := legal(matcher):
        tokens.append(options[-1] if len(options) == 1 else max(options, key=lambda i: len(tokenizer.decode([i]))))
        assert matcher.accept_token(tokens[-1])
    assert matcher.is_accepting()
    assert tokenizer.decode(tokens) == '{"a long name": "and a long value"}'


def test_after_the_end_no_token_is_legal(grammars: GrammarCompiler, tokenizer: Any) -> None:
    matcher = grammars.matcher(Grammar.choice(["yes"]))
    assert not matcher.is_accepting()
    assert all(map(matcher.accept_token, tokenizer.encode("yes")))
    assert matcher.is_accepting()
    assert matcher.token_mask().is_empty
    assert not matcher.accept_token(tokenizer.eos_token_id)
    assert not matcher.accept_token(tokenizer.encode("s")[0])
    matcher.rollback(1)
    assert not matcher.is_accepting()
    assert not matcher.token_mask().is_empty


def test_special_tokens_are_never_legal(grammars: GrammarCompiler, tokenizer: Any) -> None:
    matcher = grammars.matcher(Grammar.regex(r"(?s).*"))
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    assert tokenizer.eos_token_id in special
    for token in tokenizer.encode("a <|im_end|", add_special_tokens=False):
        assert not matcher.token_mask().tensor()[sorted(special)].any()
        assert not any(map(matcher.accept_token, special))
        assert matcher.accept_token(token)


def test_two_matchers_of_one_grammar_do_not_share_their_state(grammars: GrammarCompiler, grammar: Grammar) -> None:
    one, other = grammars.matcher(grammar), grammars.matcher(grammar)
    start = other.token_mask()
    cursor(one, seed=0)
    assert other.token_mask() == start
    assert cursor(other, seed=3) == cursor(grammars.matcher(grammar), seed=3)


@pytest.mark.parametrize(("grammar", "inside", "outside"), LANGUAGES, ids=[g.source[:60] for g, _, _ in LANGUAGES])
def test_both_engines_mean_the_same_language(
    grammars: GrammarCompiler, tokenizer: Any, grammar: Grammar, inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not accepts(grammars, tokenizer, grammar, text)] == []
    assert [text for text in outside if accepts(grammars, tokenizer, grammar, text)] == []
    if grammar.kind == "json_schema":
        validator = jsonschema.Draft202012Validator(json.loads(grammar.source))
        assert all(validator.is_valid(json.loads(text)) for text in inside)


def test_random_texts_of_a_schema_are_valid(grammars: GrammarCompiler, tokenizer: Any) -> None:
    finished = 0
    for seed in range(30):
        matcher = grammars.matcher(Grammar.json_schema(SHOP))
        tokens = cursor(matcher, seed, limit=200)
        if matcher.is_accepting():
            finished += 1
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), SHOP)
    assert finished > 10


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("(unclosed"),
        Grammar.regex("a)|(?:b"),
        Grammar.regex("(?=a)a"),
        Grammar.regex(r"(a)\1"),
        Grammar.regex(r"[^\s\S]"),
        Grammar.json_schema(False),
        Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 2}),
        Grammar.json_schema({"type": "array", "contains": {"type": "null"}}),
        Grammar.json_schema({"$ref": "https://example.com/schema"}),
        Grammar.json_schema({"type": "banana"}),
    ],
    ids=lambda grammar: grammar.source,
)
def test_what_an_engine_does_not_express_is_an_error(grammars: GrammarCompiler, grammar: Grammar) -> None:
    for _ in range(2):  # the second time it may be known
        with pytest.raises(GrammarError):
            grammars.matcher(grammar)


def test_outlines_has_no_context_free_grammars(compilers: dict[str, GrammarCompiler]) -> None:
    with pytest.raises(GrammarError, match="lark"):
        compilers["outlines"].matcher(Grammar.lark('start: "a"'))


def test_auto_takes_the_first_engine_that_can(compilers: dict[str, GrammarCompiler], tokenizer: Any) -> None:
    only_outlines = Grammar.json_schema({"not": {"type": ["object", "array", "string", "number", "boolean"]}})
    with pytest.raises(GrammarError):
        compilers["llguidance"].matcher(only_outlines)
    assert accepts(compilers["auto"], tokenizer, only_outlines, "null")
    lark = compilers["auto"].matcher(Grammar.lark('start: "a"'))
    assert type(lark) is type(compilers["llguidance"].matcher(Grammar.lark('start: "a"')))
    with pytest.raises(GrammarError, match=r"(?s)llguidance: .*contains.*outlines: .*contains"):
        compilers["auto"].matcher(Grammar.json_schema({"type": "array", "contains": {"type": "null"}}))


def test_an_engine_of_another_name_is_refused(tokenizer: Any) -> None:
    with pytest.raises(GrammarError, match="expected one of llguidance, outlines, auto"):
        compiler(tokenizer, len(tokenizer), "xgrammar")  # type: ignore[arg-type]
