"""A stop string that holds a token without text is seen, and cut exactly, in text, ids and log-probabilities."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from scripted import Oracle, ScriptedModel, tokenizer

from agentspec import Cascade, FinishReason, LocalEngine, Request, SamplingParams, Sequence, SpeculativeDecoder
from agentspec.runtime.detokenizer import Detokenizer

# Letters, a token of several, two special tokens, and the three bytes of a sign.
PIECES = (b"a", b"b", b"ab", b"<s>", b"<t>", *(bytes([byte]) for byte in "€".encode()))
SPECIAL = {3: "<s>", 4: "<t>"}
STOPS: list[tuple[str, ...]] = [
    ("<s>",),
    ("<s>a",),
    ("b<s>",),
    ("a<s>b",),
    ("<s><t>",),
    ("<t>a", "b"),
    ("ab", "<s>b"),
    ("€<s>",),
    ("\ufffd<s>",),
    (">a<s>",),
]


def spell(ids: list[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def show(ids: list[int]) -> str:
    return spell([i for i in ids if i not in SPECIAL])


def started(**settings: Any) -> Sequence:
    textless = frozenset(SPECIAL.values())
    spelled = Detokenizer(spell, apart=SPECIAL)
    detokenizer = Detokenizer(show, skip=set(SPECIAL), spelled=spelled, textless=textless)
    return Sequence([0], SamplingParams(max_tokens=99, **settings), detokenizer=detokenizer, seed=0)


def expected(tokens: list[int], stops: tuple[str, ...], keep: bool) -> tuple[str, list[int], bool]:
    """Text, ids, and whether a stop string ends them: of the shortest beginning that holds one."""
    hidden = [stop for stop in stops if any(mark in stop for mark in SPECIAL.values())]
    plain = [stop for stop in stops if stop not in hidden]
    for count in range(1, len(tokens) + 1):
        begun = tokens[:count]
        found = []
        whole = spell(begun)
        for stop in hidden:
            if (at := whole.find(stop)) >= 0:
                kept = next(n for n in range(count + 1) if len(spell(begun[:n])) >= at and _is_text(begun, n))
                inside = next(n for n in range(kept, -1, -1) if len(spell(begun[:n])) <= at and _is_text(begun, n))
                text = show(begun[:inside])
                if kept > inside and begun[inside] not in SPECIAL:
                    text += whole[len(spell(begun[:inside])) : at]
                found.append((text + stop, begun) if keep else (text, begun[:kept]))
        for stop in plain:
            if (at := show(begun).find(stop)) >= 0:
                kept = next(n for n in range(count + 1) if len(show(begun[:n])) >= at)
                while kept < count and len(show(begun[: kept + 1])) == at:
                    kept += 1
                found.append((show(begun)[: at + len(stop)], begun) if keep else (show(begun)[:at], begun[:kept]))
        if found:
            return (*min(found, key=lambda end: (len(end[0]), len(end[1]))), True)
    return show(tokens), tokens, False


def _is_text(tokens: list[int], count: int) -> bool:
    """Whether the first tokens end with a whole sign, or with one that nothing will complete."""
    follows = tokens[count] if count < len(tokens) else None
    return not spell(tokens[:count]).endswith("\ufffd") or follows is None or follows in SPECIAL


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stops", STOPS, ids=str)
def test_every_text_ends_as_the_spelled_text_does(stops: tuple[str, ...], keep: bool) -> None:
    """All texts of letters and special tokens up to a length, in blocks and token by token."""
    for length in range(1, 5):
        for tokens in itertools.product(range(5), repeat=length):
            text, ids, stopped = expected(list(tokens), stops, keep)
            for block in (1, 3):
                sequence, shown = started(stop=stops, include_stop=keep), []
                for at in range(0, length, block):
                    if sequence.finish_reason is None:
                        sequence.extend(list(tokens[at : at + block]))
                        shown.append((sequence.settled_text, sequence.settled_length))
                assert (sequence.finish_reason is not None) == stopped, (tokens, block)
                if not stopped:
                    sequence.finish(FinishReason.LENGTH)
                assert (sequence.text, sequence.tokens) == (text, ids), (tokens, block)
                assert all(text.startswith(settled) and count <= len(ids) for settled, count in shown), (tokens, shown)
                assert shown == sorted(shown, key=lambda piece: (len(piece[0]), piece[1]))


@pytest.mark.parametrize("stops", [("<s>",), ("\ufffd<s>",), ("€<s>",), ("<s>b",), ("a<s>",)], ids=str)
def test_unfinished_signs_before_a_special_token(stops: tuple[str, ...]) -> None:
    for tokens in itertools.product((0, 1, 3, 5, 6, 7), repeat=4):
        sequence, shown = started(stop=stops), []
        for token in tokens:
            if sequence.finish_reason is None:
                sequence.extend([token])
                shown.append((sequence.settled_text, sequence.settled_length))
        stopped = sequence.finish_reason is not None
        assert stopped == any(stop in spell(list(tokens[:n])) for n in range(5) for stop in stops)
        if not stopped:
            sequence.finish(FinishReason.LENGTH)
        assert list(tokens[: sequence.length]) == sequence.tokens
        assert all(sequence.text.startswith(text) and n <= sequence.length for text, n in shown), (tokens, shown)
        if stopped and stops == ("<s>",):
            assert sequence.tokens == list(tokens[: tokens.index(3)])
            assert sequence.text == show(sequence.tokens)


def test_a_special_token_before_a_plain_stop_string_was_not_part_of_it() -> None:
    sequence = started(stop="ab")
    sequence.extend([1, 3])
    assert sequence.settled_length == 2
    sequence.extend([0, 1])
    assert (sequence.tokens, sequence.text) == ([1, 3], "b")


# An engine

SAID = "Hello there<|im_start|>user: more<|end|>"


def engine(first: int = 0) -> tuple[LocalEngine, Any]:
    """Wants to say ``SAID``; with ``first``, drafts all of it in blocks of so many tokens."""
    known = tokenizer("qwen")
    script = known.encode(SAID, add_special_tokens=False)
    drafter = Oracle(1, script, first) if first else None
    model = ScriptedModel(len(known), 1, script)
    decoder = SpeculativeDecoder(model, Cascade([drafter]) if drafter else None, first)
    return LocalEngine(decoder, known), known


CASES = [
    ("<|im_start|>", "Hello there"),
    ("<|im_start|>user", "Hello there"),
    ("there<|im_start|>user:", "Hello "),
    ("ere<|im_start|>us", "Hello th"),
    ("more<|end|>", "Hello thereuser: "),
    ("<|end|>", "Hello thereuser: more"),
]


@pytest.mark.parametrize("first", [0, 1, 2, 3, 5, 40])
@pytest.mark.parametrize(("stop", "text"), CASES)
def test_a_stop_string_of_special_tokens_ends_a_request(first: int, stop: str, text: str) -> None:
    served, known = engine(first)
    whole = known.encode(SAID, add_special_tokens=False)
    params = SamplingParams(temperature=0, max_tokens=60, stop=(stop,), logprobs=1)
    [[done]] = served.generate([Request([0], params)])
    assert (done.text, done.finish_reason) == (text, FinishReason.STOP)
    assert list(done.tokens) == whole[: len(done.tokens)]
    before = SAID[: SAID.index(stop)]
    assert known.decode(list(done.tokens[:-1])) != before or known.decode(list(done.tokens)) == before
    assert len(known.decode(list(done.tokens[:-1]))) < max(1, len(before)) <= max(1, len(known.decode(done.tokens)))
    assert done.logprobs is not None
    assert [entry.token for entry in done.logprobs] == list(done.tokens)
    deltas = list(served.stream(Request([0], params)))
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.tokens] == list(done.tokens)
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in deltas)
    [[kept]] = served.generate([Request([0], SamplingParams(temperature=0, stop=(stop,), include_stop=True))])
    assert kept.text == text + stop
    assert stop in known.decode(list(kept.tokens))
    served.close()


def test_special_tokens_that_are_shown_are_found_in_the_text() -> None:
    served, _ = engine()
    for stop, text in CASES:
        params = SamplingParams(temperature=0, stop=(stop,), skip_special_tokens=False)
        [[done]] = served.generate([Request([0], params)])
        assert done.text == SAID[: SAID.index(stop)], text
    served.close()


def test_other_stop_strings_are_looked_for_in_the_text_that_is_shown() -> None:
    served, _ = engine()
    [[done]] = served.generate([Request([0], SamplingParams(temperature=0, stop=("thereuser", "im_start")))])
    assert done.text == "Hello "
    served.close()


def test_nothing_is_spelled_where_no_stop_string_needs_it() -> None:
    served, _ = engine()
    for stop, is_spelled in (("user", False), ("<|im_start|>", True)):
        [sequence] = served._admission(Request([0], SamplingParams(stop=(stop,))))
        assert sequence._detokenizer is not None
        assert (sequence._detokenizer.spelled is not None) is is_spelled
    served.close()
