"""A cursor gives the same answers whether masks are made or not; it leaves matchers where it says."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Any

import pytest
import torch
from enumeration import AutomatonMatcher, TableModel
from inputs import ROWS, written_call
from random_schemas import random_schema
from scripted import chatml_tokenizer
from torch import Tensor

from agentspec import (
    Cascade,
    Drafter,
    FinishReason,
    Grammar,
    GrammarError,
    PromptLookupDrafter,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
)
from agentspec.batch import Batch
from agentspec.drafters import Draft, DraftBudget
from agentspec.errors import InvalidRequestError
from agentspec.grammars import GrammarCompiler, GrammarCursor, Matcher, compiler
from agentspec.grammars.llguidance import LLGuidanceMatcher

END = 2
SHOP = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"item": {"enum": ["lamp", "sofa", "Öllampe 💡"]}, "count": {"type": "integer", "maximum": 12}},
        "required": ["item", "count"],
        "additionalProperties": False,
    }
)
GRAMMARS = {
    "schema": SHOP,
    "choice": Grammar.choice(["yes", "yes, of course"]),
    "regex": Grammar.regex("(ab|a)*c{2,3}"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return chatml_tokenizer()


@pytest.fixture(scope="module", params=["llguidance", "outlines"])
def grammars(request: pytest.FixtureRequest, tokenizer: Any) -> GrammarCompiler:
    return compiler(tokenizer, len(tokenizer), request.param)


def legal(matcher: Matcher) -> list[int]:
    return matcher.token_mask().tensor().nonzero()[:, 0].tolist()


def drafts(matcher: Matcher, seed: int) -> list[int]:
    """Legal tokens, now and then the end token or one that is not legal, and what follows it."""
    choose, tokens = random.Random(seed), list[int]()
    while len(tokens) < 12:
        options = [*legal(matcher), *[END] * matcher.is_accepting()]
        token = choose.choice(options) if options and choose.random() < 0.93 else choose.randrange(2000)
        tokens.append(token)
        if not matcher.accept_token(token):
            tokens += [choose.randrange(2000), END]
            break
    return tokens


def cursor_of(matcher: Matcher) -> GrammarCursor:
    return GrammarCursor([Sequence([0], matcher=matcher, end_tokens=[END])], 49_152)


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_with_and_without_masks_a_cursor_answers_the_same(grammars: GrammarCompiler, grammar: Grammar) -> None:
    closed, forced = 0, 0
    for seed in range(12):
        tokens = drafts(grammars.matcher(grammar), seed)
        one, other = (cursor_of(grammars.matcher(grammar)) for _ in range(2))
        for token in tokens:
            mask, strays = one.token_mask(0), random.Random(seed).sample(range(49_152), 20)
            assert one.forced(0) == other.forced(0)
            assert one.is_open(0) == other.is_open(0)
            for each in (token, *strays, END):
                assert one.allows(0, each) == other.allows(0, each) == (mask is None or each in mask)
            forced += one.forced(0) is not None
            one.consume(0, token)
            other.consume(0, token)
        assert one.legal_prefix(0, tokens) == other.legal_prefix(0, tokens)
        closed += one.legal_prefix(0, tokens) < len(tokens)
        assert one.forced_positions(0, tokens) == other.forced_positions(0, tokens)
        assert one.count_constrained(0, len(tokens)) == other.count_constrained(0, len(tokens))
        assert other.token_mask(0) == one.token_mask(0)  # made where it is asked for
    assert closed
    assert forced or grammar is GRAMMARS["regex"]


def random_grammars(count: int) -> list[Grammar]:
    rng = random.Random(0)
    letters = ["a", "b", "c", "ab", "é", "0"]

    def pattern(depth: int) -> str:
        if depth == 0:
            return rng.choice([*letters, "[a-c]", "."])
        parts = [pattern(depth - 1) for _ in range(rng.randint(1, 3))]
        return f"({rng.choice(['', '|']).join(parts)}){rng.choice(['', '', '*', '?', '{1,3}'])}"

    def option() -> str:
        return "".join(rng.choices(letters, k=rng.randint(1, 6)))

    schemas = (Grammar.json_schema(random_schema(rng, is_plain=True)) for _ in range(count // 3))
    choices = (Grammar.choice({option() for _ in range(rng.randint(1, 5))}) for _ in range(count))
    return [*schemas, *choices, *(Grammar.regex(pattern(3)) for _ in range(count))]


def compare_with_and_without_masks(matchers: list[Matcher], tokens: list[int], seed: int, vocabulary: int) -> int:
    """Send and ask two cursors alike; ask one of them for masks now and then, of any position."""
    choose, compared = random.Random(seed), 0
    plain, asking = map(cursor_of, matchers)
    for _ in range(30):
        place = len(plain.tokens(0))
        if choose.random() < 0.5:
            _ = asking.token_mask(0) if choose.random() < 0.5 else asking.masks([asking.tokens(0)])
        following = tokens[min(place, len(tokens) - 1)]
        token = choose.choice([following, choose.randrange(vocabulary), END])
        back = tokens[: choose.randrange(len(tokens) + 1)]
        question, *arguments = choose.choice(
            [
                ("forced", 0),
                ("forced", 0, back if back[:place] == plain.tokens(0)[: len(back)] else None),
                ("is_open", 0),
                ("allows", 0, token),
                ("try_consume", 0, token),
                ("try_consume", 0, following),
                ("consume", 0, token),
                ("seek", 0, back),
                ("legal_prefix", 0, back),
                ("forced_positions", 0, back),
                ("count_constrained", 0, choose.randrange(place + 1)),
            ]
        )
        answers = [getattr(cursor, question)(*arguments) for cursor in (plain, asking)]
        assert answers[0] == answers[1], (question, arguments, plain.tokens(0))
        assert plain.tokens(0) == asking.tokens(0)
        assert (only := plain.forced(0)) is None or plain.allows(0, only)
        compared += answers[0] is not None
    assert plain.masks([tokens]).rows == asking.masks([tokens]).rows
    left = [cursor.commit(0, tokens) for cursor in (plain, asking)]
    for matcher, count in zip(matchers, left, strict=True):
        assert all(map(matcher.accept_token, tokens[count : max(left)]))  # as a sequence does with what is left
    assert matchers[0].token_mask() == matchers[1].token_mask()
    return compared


def test_asking_for_masks_changes_no_other_answer(grammars: GrammarCompiler) -> None:
    compared = 0
    for seed, grammar in enumerate(random_grammars(12)):
        with suppress(GrammarError):  # random schemas may mean nothing, or nothing that the engine can express
            matchers = [grammars.matcher(grammar) for _ in range(2)]
            tokens = drafts(grammars.matcher(grammar), seed)
            compared += compare_with_and_without_masks(matchers, tokens, seed, 2000)
    assert compared > 300


class Unknowing(AutomatonMatcher):
    """An engine that finds neither a forced token nor a dead end without a mask."""

    def forced(self) -> int | None:
        return None


def path_in(matcher: Matcher, rng: random.Random) -> list[int]:
    """Legal tokens up to a dead end, and two that are none."""
    tokens = list[int]()
    while len(tokens) < 6 and (options := legal(matcher)):
        tokens.append(rng.choice(options))
        matcher.accept_token(tokens[-1])
    return [*tokens, 0, 1]


@pytest.mark.parametrize("kind", [AutomatonMatcher, Unknowing])
def test_asking_for_masks_changes_no_other_answer_at_dead_ends(kind: type[AutomatonMatcher]) -> None:
    """Automata at random, in which states have no edge, or one, which may be an end token's."""
    dead_ends = 0
    for seed in range(200):
        rng = random.Random(seed)
        edges = {state: {rng.randrange(4): rng.randrange(5) for _ in range(rng.randrange(4))} for state in range(5)}
        final = {state for state in range(5) if rng.random() < 0.3}
        matchers = [kind(edges, final, vocab_size=4) for _ in range(2)]
        tokens = path_in(kind(edges, final, vocab_size=4), rng)
        compare_with_and_without_masks([*matchers], tokens, seed, 4)
        dead_ends += any(not edges[state] and state not in final for state in matchers[0].path)
    assert dead_ends > 10


