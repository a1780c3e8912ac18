"""Bytes of the tokens of a vocabulary, and the common prefix of two lists of tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentspec.errors import TokenizerError

NO_TOKEN = -1
"""The id that stands for a token where none may come."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_Step = Callable[[str], str | bytes]


def well_formed(text: str) -> str:
    """Return a text that can be encoded: halves of a surrogate pair are joined, a lone one becomes U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """Return the bytes of each id; None for special tokens, ids without a token, and tokens that write nothing.

    Args:
        tokenizer: a fast tokenizer of transformers whose decoder writes each token alike in all places: byte-level
            BPE, or one that writes spaces as sentencepiece does.
        vocab_size: ids that the model's logits cover.

    Raises:
        TokenizerError: for another kind of tokenizer; names it.
    """
    written = named_bytes(tokenizer, vocab_size)
    for i in special_ids(tokenizer):
        if i < vocab_size:
            written[i] = None
    return written


def named_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """Return the bytes of each id as ``token_bytes`` does, with the names of special tokens in place of None."""
    decode = _decoder(tokenizer)
    written: list[bytes | None] = [None] * vocab_size
    for token, i in tokenizer.get_vocab().items():
        if i < vocab_size:
            written[i] = decode(token) or None
    return written


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens."""
    added = tokenizer.added_tokens_decoder
    return set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}


def exact_decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """Return a function from ids to the text of their bytes.

    A tokenizer's own ``decode`` may strip a space at the beginning.

    Raises:
        TokenizerError: for a tokenizer whose tokens have no known bytes.
    """
    vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
    written = (token_bytes if skip_special_tokens else named_bytes)(tokenizer, vocab_size)

    def decode(ids: Sequence[int]) -> str:
        return b"".join(written[i] or b"" for i in ids if i < vocab_size).decode(errors="replace")

    return decode


def _decoder(tokenizer: Any) -> Callable[[str], bytes]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"Expected a fast tokenizer of transformers, got {type(tokenizer).__name__}.")
    decoders = list(_decoders(json.loads(backend.to_str())["decoder"]))
    steps = list(_steps(decoders))
    if not steps or None in steps:
        raise TokenizerError(
            "Expected a tokenizer whose tokens are bytes (byte-level BPE) or text in sentencepiece's form; "
            f"{type(tokenizer).__name__} decodes by {', '.join(d['type'] for d in decoders) or 'nothing'}."
        )
    return functools.partial(_written, [step for step in steps if step is not None])


def _written(steps: Sequence[_Step], token: str) -> bytes:
    value: str | bytes = token
    for step in steps:
        value = step(value) if isinstance(value, str) else value
    return value if isinstance(value, bytes) else value.encode()


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    elif decoder is not None:
        yield decoder


def _steps(decoders: Sequence[dict[str, Any]]) -> Iterator[_Step | None]:
    """Yield the step of each decoder, in their order; None for one that does not treat each token alike."""
    preceding: set[str] = set()
    for decoder in decoders:
        kind = decoder["type"]
        is_joined = bool(preceding & {"Fuse", "ByteLevel"})
        if is_joined and kind in ("Strip", "Fuse"):
            continue  # changes the ends of a whole text, not a token
        is_refused = is_joined or ("ByteFallback" in preceding and kind in ("Strip", "ByteLevel"))
        yield None if is_refused else _step(decoder)
        preceding.add(kind)


def _step(decoder: dict[str, Any]) -> _Step | None:
    kind = decoder["type"]
    if kind == "Replace" and "String" in decoder["pattern"]:
        return functools.partial(_replaced, decoder["pattern"]["String"], decoder["content"])
    if kind == "Metaspace":
        return functools.partial(_replaced, decoder["replacement"], " ")
    if kind == "Strip":
        return functools.partial(_stripped, decoder)
    others: dict[str, _Step] = {"ByteLevel": _byte_level, "ByteFallback": _byte_fallback, "Fuse": str}
    return others.get(kind)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable ones are themselves, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    # As the decoder of tokenizers does: a token with another character in it is plain text.
    return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()


def _byte_fallback(token: str) -> str | bytes:
    is_byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(is_byte[1], 16)]) if is_byte else token


def _replaced(pattern: str, content: str, token: str) -> str:
    return token.replace(pattern, content)


def _stripped(decoder: dict[str, Any], token: str) -> str:
    for _ in range(decoder["start"]):
        token = token.removeprefix(decoder["content"])
    for _ in range(decoder["stop"]):
        token = token.removesuffix(decoder["content"])
    return token


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of equal leading items.

    It is found by comparing halves: whole-slice comparison runs at C speed.
    """
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:  # left[:low] == right[:low] and left[:high] != right[:high]
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
