"""Grammars over every normalizer, pre-tokenizer and model of tokenizers: all texts of a language, and no others."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import foreign_tokenizers as foreign
import jsonschema
import pytest
from tokenizers import decoders

from agentspec import Grammar
from agentspec.errors import GrammarError, TokenizerError
from agentspec.grammars import begin, compiler
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.tool_calls import ReasoningFormat
from agentspec.runtime.spelling import Spelling, spell
from agentspec.runtime.tokens import exact_decoder, token_bytes

OPTIONS = [
    "yes",
    "no",
    " yes sir",
    "Yes",
    "a\ufb01n",
    "  two  spaces ",
    "e\u0301\u00e9",
    "line\n",
    "NO",
    "tool_call",
    "3 \u0663",
]
PATTERN = "(yes|no|NO)( sir|\ufb01)? ?[0-9]{0,2}"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["yes", " no", "\ufb01"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "yes", "parameters": SCHEMA}}
CALL = re.compile(r'<tool_call>\n\{"name": "yes", "arguments": (.*)\}\n</tool_call>')
MIXED = 15
"""Mixtures of parts beside each part alone."""


def is_object(text: str) -> bool:
    value = json.loads(text)
    jsonschema.validate(value, SCHEMA)
    return text == json.dumps(value, ensure_ascii=False)


GRAMMARS: dict[str, tuple[Grammar, Any]] = {
    "choice": (Grammar.choice(OPTIONS), OPTIONS.__contains__),
    "regex": (Grammar.regex(PATTERN), re.compile(PATTERN).fullmatch),
    "schema": (Grammar.json_schema(SCHEMA), is_object),
    "tools": (Grammar.tools([TOOL]), lambda text: is_object(CALL.fullmatch(text)[1])),
}


def cursor(matcher: Matcher, rng: random.Random, limit: int = 200) -> list[int]:
    """A random legal text."""
    ids: list[int] = []
    while not matcher.is_terminated() and len(ids) < limit:
        legal = matcher.token_mask().tensor().nonzero().flatten().tolist()
        if matcher.is_accepting() and (not legal or rng.random() < 0.3):
            break
        assert legal, f"a dead end after {ids}"
        token = rng.choice(legal)
        assert matcher.accept_token(token), f"{token} is in the mask and refused"
        ids.append(token)
    assert matcher.is_accepting()
    return ids


def can_write(matcher: Matcher, written: list[bytes | None], text: bytes) -> bool:
    """Whether a text can be written to its end."""
    if not text and matcher.is_accepting():
        return True
    legal = matcher.token_mask().tensor().nonzero().flatten().tolist()
    fits = sorted((i for i in legal if written[i] and text.startswith(written[i])), key=lambda i: -len(written[i]))
    for token in fits:
        assert matcher.accept_token(token)
        if can_write(matcher, written, text[len(written[token]) :]):
            return True
        matcher.rollback(1)
    return False


@pytest.mark.parametrize("model", foreign.MODELS)
def test_every_random_text_is_in_the_language_and_every_text_is_reachable(model: str) -> None:
    rng = random.Random(1)
    tried = 0
    for kind, normalizer, pre_tokenizer in foreign.parts(MIXED):
        if kind != model:
            continue
        tokenizer = foreign.make(kind, normalizer, pre_tokenizer)
        written, decode = token_bytes(tokenizer, len(tokenizer)), exact_decoder(tokenizer, skip_special_tokens=True)
        for engine in ("llguidance", "outlines"):
            grammars = compiler(tokenizer, len(tokenizer), engine)
            for name, (grammar, is_in) in GRAMMARS.items():
                if name == "tools" and engine == "outlines":
                    continue
                ids = cursor(grammars.matcher(grammar), rng)
                place = f"{engine} {name} over {normalizer}, {pre_tokenizer}: {decode(ids)!r}"
                assert is_in(decode(ids)), place
                tried += 1
            text = rng.choice(OPTIONS)
            assert can_write(grammars.matcher(Grammar.choice(OPTIONS)), written, text.encode()), (normalizer, text)
    assert tried > 200


TEXTS = [
    *OPTIONS,
    "",
    " ",
    "es yes",
    "YES " * 30,
    "\u0130\u212b",
    "<end>",
    "\u2581",
    "<0x41>",
    "\x00\x7f",
    "\U0001f600" * 3,
]


@pytest.mark.parametrize("model", foreign.MODELS)
def test_a_text_is_cut_into_tokens_that_write_it(model: str) -> None:
    for kind, normalizer, pre_tokenizer in foreign.parts(0):
        if kind == model:
            tokenizer = foreign.make(kind, normalizer, pre_tokenizer)
            written = token_bytes(tokenizer, len(tokenizer))
            cut = Spelling(tokenizer, written)
            for text in TEXTS:
                ids = cut(text)
                assert b"".join(written[i] for i in ids) == text.encode(), (normalizer, pre_tokenizer, text)


def test_the_tokenizers_own_cut_is_kept_where_it_writes_the_text() -> None:
    """Also of a text that continues another, where a tokenizer would put a space before it."""
    tokenizer = foreign.make("unigram", "none", "Metaspace-first-False")
    cut = Spelling(tokenizer, token_bytes(tokenizer, len(tokenizer)))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("yes")) == ["\u2581yes"]
    assert tokenizer.convert_ids_to_tokens(cut("yes")) == ["yes"]
    assert tokenizer.convert_ids_to_tokens(cut(" yes yes")) == ["\u2581yes", "\u2581yes"]
    upper = foreign.make("bpe", "Lowercase", "none")
    cut = Spelling(upper, token_bytes(upper, len(upper)))
    assert upper.convert_ids_to_tokens(cut("Yesname")) == ["Yes", "name"]


def test_a_cut_ends_where_no_token_writes_on() -> None:
    tokenizer = foreign.words(["yes", " ", "no"])
    cut = Spelling(tokenizer, token_bytes(tokenizer, len(tokenizer)))
    assert tokenizer.convert_ids_to_tokens(cut("yes no!yes")) == ["yes", " ", "no"]
    assert cut("!") == []
    grammars = compiler(tokenizer, len(tokenizer))
    matcher = grammars.matcher(Grammar.choice(["yes!", "no"]))
    assert (
        matcher.token_mask().tensor().nonzero().flatten().tolist()
    )  # what cannot be finished is found when it is tried
    with pytest.raises(GrammarError, match="no first token"):
        grammars.matcher(Grammar.choice(["!yes"]))


@pytest.mark.parametrize("name", ["none", "Lowercase", "Llama", "PrependText", "NFKC"])
def test_the_closing_of_the_reasoning_is_written_exactly(name: str) -> None:
    tokenizer = foreign.make("bpe", name, "Metaspace-first-False")
    grammar = Grammar.tools([TOOL], required=False, thought=ReasoningFormat(opener=""), thinking_budget=3)
    matcher = begin(grammar, compiler(tokenizer, len(tokenizer)), tokenizer)
    ids = []
    while len(ids) < 60 and "</think>" not in tokenizer.decode(ids):
        ids.append(random.Random(len(ids)).choice(matcher.token_mask().tensor().nonzero().flatten().tolist()))
        assert matcher.accept_token(ids[-1])
    text = exact_decoder(tokenizer, skip_special_tokens=True)(ids)
    assert text.endswith("\n</think>")
    assert not text.endswith(" \n</think>")


def test_names_of_special_tokens_are_their_ids_in_a_closing() -> None:
    tokenizer = foreign.make("bpe", "Llama", "none")
    ids = spell(tokenizer, f"yes{foreign.END}no")
    assert tokenizer.convert_ids_to_tokens(ids) == ["yes", foreign.END, "no"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})  # a tokenizer that has grown
    assert tokenizer.convert_ids_to_tokens(spell(tokenizer, "\n</think>"))[-1] == "</think>"


DECODERS = {
    "ByteLevel": decoders.ByteLevel(),
    "Metaspace": decoders.Metaspace(),
    "MetaspaceMark": decoders.Metaspace(replacement="_"),
    "Fuse": decoders.Fuse(),
    "ByteFallback": decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    "Replace": decoders.Sequence([decoders.Replace("e", "oo"), decoders.Fuse()]),
    "StripEach": decoders.Sequence([decoders.Strip("y", 1, 0), decoders.Fuse()]),
    "Gemma": decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "BytesFirst": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
REFUSED = {
    "WordPiece": decoders.WordPiece(),
    "BPEDecoder": decoders.BPEDecoder(),
    "CTC": decoders.CTC(),
    "ReplaceRegex": decoders.Sequence([decoders.Replace(foreign.Regex("e+"), "o"), decoders.Fuse()]),
    "ReplaceJoined": decoders.Sequence([decoders.Fuse(), decoders.Replace("es", "o")]),
    "StripBytes": decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()]),
    "BytesJoined": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("es", "o")]),
}


@pytest.mark.parametrize("name", DECODERS)
def test_the_bytes_of_tokens_are_what_the_decoder_writes(name: str) -> None:
    tokenizer = foreign.make("bpe", "none", "none", DECODERS[name])
    tokenizer.add_tokens(["<0x41>x", "\u2581\u2581", "\u00e9t\u00e9", "_e_y"])
    written = token_bytes(tokenizer, len(tokenizer))
    decode = exact_decoder(tokenizer, skip_special_tokens=True)
    first = tokenizer.convert_tokens_to_ids("q")
    rng = random.Random(0)
    for ids in ([first, *rng.choices(range(len(tokenizer) - 8, len(tokenizer)), k=3)] for _ in range(50)):
        assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    ids = [first, *(i for i, text in enumerate(written) if text and i > 256)]
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("engine", ["llguidance", "outlines"])
def test_a_decoder_that_does_not_take_tokens_by_themselves_is_refused(name: str, engine: str) -> None:
    tokenizer = foreign.make("bpe", "none", "none", REFUSED[name])
    with pytest.raises(TokenizerError, match="decodes by .*" + name[:4].replace("Byte", "")):
        token_bytes(tokenizer, len(tokenizer))
    with pytest.raises(GrammarError, match="decodes by"):
        compiler(tokenizer, len(tokenizer), engine)


@pytest.mark.parametrize("engine", ["llguidance", "outlines"])
def test_ids_beyond_the_tokenizers_are_never_legal(engine: str) -> None:
    tokenizer = foreign.make("bpe", "none", "none")
    size = len(tokenizer)
    legal = compiler(tokenizer, size + 9, engine).matcher(Grammar.regex("(.|\\n)*")).token_mask().tensor()
    assert legal[: size - 1].any()
    assert not legal[size:].any()