@pytest.mark.parametrize("makes_masks", [False, True])
@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_cursor_stands_where_it_is_sent(grammars: GrammarCompiler, grammar: Grammar, makes_masks: bool) -> None:
    for seed in range(6):
        tokens, matcher = drafts(grammars.matcher(grammar), seed), grammars.matcher(grammar)
        cursor, choose = cursor_of(matcher), random.Random(seed)
        _ = cursor.masks([tokens]) if makes_masks else cursor.seek(0, tokens)
        for _ in range(6):
            place = tokens[: choose.randrange(len(tokens) + 1)]
            cursor.seek(0, place)
            straight = cursor_of(grammars.matcher(grammar))
            assert cursor.tokens(0) == place
            assert cursor.legal_prefix(0, place) == straight.legal_prefix(0, place)
            assert cursor.token_mask(0) == straight.token_mask(0)
            assert (cursor.is_open(0), cursor.forced(0)) == (straight.is_open(0), straight.forced(0))
            if cursor.is_open(0):
                mask = cursor.token_mask(0)
                assert mask is not None
                assert mask.first is not None
                assert cursor.try_consume(0, mask.first)
                assert cursor.legal_prefix(0, cursor.tokens(0)) == len(place) + 1
        cursor.reset()
        assert matcher.token_mask() == grammars.matcher(grammar).token_mask()


