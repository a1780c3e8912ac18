"""What each token of a vocabulary writes, as bytes; and what two lists of tokens have in common."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentspec.errors import TokenizerError

NO_TOKEN = -1
"""Stands for a token where none may come."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes it for a space


def well_formed(text: str) -> str:
    """A text that can be encoded: halves of a surrogate pair are joined, and a lone one becomes U+FFFD."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """What each id adds to a text; None for special tokens, ids without a token, and tokens that write nothing.

    Args:
        tokenizer: a fast tokenizer of transformers: byte-level BPE, or one that writes spaces as sentencepiece does.
        vocab_size: ids that the model's logits cover.

    Raises:
        TokenizerError: for another kind of tokenizer; says which.
    """
    decode = _decoder(tokenizer)
    written: list[bytes | None] = [None] * vocab_size
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    for token, i in tokenizer.get_vocab().items():
        if i < vocab_size and i not in special:
            written[i] = (added[i].content.encode() if i in added else decode(token)) or None
    return written


def _decoder(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"Expected a fast tokenizer of transformers, got {type(tokenizer).__name__}.")
    decoders = list(_decoders(json.loads(backend.to_str())["decoder"]))
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in kinds:
        return _byte_level
    if "Metaspace" in kinds or any(
        d["type"] == "Replace" and d["pattern"].get("String") == _SPACE and d["content"] == " " for d in decoders
    ):
        return _byte_fallback if "ByteFallback" in kinds else _sentencepiece
    raise TokenizerError(
        "Expected a tokenizer whose tokens are bytes (byte-level BPE) or text in sentencepiece's form; "
        f"{type(tokenizer).__name__} decodes by {', '.join(kinds) or 'nothing'}."
    )


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is not None and decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    elif decoder is not None:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    # As the decoder of tokenizers does: a token with another character in it is plain text.
    return bytes(map(_BYTE_OF.__getitem__, token)) if _BYTE_OF.keys() >= set(token) else token.encode()


def _byte_fallback(token: str) -> bytes:
    is_byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(is_byte[1], 16)]) if is_byte else _sentencepiece(token)


def _sentencepiece(token: str) -> bytes:
    return token.replace(_SPACE, " ").encode()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal leading items, found by comparing halves: whole-slice comparison runs at C speed."""
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
