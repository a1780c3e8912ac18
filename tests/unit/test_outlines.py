"""The outlines engine's own parts: what tokens write, automata and where they are kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import outlines_core
import pytest
from scripted import chatml_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentspec import Grammar, GrammarError
from agentspec.errors import TokenizerError
from agentspec.grammars.outlines import Compiler
from agentspec.grammars.outlines import automaton as automata
from agentspec.grammars.outlines.automaton import Automaton, build
from agentspec.grammars.outlines.text import literal
from agentspec.grammars.outlines.vocabulary import TokenTrie
from agentspec.runtime.cache import DiskCache
from agentspec.runtime.paths import CACHE_VARIABLE
from agentspec.runtime.tokens import token_bytes

FIRST = 1
TEXTS = ["é", "a b", " naïve 💡", "def f(x):\n\treturn 1", "  ", "\x00"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def written(tokenizer: Any) -> list[bytes | None]:
    return token_bytes(tokenizer, len(tokenizer))


def sentencepiece(decoder: Any, *, tokens: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A small tokenizer in sentencepiece's form, with the tokens of single bytes."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", *tokens]
    vocab = {name: i for i, name in enumerate(names)}
    model = models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


LLAMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
GEMMA = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])


def test_tokens_write_what_they_decode_to(tokenizer: Any, written: list[bytes | None]) -> None:
    whole = 0
    for i, text in enumerate(written):
        decoded = tokenizer.decode([i], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text is None:
            assert decoded == ""
        elif "\ufffd" not in decoded:
            assert text == decoded.encode()
            whole += 1
    assert whole > 1500


@pytest.mark.parametrize("name", ["embedded", "llama", "gemma"])
def test_the_tokens_of_a_text_write_the_text(tokenizer: Any, name: str) -> None:
    used = tokenizer if name == "embedded" else sentencepiece(LLAMA if name == "llama" else GEMMA)
    written = token_bytes(used, len(used))
    for text in TEXTS:
        ids = used.encode(text, add_special_tokens=False)
        assert b"".join(written[i] or b"" for i in ids) == text.encode()


def test_special_added_and_missing_tokens() -> None:
    used = sentencepiece(LLAMA)
    used.add_tokens(["<call>▁"])
    used.add_special_tokens({"additional_special_tokens": ["<think>"]})
    written = token_bytes(used, len(used) + 3)
    assert written[used.convert_tokens_to_ids("<call>▁")] == b"<call> "  # as its decoder writes it
    assert written[used.convert_tokens_to_ids("<think>")] is None
    assert written[used.convert_tokens_to_ids("</s>")] is None
    assert written[used.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert written[-3:] == [None] * 3
    assert len(token_bytes(used, 5)) == 5


def test_tokenizers_whose_tokens_are_no_bytes_are_refused_by_name() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    wordpiece = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    with pytest.raises(TokenizerError, match="WordPiece"):
        token_bytes(wordpiece, 3)
    with pytest.raises(TokenizerError, match="fast tokenizer of transformers, got int"):
        token_bytes(3, 3)
    with pytest.raises(GrammarError, match="WordPiece"):
        Compiler(wordpiece, 3, cache=None)


@pytest.mark.parametrize("regex", ["[0-9]{1,3}-(?:a|bc)*d", "(?s).{0,3}", "é+💡|[a-z]+ing", "yes|no|yes, of course"])
def test_masks_are_those_of_an_index_of_outlines_core(regex: str, written: list[bytes | None]) -> None:
    ids: dict[bytes, list[int]] = {}
    for i, text in enumerate(written):
        if text:
            ids.setdefault(text, []).append(i)
    eos = len(written)
    # As the engine does, but with the whole vocabulary, and a NUL that stands before every text.
    both = {**ids, **{b"\0" + text: [i + eos + 1 for i in same] for text, same in ids.items()}}
    index = outlines_core.Index(rf"(?:\x00(?:{regex})\z|)", outlines_core.Vocabulary(eos, both))
    automaton, trie = build(regex, None), TokenTrie(written)
    moves = index.get_transitions()
    todo = [(FIRST, {i - eos - 1: s for i, s in moves[index.get_initial_state()].items() if i > eos})]
    seen = set()
    while todo:
        state, row = todo.pop()
        found = np.flatnonzero(trie.legal(automaton, state)).tolist()
        assert found == sorted(i for i in row if i < eos)
        for token in found[:: max(1, len(found) // 20)]:
            after = automaton.after(state, written[token] or b"")
            assert bool(automaton.finals[after]) == index.is_final_state(row[token])
            if after not in seen:
                seen.add(after)
                todo.append((after, moves.get(row[token], {})))
    assert seen


def test_the_trie_gives_every_token_its_own_state() -> None:
    written = [b"a", b"ab", None, b"abc", b"b", b"a", b"a\0", b"\0"]
    trie = TokenTrie(written)
    for regex in ("ab.*", "(?s)a?.", "a\x00", "abc|b"):
        automaton = build(regex, None)
        expected = [bool(text and automaton.after(FIRST, text)) for text in written]
        assert trie.legal(automaton, FIRST).tolist() == expected


def test_no_token_leads_to_where_no_sentence_ends() -> None:
    automaton = build("a+[a&&b]|c", None)
    assert TokenTrie([b"a", b"c"]).legal(automaton, FIRST).tolist() == [False, True]


def test_a_long_counted_string_has_a_small_automaton(tokenizer: Any) -> None:
    """outlines-core alone takes exponential time and memory for it: more than 10 GB for 255 characters."""
    grammar = Grammar.json_schema({"type": "string", "maxLength": 255})
    matcher = Compiler(tokenizer, len(tokenizer), None).matcher(grammar)
    for token in tokenizer.encode('"' + "é\\n" * 127 + 'x"', add_special_tokens=False):
        assert matcher.accept_token(token)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        ("(a|b)*a(a|b){16}", "at most 50000"),
        ("a" * 600_000, "600000 characters"),
        (r"a\b", "word boundaries"),
        ("\ud800", "half a character"),
        ("a[^\\s\\S]", "cannot be compiled|nothing matches"),
    ],
)
def test_what_cannot_be_built_is_an_error(regex: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        build(regex, None)


def test_building_is_given_up_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automata, "MAX_SECONDS", 0.001)
    with pytest.raises(GrammarError, match="too large"):
        build("a", None)


def test_an_automaton_survives_its_binary_form() -> None:
    made = build("[a-f]{2,5}|é", None)
    again = Automaton.from_bytes(made.to_bytes())
    assert np.array_equal(again.moves, made.moves)
    assert np.array_equal(again.classes, made.classes)
    assert np.array_equal(again.finals, made.finals)


def test_broken_binary_forms_are_refused_or_stay_within_bounds() -> None:
    good = build("[a-f]{2,5}|é", None).to_bytes()
    choose = np.random.default_rng(0)
    for size in (0, 7, 263, 300, len(good) - 1):
        with pytest.raises(ValueError, match=r"automaton|Expected"):
            Automaton.from_bytes(good[:size])
    for _ in range(500):
        bad = bytearray(good)
        bad[choose.integers(len(bad))] = choose.integers(256)
        try:
            found = Automaton.from_bytes(bytes(bad))
        except ValueError:
            continue
        found.after(FIRST, bytes(range(256)))
        assert found.moves.max() < len(found.finals)


def test_a_grammar_is_compiled_once_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build("[ab]+", DiskCache(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(automata, "_compiled", lambda regex: pytest.fail("compiled again"))
        again = build("[ab]+", DiskCache(tmp_path / "cache"))
    assert np.array_equal(again.moves, made.moves)


def test_an_entry_of_another_version_or_a_damaged_one_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path / "cache")
    build("[ab]+", cache)
    compiled = automata._compiled
    calls = []
    monkeypatch.setattr(automata, "_compiled", lambda regex: calls.append(regex) or compiled(regex))
    cache.set(automata._KEY + "[ab]+", b"no automaton")
    assert build("[ab]+", cache).finals.any()
    assert len(calls) == 1
    build("[ab]+", cache)
    assert len(calls) == 1
    monkeypatch.setattr(automata, "_KEY", "outlines-core 99, automaton 1: ")
    build("[ab]+", cache)
    assert len(calls) == 2


def test_a_folder_that_others_may_enter_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    (tmp_path / "entries").mkdir(mode=0o755)
    matcher = Compiler(tokenizer, len(tokenizer)).matcher(Grammar.choice(["a"]))
    assert matcher.accept_token(tokenizer.encode("a")[0])
    assert list((tmp_path / "entries").iterdir()) == []


def test_literals_match_themselves() -> None:
    text = "".join(map(chr, range(1, 128))) + "é💡"
    automaton = build(literal(text), None)
    assert automaton.finals[automaton.after(FIRST, text.encode())]
    assert automaton.moves.astype(bool).sum() == len(text.encode())


def test_the_engine_does_without_the_package_outlines() -> None:
    code = "import sys, agentspec.grammars.outlines; assert 'outlines' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