@pytest.mark.parametrize("grammar", GRAMMARS.values(), ids=GRAMMARS)
def test_a_committed_row_stands_after_what_it_has_in_common_with_a_block(
    grammars: GrammarCompiler, grammar: Grammar
) -> None:
    for seed in range(6):
        tokens, stray = drafts(grammars.matcher(grammar), seed), 48_000
        for n in range(len(tokens) + 1):
            matcher, fresh = grammars.matcher(grammar), grammars.matcher(grammar)
            cursor = cursor_of(matcher)
            cursor.seek(0, tokens)
            left = cursor.commit(0, [*tokens[:n], stray])
            assert left <= n
            assert left == n or not all(map(grammars.matcher(grammar).accept_token, tokens[:n]))
            cursor.reset()  # which leaves a committed row alone
            assert all(map(fresh.accept_token, tokens[:left]))
            assert (matcher.token_mask(), matcher.is_accepting()) == (fresh.token_mask(), fresh.is_accepting())


def test_a_mask_that_allows_what_the_matcher_refuses_is_an_error() -> None:
    class Refusing(AutomatonMatcher):
        def accept_token(self, token: int) -> bool:
            return False

    cursor = GrammarCursor([Sequence([0], matcher=Refusing({0: {0: 0, 1: 0}}, set()))], 3)
    assert cursor.token_mask(0) is not None
    with pytest.raises(GrammarError, match="refuses token 1, which its mask allows"):
        cursor.consume(0, 1)


@pytest.mark.parametrize("block", [[0, 0, 1], [0, 1, 2], [0, 0, 0, 0]])
@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_a_commit_goes_on_from_where_the_matcher_stands(block: SequenceOf[int], accepted: int) -> None:
    edges = {0: {0: 1}, 1: {0: 2, 1: 3}, 2: {0: 2, 1: 3}, 3: {}}
    for settings in (SamplingParams(), SamplingParams(max_tokens=1), SamplingParams(stop_token_ids=(1,))):
        plain, ahead = (Sequence([0], settings, matcher=AutomatonMatcher(edges, {3}), end_tokens=[2]) for _ in "ab")
        assert isinstance(plain.matcher, AutomatonMatcher)
        assert isinstance(ahead.matcher, AutomatonMatcher)
        end = next((k for k, token in enumerate(block) if token in ahead.end_tokens), len(block))
        taken = list(block[: min(accepted, end)])
        assert all(map(ahead.matcher.accept_token, taken))
        assert ahead.extend(list(block), len(taken)) == plain.extend(list(block))
        assert (ahead.tokens, ahead.finish_reason) == (plain.tokens, plain.finish_reason)
        assert ahead.matcher.path == plain.matcher.path


