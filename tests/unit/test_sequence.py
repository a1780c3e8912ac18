"""A commit ends ids, text, log-probabilities and grammar at the earliest boundary of a block."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from enumeration import AutomatonMatcher, TableModel

from agentspec import Batch, FinishReason, ModelDrafter, SamplingParams, Sequence, SpeculativeDecoder
from agentspec.runtime.detokenizer import Detokenizer
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.sampling import warp

PIECES = ("a", "b", "c", "abc", "xay", "</s>")
A, B, C, ABC, XAY, END = range(len(PIECES))
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def decode(ids: list[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def started(*, skip_end: bool = True, matcher: AutomatonMatcher | None = None, **settings: Any) -> Sequence:
    """Return a sequence after a prompt, with text."""
    detokenizer = Detokenizer(decode, skip={END} if skip_end else ())
    return Sequence(
        [A, END, B], SamplingParams(**settings), matcher=matcher, end_tokens={END}, detokenizer=detokenizer, seed=0
    )


# End tokens


@pytest.mark.parametrize("at", range(6))
def test_nothing_follows_an_end_token(at: int) -> None:
    block = [A, B, C, A, B, C]
    block[at] = END
    sequence = started()
    assert sequence.extend(block) == at + 1
    assert sequence.tokens == block[: at + 1]
    assert sequence.text == decode(block[:at])
    assert sequence.finish_reason == STOP
    assert sequence.context[: sequence.prompt_length] == [A, END, B]


def test_a_stop_token_of_the_request_ends_like_an_end_token() -> None:
    sequence = started(stop_token_ids=(C,))
    assert sequence.extend([A, C, B]) == 2
    assert (sequence.tokens, sequence.finish_reason) == ([A, C], STOP)


# Stop strings


@pytest.mark.parametrize(
    ("blocks", "stop", "text", "tokens"),
    [
        pytest.param([[A, B, C, A]], "b", "a", [A], id="a token of its own"),
        pytest.param([[A, XAY, B]], "a", "", [], id="at the very start"),
        pytest.param([[B, XAY, B]], "a", "bx", [B, XAY], id="inside a token, which keeps its beginning"),
        pytest.param([[B, ABC, B]], "bc", "ba", [B, ABC], id="the end of a token"),
        pytest.param([[B, ABC, B]], "abc", "b", [B], id="a whole token"),
        pytest.param([[C, A, B, C]], "ab", "c", [C], id="two tokens"),
        pytest.param([[C, ABC, A, B]], "bca", "ca", [C, ABC], id="the end of one token and the next"),
        pytest.param([[C, B, XAY, C]], "bx", "c", [C], id="a token and the beginning of the next"),
        pytest.param([[C], [A], [B, C]], "ab", "c", [C], id="two blocks"),
        pytest.param([[C, A], [B], [A], [B, B]], "abab", "c", [C], id="four tokens of four blocks"),
        pytest.param([[A, A], [A, B]], "aab", "a", [A], id="a beginning that repeats"),
        pytest.param([[C, B, *[A, B, C, XAY] * 8]], "ba", "c", [C], id="near the start of a long block"),
        pytest.param([[A, B, C]], ("c", "bc", "b"), "a", [A], id="the earliest of several"),
        pytest.param([[A, B, C]], ("zz", "abcd", "c"), "ab", [A, B], id="others that never end"),
        pytest.param([[B, ABC]], ("c", "b", "abc"), "", [], id="the earliest start"),
    ],
)
def test_a_stop_string_ends_text_and_tokens(
    blocks: list[list[int]], stop: str | tuple[str, ...], text: str, tokens: list[int]
) -> None:
    sequence = started(stop=stop)
    for block in blocks:
        assert sequence.finish_reason is None
        sequence.extend(block)
    assert (sequence.text, sequence.tokens, sequence.finish_reason) == (text, tokens, STOP)
    assert sequence.settled_text == text


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    sequence = started(stop="ba")  # the prompt ends with b
    sequence.extend([A, C])
    assert (sequence.text, sequence.finish_reason) == ("ac", None)


@pytest.mark.parametrize("block", [[C, A, B, C], [C, ABC, C], [C, ABC, A]])
def test_a_stop_string_is_kept_on_request(block: list[int]) -> None:
    sequence = started(stop="ab", include_stop=True)
    taken = sequence.extend(block)
    assert (sequence.text, sequence.tokens) == ("cab", block[:taken])
    assert sequence.finish_reason == STOP


def test_blocks_end_where_single_tokens_end() -> None:
    """Every text of up to five tokens, cut into blocks in every way, ends as it does token by token."""
    settings = {"stop": ("ab", "cca"), "max_tokens": 4}
    for length in range(1, 6):
        for tokens in itertools.product((A, B, C, ABC, END), repeat=length):
            singly = started(**settings)
            for token in tokens:
                if singly.finish_reason is None:
                    singly.extend([token])
            for cut in range(length):
                blockwise = started(**settings)
                for block in (tokens[:cut], tokens[cut:]):
                    if blockwise.finish_reason is None:
                        blockwise.extend(list(block))
                assert blockwise.tokens == singly.tokens
                assert blockwise.text == singly.text
                assert blockwise.finish_reason == singly.finish_reason


# Length


@pytest.mark.parametrize("max_tokens", range(1, 6))
@pytest.mark.parametrize("gamma", [0, 3])
def test_the_limit_falls_anywhere_in_a_block(max_tokens: int, gamma: int) -> None:
    """From 1 to gamma + 2, with a draft that is always accepted."""
    target = TableModel(len(PIECES), seed=1)
    sequence = Sequence([A], SamplingParams(max_tokens=max_tokens), seed=1)
    decoder = SpeculativeDecoder(target, ModelDrafter(target), gamma)
    rounds = []
    while sequence.finish_reason is None:
        rounds += decoder.round(Batch([sequence])).rows
    assert (sequence.length, sequence.finish_reason) == (max_tokens, LENGTH)
    # Nothing is drafted in vain: the last token of a round is the target's own.
    assert sum(sum(row.drafted.values()) for row in rounds) == max_tokens - len(rounds)


def test_a_block_is_cut_at_the_limit() -> None:
    for limit in range(1, 5):
        sequence = started(max_tokens=limit)
        assert sequence.extend([A, B, C, A, B]) == limit
        assert (sequence.text, sequence.finish_reason, sequence.remaining) == ("abca"[:limit], LENGTH, 0)


def test_the_context_can_end_before_max_tokens() -> None:
    sequence = Sequence([A], SamplingParams(max_tokens=9), limit=2)
    assert sequence.remaining == 2
    assert sequence.extend([A, B, C]) == 2
    assert sequence.finish_reason == LENGTH
    assert Sequence([A], SamplingParams(max_tokens=3), limit=7).remaining == 3


# The end of a grammar


def one_of(*texts: list[int]) -> AutomatonMatcher:
    """A grammar of these texts: nothing follows the last token of any."""
    edges: dict[int, dict[int, int]] = {0: {}}
    final: set[int] = set()
    for text in texts:
        state = 0
        for token in text:
            after = edges[state].setdefault(token, len(edges))
            edges.setdefault(after, {})
            state = after
        final.add(state)
    return AutomatonMatcher(edges, final, len(PIECES))


def test_the_end_of_the_grammar_ends_the_block() -> None:
    sequence = started(matcher=one_of([A, B], [C]))
    assert sequence.extend([A, B, C, A]) == 2
    assert (sequence.text, sequence.finish_reason) == ("ab", STOP)


def test_a_grammar_that_may_go_on_does_not_end_the_block() -> None:
    sequence = started(matcher=one_of([A], [A, B, C]))
    assert sequence.extend([A, B]) == 2
    assert sequence.finish_reason is None
    assert sequence.extend([C, C]) == 1
    assert sequence.finish_reason == STOP


def test_the_end_token_is_no_business_of_the_matcher() -> None:
    matcher = one_of([A], [A, B])
    sequence = started(matcher=matcher)
    sequence.extend([A, END, B])
    assert len(matcher.path) == 2
    assert (sequence.tokens, sequence.finish_reason) == ([A, END], STOP)


# The earliest boundary wins; at one position stop string, then end token, end of the grammar, length


@pytest.mark.parametrize(
    ("settings", "block", "tokens", "text", "reason"),
    [
        pytest.param({"stop": "b", "max_tokens": 3}, [A, B, C], [A], "a", STOP, id="stop before limit"),
        pytest.param({"stop": "c", "max_tokens": 2}, [A, B, C], [A, B], "ab", LENGTH, id="limit before stop"),
        pytest.param({"stop": "c", "max_tokens": 3}, [A, B, C], [A, B], "ab", STOP, id="stop at the limit"),
        pytest.param({"max_tokens": 3}, [A, B, END], [A, B, END], "ab", STOP, id="end token at the limit"),
        pytest.param({"max_tokens": 2}, [A, B, END], [A, B], "ab", LENGTH, id="limit before end token"),
        pytest.param({"stop": "b"}, [A, END, B], [A, END], "a", STOP, id="end token before stop"),
        pytest.param({"stop": "b"}, [A, B, END], [A], "a", STOP, id="stop before end token"),
        pytest.param({"matcher": one_of([A, B]), "max_tokens": 2}, [A, B], [A, B], "ab", STOP, id="grammar and limit"),
        pytest.param({"matcher": one_of([A, B]), "stop": "b"}, [A, B], [A], "a", STOP, id="grammar and stop"),
        pytest.param({"skip_end": False, "stop": "</s>"}, [A, END], [A], "a", STOP, id="end token is the stop"),
        pytest.param({"skip_end": False, "stop": "</"}, [A, END], [A], "a", STOP, id="end token holds the stop"),
    ],
)
def test_precedence(settings: dict[str, Any], block: list[int], tokens: list[int], text: str, reason: str) -> None:
    sequence = started(**settings)
    sequence.extend(block)
    assert (sequence.tokens, sequence.text, sequence.finish_reason) == (tokens, text, reason)


def test_a_cancelled_sequence_keeps_what_it_has() -> None:
    sequence = started(stop="ab")
    sequence.extend([C, A])
    assert sequence.settled_text == "c"
    sequence.finish(FinishReason.CANCELLED)
    assert (sequence.tokens, sequence.text, sequence.settled_text) == ([C, A], "ca", "ca")


# Text that is settled


@pytest.mark.parametrize("stop", [(), ("ab",), ("bca", "aab"), ("abcabc", "xayx")], ids=str)
def test_settled_text_is_never_taken_back(stop: tuple[str, ...]) -> None:
    """Every text of five tokens: the pieces concatenate to the final text, and hold no part of the stop string."""
    for tokens in itertools.product((A, B, C, ABC, XAY), repeat=5):
        sequence = started(stop=stop)
        shown = []
        for token in tokens:
            if sequence.finish_reason is None:
                sequence.extend([token])
                shown.append((sequence.settled_text, sequence.settled_length))
        if sequence.finish_reason is None:
            sequence.finish(LENGTH)
        for text, length in shown:
            assert sequence.text.startswith(text)
            assert sequence.length >= length
        assert shown == sorted(shown, key=lambda piece: (len(piece[0]), piece[1]))
        assert not any(s in sequence.text for s in stop)
        assert sequence.settled_text == sequence.text


def test_without_stop_strings_all_text_is_settled() -> None:
    sequence = started()
    sequence.extend([A, XAY])
    assert (sequence.settled_text, sequence.settled_length) == ("axay", 2)


def test_without_a_detokenizer_there_is_no_text_and_no_stop_string() -> None:
    sequence = Sequence([A], SamplingParams(stop="a"), end_tokens={END})
    assert sequence.extend([A, B, END]) == 3
    assert (sequence.text, sequence.settled_text, sequence.settled_length) == ("", "", 3)


# Log-probabilities


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize("settings", [{}, {"stop": "ab"}, {"stop": ("ca", "y")}, {"max_tokens": 3}], ids=str)
def test_every_token_has_its_log_probability(gamma: int, settings: dict[str, Any]) -> None:
    """As many as ids, whatever was cut off, and each that of the distribution the token was drawn from."""
    target, draft = TableModel(len(PIECES), seed=2), TableModel(len(PIECES), seed=3)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), gamma)
    ends = set()
    for seed in range(30):
        params = SamplingParams(**{"max_tokens": 20, "logprobs": 2, "temperature": 0.9, **settings})
        detokenizer = Detokenizer(decode, skip={END})
        sequence = Sequence([A], params, end_tokens={END}, detokenizer=detokenizer, seed=seed)
        while sequence.finish_reason is None:
            decoder.round(Batch([sequence]))
            assert len(sequence.logprobs) == len(sequence.tokens)
        ends.add(sequence.finish_reason)
        assert sequence.text == decode([t for t in sequence.tokens if t != END])[: len(sequence.text)]
        for at, found in enumerate(sequence.logprobs):
            context = sequence.context[: sequence.prompt_length + at]
            log_probs = warp(target.logits(context)[None, None], [params])[0, 0].log()
            values, ids = torch.topk(log_probs, 2)
            assert found.token == sequence.tokens[at]
            assert found.logprob == pytest.approx(log_probs[found.token].item())
            assert [token for token, _ in found.top] == ids.tolist()
            assert [value for _, value in found.top] == pytest.approx(values.tolist())
    assert STOP in ends


def test_alternatives_without_mass_are_left_out() -> None:
    target = TableModel(len(PIECES), seed=2)
    sequence = Sequence([A], SamplingParams(temperature=0, logprobs=3, max_tokens=4))
    decoder = SpeculativeDecoder(target)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))
    assert all(found.top == ((found.token, 0.0),) for found in sequence.logprobs)


# Batches


def test_a_batch_has_one_acceptance_rule() -> None:
    with pytest.raises(ValueError, match="one acceptance rule"):
        Batch([Sequence([A], acceptance="coupled"), Sequence([A])])


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_seconds_of_decoding_are_counted_by_the_timer_of_the_commit(stop: tuple[str, ...]) -> None:
    def slow(ids: list[int]) -> str:
        time.sleep(0.001)
        return decode(ids)

    params = SamplingParams(max_tokens=3, stop=stop)
    sequence, timer = Sequence([A], params, detokenizer=Detokenizer(slow), seed=0), PhaseTimer()
    with timer("sample"):
        assert sequence.extend([A, B, C], 0, timer) == 3
    assert timer.seconds["detokenize_s"] > 0.001 > timer.seconds["sample_s"]
