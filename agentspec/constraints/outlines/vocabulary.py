"""What each token writes, as bytes, and which tokens an automaton may read next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from agentspec.constraints.outlines.automaton import Automaton
from agentspec.errors import GrammarError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece writes it for a space


def token_bytes(tokenizer: Any, vocab_size: int) -> list[bytes | None]:
    """What each id adds to a text; None for special tokens, ids without a token, and tokens that write nothing.

    Args:
        tokenizer: a fast tokenizer of transformers: byte-level BPE, or one that writes spaces as sentencepiece does.
        vocab_size: ids that the model's logits cover.

    Raises:
        GrammarError: for another kind of tokenizer; says which.
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
        raise GrammarError(f"Grammars by outlines need a fast tokenizer, got {type(tokenizer).__name__}.")
    decoders = list(_decoders(json.loads(backend.to_str())["decoder"]))
    kinds = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in kinds:
        return _byte_level
    if "Metaspace" in kinds or any(
        d["type"] == "Replace" and d["pattern"].get("String") == _SPACE and d["content"] == " " for d in decoders
    ):
        return _byte_fallback if "ByteFallback" in kinds else _sentencepiece
    raise GrammarError(
        "Grammars by outlines need a tokenizer whose tokens are bytes (byte-level BPE) or text in sentencepiece's "
        f"form; {type(tokenizer).__name__} decodes by {', '.join(kinds) or 'nothing'}."
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


class TokenTrie:
    """Tokens by their prefixes, so that an automaton reads a prefix once for all tokens that begin with it.

    Args:
        written: what each id writes, as ``token_bytes`` gives it.
    """

    def __init__(self, written: list[bytes | None]) -> None:
        tokens = sorted((text, i) for i, text in enumerate(written) if text)
        self._ids = np.array([i for _, i in tokens], dtype=np.int64)
        self._vocab_size = len(written)
        lengths = np.array([len(text) for text, _ in tokens], dtype=np.int64)
        longest = int(lengths.max(initial=0))
        padded = b"".join(text.ljust(longest, b"\0") for text, _ in tokens)
        matrix = np.frombuffer(padded, dtype=np.uint8).reshape(len(tokens), longest)
        # Per level: where each node's parent stands in the level above, and the byte that leads from there to it.
        self._levels: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = []
        self._ends = np.zeros(len(tokens), dtype=np.int64)  # each token's node, all levels counted through
        parents = np.zeros(len(tokens), dtype=np.int64)
        is_new = np.arange(len(tokens)) == 0
        count = 0
        for depth in range(longest):
            goes_on = lengths > depth
            is_new[1:] |= (matrix[1:, depth] != matrix[:-1, depth]) | ~goes_on[:-1]
            first = np.flatnonzero(is_new & goes_on)  # of each node's tokens
            nodes = np.cumsum(is_new & goes_on) - 1
            self._levels.append((parents[first], matrix[first, depth]))
            ends_here = lengths == depth + 1
            self._ends[ends_here] = count + nodes[ends_here]
            count += len(first)
            parents = nodes
        self._nodes = count

    def legal(self, automaton: Automaton, state: int) -> npt.NDArray[np.bool_]:
        """``[V]``: the tokens that lead from a state to a live one."""
        behind = np.zeros(self._nodes, dtype=np.uint16)
        above = np.array([state], dtype=np.uint16)
        count = 0
        for parents, step in self._levels:
            above = automaton.moves[above[parents], automaton.classes[step]]
            if not above.any():
                break
            behind[count : count + len(above)] = above
            count += len(above)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._ids] = behind[self._ends] != 0
        return mask