@pytest.mark.parametrize("banned", [(0,), (0, 1)])
@pytest.mark.parametrize("gamma", [0, 3])
def test_a_forced_token_whose_logit_is_minus_infinity_is_no_token(gamma: int, banned: tuple[int, ...]) -> None:
    grammar, target = AutomatonMatcher({0: {0: 1}, 1: {0: 0, 1: 0}}, set()), TableModel(3, seed=1)
    sequence = Sequence([1], SamplingParams(temperature=0, banned_token_ids=banned), matcher=grammar)
    with pytest.raises(InvalidRequestError, match="No token may come next"):
        SpeculativeDecoder(target, Cascade(), gamma).round(Batch([sequence]))
    assert (sequence.tokens, grammar.path) == ([], [0])


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_ends_before_a_dead_end_is_no_error(temperature: float, acceptance: Any, logprobs: Any) -> None:
    """A draft may reach past the end of the text, after which no token needs to be legal."""
    edges: dict[int, dict[int, int]] = {0: {0: 1}, 1: {1: 2}, 2: {}}
    found = {}
    for gamma in (0, 5):
        for settings in ({"max_tokens": 9}, {"max_tokens": 9, "stop_token_ids": (1,)}):
            params = SamplingParams(temperature=temperature, logprobs=logprobs, **settings)
            matcher = AutomatonMatcher(edges, {1} if "stop_token_ids" in settings else set())
            sequence = Sequence([2], params, matcher=matcher, seed=3, acceptance=acceptance)
            decoder = SpeculativeDecoder(TableModel(3, seed=1), Script([0, 1]), gamma)
            with suppress(InvalidRequestError):  # "No token may come next"
                while sequence.finish_reason is None:
                    decoder.round(Batch([sequence]))
            found[gamma, len(settings)] = sequence.tokens, sequence.finish_reason
    assert found[0, 1] == found[5, 1] == ([0, 1], None)  # an error, but the tokens before it were emitted
    assert found[0, 2] == found[5, 2] == ([0, 1], FinishReason.STOP)


class Script(Drafter):
    """Drafts what is left of a text, and consumes none of it."""

    name = "script"

    def __init__(self, tokens: SequenceOf[int]) -> None:
        self._tokens = list(tokens)

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        rest = [self._tokens[s.length :] for s in batch.sequences]
        tokens = [row[:n] for row, n in zip(rest, budget.of(self.name), strict=True)]
        return Draft.of_tokens(tokens, self.name, batch.device)


def test_a_matcher_that_cannot_go_back_keeps_no_other_from_it() -> None:
    class Stuck(AutomatonMatcher):
        def rollback(self, count: int) -> None:
            raise GrammarError("stuck")

    matchers = [kind({0: {0: 0}}, set()) for kind in (AutomatonMatcher, Stuck, AutomatonMatcher)]
    cursor = GrammarCursor([Sequence([0], matcher=matcher) for matcher in matchers], 3)
    for row in range(3):
        cursor.seek(row, [0, 0])
    assert [str(error) for error in cursor.reset()] == ["stuck"]
    assert [matcher.path for matcher in matchers] == [[0], [0, 0, 0], [0]]


# llguidance: answers without a mask


