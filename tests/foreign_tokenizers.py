"""Small tokenizers of every normalizer, pre-tokenizer, decoder and model that tokenizers offers."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "yes",
    "no",
    "es",
    " yes",
    " no",
    " sir",
    "name",
    '": "',
    '{"',
    "tool",
    "call",
    "Yes",
    "NO",
    "  ",
    "the",
    " the",
]
"""Tokens beside single characters."""

END = "<end>"
LIGATURE = "\ufb01"


def charsmap(key: str, replacement: str) -> bytes:
    """A map of sentencepiece with one entry: a double-array trie, then the text that stands for the key."""
    units = [0] * 4096
    at, follows = 0, 256
    units[0], at = follows << 10, follows
    encoded = key.encode()
    for number, byte in enumerate(encoded):
        at ^= byte
        follows += 256
        is_last = number == len(encoded) - 1
        units[at] = (at ^ follows) << 10 | is_last << 8 | byte
        at = follows
    units[at] = 1 << 31
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + replacement.encode() + b"\0"


NORMALIZERS: dict[str, Any] = {
    "none": None,
    **{
        name: getattr(normalizers, name)()
        for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")
    },
    "Strip": normalizers.Strip(left=True, right=True),
    "StripLeft": normalizers.Strip(left=True, right=False),
    "Prepend": normalizers.Prepend("\u2581"),
    "PrependText": normalizers.Prepend("yes"),
    "Replace": normalizers.Replace(" ", "\u2581"),
    "ReplaceText": normalizers.Replace("yes", "no"),
    "ReplaceRegex": normalizers.Replace(Regex(" {2,}"), "\u2581"),
    "BertNormalizer": normalizers.BertNormalizer(),
    "BertCased": normalizers.BertNormalizer(lowercase=False, strip_accents=True),
    "Precompiled": normalizers.Precompiled(charsmap(LIGATURE, "fi")),
    "ByteLevel": normalizers.ByteLevel(),
    "Llama": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    "T5": normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]),
}
SCHEMES = ("always", "first", "never")
PRE_TOKENIZERS: dict[str, Any] = {
    "none": None,
    **{
        f"ByteLevel-{prefix}-{regex}": pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
        for prefix, regex in itertools.product((True, False), repeat=2)
    },
    **{
        f"Metaspace-{scheme}-{split}": pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
        for scheme, split in itertools.product(SCHEMES, (True, False))
    },
    **{
        name: getattr(pre_tokenizers, name)()
        for name in ("BertPreTokenizer", "Digits", "Punctuation", "UnicodeScripts", "Whitespace", "WhitespaceSplit")
    },
    "DigitsAlone": pre_tokenizers.Digits(individual_digits=True),
    "CharDelimiterSplit": pre_tokenizers.CharDelimiterSplit(" "),
    "FixedLength": pre_tokenizers.FixedLength(length=3),
    **{
        f"Split-{behaviour}": pre_tokenizers.Split(Regex(r"\s"), behaviour)
        for behaviour in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous")
    },
    "Sequence": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    "SequenceOfBytes": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    ),
}
MODELS = ("bpe", "bpe-bytes", "unigram", "wordpiece", "wordlevel")

_MARK = "\u2581"
_PRINTABLE = [chr(c) for c in range(33, 127)]


def _bytes_of(text: str) -> str:
    """A text in the alphabet of byte-level tokenizers."""
    return "".join(
        piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    )


def _merged(words: list[str], alphabet: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of characters and of the beginnings of words, and the merges that make these."""
    vocabulary = list(dict.fromkeys(alphabet))
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return {token: i for i, token in enumerate(vocabulary)}, merges


def _model(kind: str) -> tuple[Any, Any]:
    """A model, and the decoder that goes with it."""
    spaced = [word.replace(" ", _MARK) for word in WORDS]
    bytewise = [f"<0x{i:02X}>" for i in range(256)]
    sentencepiece = decoders.Sequence([decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    if kind == "bpe-bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        return models.BPE(*_merged([_bytes_of(word) for word in WORDS], alphabet)), decoders.ByteLevel()
    if kind == "bpe":
        vocabulary, merges = _merged(spaced, ["<unk>", *bytewise, _MARK, *_PRINTABLE])
        llama = decoders.Sequence([sentencepiece, decoders.Strip(" ", 1, 0)])
        return models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True), llama
    tokens = list(dict.fromkeys(["<unk>", *bytewise, _MARK, *_PRINTABLE, *spaced]))
    if kind == "unigram":
        scored = [(token, -2.0 - (len(token) == 1) * 8.0) for token in tokens]
        return models.Unigram(scored, unk_id=0, byte_fallback=True), sentencepiece
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = models.WordPiece if kind == "wordpiece" else models.WordLevel
    return made(vocabulary, unk_token="<unk>"), sentencepiece


def make(model: str, normalizer: str, pre_tokenizer: str, decoder: Any = None) -> PreTrainedTokenizerFast:
    """A tokenizer of named parts; the decoder is the model's own where none is given."""
    made, usual = _model(model)
    backend = Tokenizer(made)
    if NORMALIZERS[normalizer] is not None:
        backend.normalizer = NORMALIZERS[normalizer]
    if PRE_TOKENIZERS[pre_tokenizer] is not None:
        backend.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]
    backend.decoder = usual if decoder is None else decoder
    backend.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, clean_up_tokenization_spaces=False)


def words(tokens: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, which cannot write everything."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*tokens, "<unk>"])}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token=END)


def parts(mixed: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Every normalizer and every pre-tokenizer with every model, and some mixtures."""
    for model in MODELS:
        usual = "ByteLevel-False-True" if model == "bpe-bytes" else "Metaspace-first-False"
        yield from ((model, name, usual) for name in NORMALIZERS)
        yield from ((model, "none", name) for name in PRE_TOKENIZERS)
    rng = random.Random(seed)
    for _ in range(mixed):
        yield rng.choice(MODELS), rng.choice(list(NORMALIZERS)), rng.choice(list(PRE_TOKENIZERS))
