"""The pieces of text concatenate to the text of all tokens, and no piece shows half a character."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from agentspec.runtime.detokenizer import REPLACEMENT, Detokenizer, overlap


def decoder(table: list[bytes]) -> Callable[[list[int]], str]:
    """Ids to text by way of bytes, as byte-level tokenizers do it."""
    return lambda ids: b"".join(table[i] for i in ids).decode(errors="replace")


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    """The piece of each token, and of the flush."""
    shown = [push(detokenizer, token) for token in tokens]
    before = detokenizer.text
    detokenizer.flush()
    return [*shown, detokenizer.text.removeprefix(before)]


def push(detokenizer: Detokenizer, token: int) -> str:
    """The text that is complete with a token."""
    before = detokenizer.text
    detokenizer.push(token)
    return detokenizer.text.removeprefix(before)


# Whole letters; the bytes of é (2), € (3) and 😀 (4); tokens that end one character and begin the next.
TABLE = [
    b"a",
    b"b\n",
    *(bytes([b]) for b in "é€😀".encode()),
    b"\xa9\xe2",
    b"\xac\xf0\x9f",
    b"x\xe2\x82",
    "é€".encode(),
]
TEXTS = ["aé", "a€b\n", "😀", "éé€", "é😀a", "€", "aé€😀é"]


def splits(data: bytes) -> list[list[int]]:
    """Every way to write ``data`` with the tokens of the table."""
    if not data:
        return [[]]
    return [
        [token, *rest]
        for token, piece in enumerate(TABLE)
        if data.startswith(piece)
        for rest in splits(data[len(piece) :])
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_concatenate_however_a_text_is_split(text: str) -> None:
    ways = splits(text.encode())
    assert ways
    for tokens in ways:
        shown = pieces(Detokenizer(decoder(TABLE)), tokens)
        assert "".join(shown) == text
        assert REPLACEMENT not in "".join(shown)


def test_pieces_concatenate_for_any_bytes() -> None:
    """Broken characters too: every sequence of up to four of these bytes."""
    table = [bytes([b]) for b in (0x61, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0)]
    decode = decoder(table)
    for length in range(5):
        for tokens in itertools.product(range(len(table)), repeat=length):
            detokenizer = Detokenizer(decode)
            assert "".join(pieces(detokenizer, list(tokens))) == detokenizer.text == decode(list(tokens))


def test_a_character_waits_for_its_last_byte() -> None:
    detokenizer = Detokenizer(decoder(TABLE))
    shown = [push(detokenizer, token) for token in splits("a😀b\n".encode())[0]]
    assert shown == ["a", "", "", "", "😀", "b\n"]
    assert detokenizer.ends == [1, None, None, None, 2, 4]


def test_the_flush_shows_what_never_became_a_character() -> None:
    detokenizer = Detokenizer(decoder(TABLE))
    assert [push(detokenizer, token) for token in (0, 2)] == ["a", ""]
    assert (detokenizer.text, detokenizer.ends) == ("a", [1, None])
    for _ in range(2):
        detokenizer.flush()
        assert detokenizer.text == f"a{REPLACEMENT}"
    assert detokenizer.ends == [1, None]


def test_text_is_the_same_whenever_it_is_asked_for() -> None:
    tokens = [i % len(TABLE) for i in range(40)]
    for every in (1, 2, 7, 40):
        detokenizer = Detokenizer(decoder(TABLE), skip={1})
        for count, token in enumerate(tokens, 1):
            detokenizer.push(token)
            if count % every == 0:
                assert len(detokenizer.ends) == count
        asked = Detokenizer(decoder(TABLE), skip={1})
        pieces(asked, tokens)
        detokenizer.flush()
        assert (detokenizer.text, detokenizer.ends) == (asked.text, asked.ends)


def test_nothing_is_decoded_before_the_text_is_read() -> None:
    calls: list[list[int]] = []
    detokenizer = Detokenizer(lambda ids: calls.append(ids) or "".join("ab"[i] for i in ids))  # type: ignore[func-returns-value]
    detokenizer.push(0)
    detokenizer.push(1)
    assert not calls
    assert detokenizer.text == "ab"


def test_skipped_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(decoder(TABLE), skip={0})
    assert pieces(detokenizer, [0, 1, 0, 2, 0, 3, 0]) == ["", "b\n", "", "", "", "é", "", ""]


def test_a_text_that_depends_on_the_token_before_it() -> None:
    """As in SentencePiece: the first token of a text loses its space, the same token later keeps it."""
    words = [" the", " cat", "s", " sat"]
    detokenizer = Detokenizer(lambda ids: "".join(words[i] for i in ids).removeprefix(" "))
    assert pieces(detokenizer, [0, 1, 2, 3, 0]) == ["the", " cat", "s", " sat", " the", ""]


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    lengths: list[int] = []
    decode = decoder(TABLE)

    def counted(ids: list[int]) -> str:
        lengths.append(len(ids))
        return decode(ids)

    pieces(Detokenizer(counted), [0, 1, 2, 3] * 100)
    assert max(lengths) <= 4


@pytest.mark.parametrize(
    ("text", "mark", "length"),
    [
        ("", "abc", 0),
        ("xa", "abc", 1),
        ("xab", "abc", 2),
        ("abc", "abc", 0),
        ("aa", "aab", 2),
        ("x", "x", 0),
        ("b", "ab", 0),
    ],
)
def test_overlap_is_the_longest_end_that_begins_the_mark(text: str, mark: str, length: int) -> None:
    assert overlap(text, mark) == length