class Noise:
    """Logits that are a function of the context's length."""

    vocab_size = len(chatml_tokenizer())

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        generators = [torch.Generator().manual_seed(len(context)) for context in contexts]
        return torch.stack([torch.randn(max(last), self.vocab_size, generator=rng) for rng in generators])


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_row_without_a_token_costs_the_others_nothing(grammars: GrammarCompiler, logprobs: Any) -> None:
    def nothing(prefix: list[int], logits: Tensor) -> Tensor:
        return logits - math.inf

    params = SamplingParams(temperature=0, max_tokens=4, logprobs=logprobs)
    rows = [
        Sequence([1, 2], each, matcher=grammars.matcher(GRAMMARS["regex"]), end_tokens=[END])
        for each in (params, dataclasses.replace(params, logits_processor=(nothing,)), params)
    ]
    decoder = SpeculativeDecoder(Noise(), Cascade([PromptLookupDrafter(min_ngram=1)]), 3)
    with pytest.raises(InvalidRequestError, match="No token may come next"):
        decoder.round(Batch(rows))
    fresh = grammars.matcher(GRAMMARS["regex"])
    assert all(row.matcher is not None and row.matcher.token_mask() == fresh.token_mask() for row in rows)
    decoder.round(Batch([rows[0], rows[2]]))
    assert rows[0].tokens == rows[2].tokens != rows[1].tokens == []


def texts_of_tools() -> list[tuple[Grammar, str]]:
    """Grammars of tools, and a call that each of them allows."""
    return [(Grammar.tools(tools), written_call(name, arguments)) for _, tools, name, arguments in ROWS]


def test_a_token_is_accepted_where_a_mask_has_it(tokenizer: Any) -> None:
    grammars, places, over = compiler(tokenizer, len(tokenizer)), 0, 0
    for grammar in (*GRAMMARS.values(), *(grammar for grammar, _ in texts_of_tools()[:6])):
        matcher, choose = grammars.matcher(grammar), random.Random(0)
        for _ in range(60):
            mask, options = matcher.token_mask(), legal(matcher)
            assert matcher.is_terminated() == (matcher.is_accepting() and mask.is_empty)
            over += matcher.is_terminated()
            if not options:
                break
            if matcher.forced() is None:
                places += 1
                for token in (
                    *choose.sample(range(len(tokenizer)), 300),
                    *choose.sample(options, min(300, len(options))),
                ):
                    taken = matcher.accept_token(token)
                    assert taken == (token in mask), (grammar, token)
                    matcher.rollback(int(taken))
            else:
                assert mask.single_token == matcher.forced()
            matcher.accept_token(choose.choice(options))
    assert places > 20
    assert over


def test_forced_text_is_encoded_alike_from_every_position(tokenizer: Any) -> None:
    """Forced text is encoded once, where it begins; a matcher that is first asked in the middle of it agrees."""
    grammars, forced = compiler(tokenizer, len(tokenizer)), 0
    for grammar, text in texts_of_tools():
        matcher, tokens = grammars.matcher(grammar), list[int]()
        for token in tokenizer.encode(text, add_special_tokens=False):
            only = matcher.forced()
            if only is not None:
                late = grammars.matcher(grammar)
                assert all(map(late.accept_token, tokens))
                assert late.forced() == late.token_mask().single_token == only
                forced += 1
            tokens.append(token if only is None else only)
            if not matcher.accept_token(tokens[-1]):
                break  # the answer is none of this grammar, or encoded otherwise than it is forced
    assert forced > 400


def test_forced_tokens_are_known_again_after_a_rollback(tokenizer: Any) -> None:
    grammars = compiler(tokenizer, len(tokenizer))
    matcher = grammars.matcher(Grammar.json_schema({"const": {"a long name": ["and a value", 12, "and another one"]}}))
    assert isinstance(matcher, LLGuidanceMatcher)
    forced = []
    while (token := matcher.forced()) is not None:
        forced.append(token)
        assert matcher.accept_token(token)
    assert len(forced) > 12
    choose, at = random.Random(0), len(forced)
    for _ in range(40):
        back = choose.randint(0, at)
        matcher.rollback(back)
        at -= back
        for token in forced[at : choose.randint(at, len(forced))]:
            assert matcher.forced() == token == matcher.token_mask().single_token
            [*shorter] = tokenizer.encode(tokenizer.decode([token])[:1], add_special_tokens=False)
            assert not any(matcher.accept_token(other) for other in (*shorter, token + 1) if other != token)
            assert matcher.accept_token(token)
            at += 1
