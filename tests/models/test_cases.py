"""Where speculation meets boundaries, grammars and settings: every case, every drafter, every offset, same as plain.

The numbers are those of a list of failures that users of public engines reported. A scripted model puts a boundary
where the test wants it, and an oracle drafts what plain decoding emitted and more, so that it falls at every offset of
a block. Greedy, and drawn with shared noise, ids, text and log-probabilities must be those of plain decoding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from effort import WHOLE, effort
from scripted import END, Oracle, ScriptedModel, tokenizer
from torch import Tensor

from agentspec import (
    Batch,
    Cascade,
    Completion,
    Drafter,
    Grammar,
    GrammarError,
    InvalidRequestError,
    LocalEngine,
    ModelDrafter,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    SpeculativeDecoder,
)
from agentspec.chat import AnswerParser
from agentspec.drafters import Draft, DraftBudget
from agentspec.grammars import GrammarCursor, compiler
from agentspec.grammars.token_mask import PackedMasks
from agentspec.grammars.tool_calls import ReasoningFormat
from agentspec.sampling import Prefix, warp, warped_logits
from agentspec.stats import RoundStats

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.whole]

KNOWN = {True: tokenizer(), False: tokenizer(tags_are_tokens=False)}
GAMMA = 4
PROMPT = "Say: One, two, three, four, {"


class Recording(SpeculativeDecoder):
    """Remembers how many tokens each round committed."""

    def round(self, batch: Batch) -> RoundStats:
        stats = super().round(batch)
        self.committed = [*getattr(self, "committed", []), stats.rows[0].committed]
        return stats


@dataclass(frozen=True)
class Scenario:
    """A wish of the model, and the settings under which it decodes.

    Args:
        script: text; ``<|end|>`` in it is the end token.
        settings: of sampling.
        grammar: that the text is under.
        favour: how much the model insists on the script when it is drawn from.
        tags_are_tokens: of the tokenizer.
    """

    script: str
    settings: dict[str, Any] = field(default_factory=dict)
    grammar: Grammar | None = None
    favour: float = 6.0
    tags_are_tokens: bool = True

    @property
    def known(self) -> Any:
        return KNOWN[self.tags_are_tokens]

    @property
    def prompt(self) -> list[int]:
        return self.known.encode(PROMPT)

    def model(self, greedy: bool, seed: int = 0) -> ScriptedModel:
        script = self.known.encode(self.script)
        return ScriptedModel(len(self.known), len(self.prompt), script, 50.0 if greedy else self.favour, seed)

    def run(self, drafter: Drafter | None, gamma: int, greedy: bool, seed: int = 1) -> tuple[Completion, list[int]]:
        """The completion, and how many tokens each round committed."""
        decoder = Recording(self.model(greedy), drafter)
        engine = LocalEngine(decoder, self.known)
        settings = {"max_tokens": 64, "logprobs": 1, "temperature": 0.0 if greedy else 1.0, "seed": seed}
        request = Request(
            self.prompt,
            SamplingParams(**{**settings, **self.settings}),
            self.grammar,
            gamma=gamma,
            acceptance="coupled",
        )
        try:
            [[completion]] = engine.generate([request])
        finally:
            engine.close()
        return completion, decoder.committed

    def drafters(self, plain: Completion, greedy: bool) -> Iterator[tuple[str, Drafter, int]]:
        """Every kind of drafter, with its gamma; the oracle so that a boundary falls at every offset of a block."""
        start = len(self.prompt)
        for first in range(GAMMA + 1):
            yield f"oracle, {first} first", Oracle(start, plain.tokens, first), GAMMA
            if WHOLE or first in (0, GAMMA):
                wrong = Oracle(start, plain.tokens, GAMMA, wrong_from=first)
                yield f"wrong from {first}", wrong, GAMMA
                yield f"cascade over an oracle, {first} first", Cascade([Oracle(start, plain.tokens, first)]), GAMMA
        yield "long oracle", Oracle(start, plain.tokens, 24), 24
        yield "look-up", PromptLookupDrafter(), GAMMA
        yield "model", ModelDrafter(self.model(greedy, seed=5)), GAMMA
        yield "forced", Cascade(), GAMMA
        yield "cascade", Cascade([PromptLookupDrafter(), ModelDrafter(self.model(greedy, seed=5))]), GAMMA


SEEDS = effort(quick=(1,), whole=(1, 2))


def same_as_plain(scenario: Scenario, seeds: Sequence[int] = SEEDS) -> Completion:
    """Compare every way to decode with plain decoding; the plain greedy completion."""
    greedily, _ = scenario.run(None, 0, greedy=True)
    offsets = set()
    for greedy, seed in [(True, 1), *((False, seed) for seed in seeds)]:
        plain, _ = scenario.run(None, 0, greedy, seed)
        assert plain.stats.target_calls >= len(plain.tokens)
        for name, drafter, gamma in scenario.drafters(plain, greedy):
            found, committed = scenario.run(drafter, gamma, greedy, seed)
            assert (name, found.tokens, found.text) == (name, plain.tokens, plain.text)
            assert found.finish_reason == plain.finish_reason
            assert found.logprobs is not None
            assert plain.logprobs is not None
            assert [entry.token for entry in found.logprobs] == list(found.tokens)
            assert [e.logprob for e in found.logprobs] == pytest.approx([e.logprob for e in plain.logprobs], abs=1e-5)
            # Case 15: a constraint is over every token. Cases 9, 10: no draft costs a pass of the target.
            committed_tokens = sum(committed)
            assert found.stats.constrained_tokens == (committed_tokens if scenario.grammar else 0)
            assert found.stats.target_calls == len(committed) <= plain.stats.target_calls
            if name.startswith("oracle") and greedy:
                offsets.add(committed[-1])
    full = min(GAMMA + 1, len(greedily.tokens))
    assert offsets >= set(range(1, full + 1)) or len(greedily.tokens) <= GAMMA, offsets
    return greedily


# 1 to 5, 8: boundaries inside a drafted block


def test_01_nothing_follows_an_end_token_at_any_offset() -> None:
    plain = same_as_plain(Scenario(f"One, two, three{END}, four, five"))
    assert plain.text == "One, two, three"
    assert plain.tokens[-1] == KNOWN[True].eos_token_id
    assert plain.finish_reason == "stop"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (("three",), "One, two, "),
        (("wo, th",), "One, t"),
        (("e", "never"), "On"),
        (("five", "four", "r, f"), "One, two, three, "),
        ((", two, three, four",), "One"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_02_a_stop_string_ends_text_ids_and_logprobs_together(stop: tuple[str, ...], text: str, include: bool) -> None:
    plain = same_as_plain(Scenario("One, two, three, four, five, six", {"stop": stop, "include_stop": include}))
    first = min(stop, key=lambda s: "One, two, three, four, five".find(s) % 99)
    assert plain.text == text + first * include
    assert plain.finish_reason == "stop"


def test_03_a_stop_string_near_the_start_of_a_long_block_is_found() -> None:
    scenario = Scenario("One, two, three, four, five, six, seven.", {"stop": ("two",), "temperature": 0.0})
    plain, _ = scenario.run(None, 0, greedy=True)
    whole, _ = dataclasses.replace(scenario, settings={}).run(None, 0, greedy=True)
    found, committed = scenario.run(Oracle(len(scenario.prompt), whole.tokens, 24), 24, greedy=True)
    assert (found.tokens, found.text, len(committed)) == (plain.tokens, "One, ", 1)


@pytest.mark.parametrize("limit", range(1, GAMMA + 3))
def test_04_max_tokens_falls_anywhere_in_a_block(limit: int) -> None:
    plain = same_as_plain(Scenario("One, two, three, four, five", {"max_tokens": limit}), seeds=(1,))
    assert (len(plain.tokens), plain.finish_reason) == (limit, "length")


def test_04_a_stop_before_the_limit_wins() -> None:
    ids = KNOWN[True].encode("One, two, three, four")
    plain = same_as_plain(Scenario("One, two, three, four", {"max_tokens": len(ids) - 1, "stop": ("two",)}))
    assert (plain.text, plain.finish_reason) == ("One, ", "stop")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("One, two, t[a-z]+, four"),
        Grammar.choice(["One, two, three, four", "One, two, three, five"]),
        Grammar.lark('start: "One, two, " /[a-z]+/ ", four"'),
    ],
    ids=["regex", "choice", "lark"],
)
def test_05_the_grammar_completes_inside_a_block_that_goes_on(grammar: Grammar) -> None:
    plain = same_as_plain(Scenario("One, two, three, four, five, six", grammar=grammar))
    assert (plain.text, plain.finish_reason) == ("One, two, three, four", "stop")


@pytest.mark.parametrize("least", range(8))
def test_08_end_tokens_are_masked_until_min_tokens(least: int) -> None:
    plain = same_as_plain(Scenario(f"One{END}{END}{END}{END}{END}{END}{END}", {"min_tokens": least}), seeds=(1,))
    assert len(plain.tokens) > least
    assert KNOWN[True].eos_token_id not in plain.tokens[:least]


# 6, 7: thoughts

FINAL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
kinds_of_tags = pytest.mark.parametrize("tags_are_tokens", [True, False])
openers = pytest.mark.parametrize("opener", ["", "<think>\n"])


@kinds_of_tags
@openers
@pytest.mark.parametrize("thinks", ["One.", "One, two.\n", ""])
def test_06_what_follows_the_end_of_a_thought_obeys_the_grammar(
    opener: str, thinks: str, tags_are_tokens: bool
) -> None:
    grammar = Grammar.tools([], final=FINAL, thought=ReasoningFormat(opener=opener))
    plain = same_as_plain(
        Scenario(f"{opener}{thinks}</think>One, two, no", {}, grammar, 9.0, tags_are_tokens), seeds=(1,)
    )
    thought, answer = plain.text.split("</think>\n\n")
    assert thought == opener + thinks
    assert json.loads(answer).keys() == {"ok"}


@kinds_of_tags
@openers
def test_06_a_call_ends_a_thought_too(opener: str, tags_are_tokens: bool) -> None:
    grammar = Grammar.tools([NOW], required=True, thought=ReasoningFormat(opener=opener))
    plain = same_as_plain(Scenario(f"{opener}One. <tool_call>nonsense", {}, grammar, 9.0, tags_are_tokens), seeds=(1,))
    assert plain.text == f"{opener}One. {CALL}"


@kinds_of_tags
def test_06_free_text_turns_into_a_call_at_any_offset(tags_are_tokens: bool) -> None:
    scenario = Scenario("One, two. <tool_call>nonsense", {}, Grammar.tools([NOW], required=False), 9.0, tags_are_tokens)
    plain = same_as_plain(scenario)
    assert plain.text == f"One, two. {CALL}"


@kinds_of_tags
@openers
@pytest.mark.parametrize("budget", range(7))
def test_07_a_thinking_budget_ends_the_thought_at_exactly_that_token(
    budget: int, opener: str, tags_are_tokens: bool
) -> None:
    grammar = Grammar.tools([], final=FINAL, thought=ReasoningFormat(opener=opener), thinking_budget=budget)
    scenario = Scenario(f"{opener}One, two, three, four, five, six", {}, grammar, 9.0, tags_are_tokens)
    plain = same_as_plain(scenario, seeds=(1,))
    known = scenario.known
    begins = known.encode(opener)
    closing = known.encode("\n</think>")
    at = len(begins) + budget
    assert list(plain.tokens[:at]) == known.encode(scenario.script)[:at]
    assert list(plain.tokens[at : at + len(closing)]) == closing
    assert json.loads(plain.text.split("</think>\n\n")[1]).keys() == {"ok"}


@kinds_of_tags
def test_07_a_thought_that_ends_in_time_is_left_alone(tags_are_tokens: bool) -> None:
    grammars = [
        Grammar.tools([NOW], thought=ReasoningFormat(opener=""), thinking_budget=b, required=False) for b in (25, None)
    ]
    for script in ("One, two.</think>\n\nYes, no, yes, no, yes, no, yes, no", f"One. {CALL}"):
        texts = [Scenario(script, {}, g, 9.0, tags_are_tokens).run(Cascade(), 4, greedy=True)[0].text for g in grammars]
        assert texts[0] == texts[1]
        assert texts[0].startswith(script[:30])


def test_07_budgets_that_make_no_sense_are_refused() -> None:
    for thought, budget in ((None, 3), (ReasoningFormat(), -1)):
        with pytest.raises(GrammarError, match="thinking budget"):
            Grammar.tools([NOW], thought=thought, thinking_budget=budget)


# 9 to 19: grammar state

SHOP = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "ok": {"enum": ["yes", "no"]}},
        "required": ["name", "count", "ok"],
        "additionalProperties": False,
    }
)
WISH = '{"name": "One", "count": 12, "ok": "yes"}'


def test_09_10_illegal_drafts_change_nothing_and_cost_no_pass() -> None:
    plain = same_as_plain(Scenario(WISH, grammar=SHOP))
    assert plain.text == WISH
    scenario = Scenario(WISH, grammar=SHOP)
    [always] = [d for name, d, _ in scenario.drafters(plain, True) if name == "wrong from 0"]
    found, committed = scenario.run(always, GAMMA, greedy=True)
    assert committed == [1] * len(plain.tokens)
    assert found.stats.accepted_tokens == 0
    assert found.stats.drafted_tokens > 0


class Ends(Drafter):
    """Drafts a token of the text and then the end, which the target will not have."""

    name = "ends"

    def __init__(self, start: int, tokens: Sequence[int], end: int) -> None:
        self._oracle, self._end = Oracle(start, tokens, 1), end

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        one = DraftBudget([min(1, n) for n in budget.of(self.name)])
        draft = self._oracle.propose(batch, one, cursor)
        return Draft.of_tokens([[*tokens, self._end] for tokens in draft.row_tokens], self.name, batch.device)


def test_11_a_rejected_end_token_leaves_the_mask_as_it_was() -> None:
    scenario = Scenario(WISH, grammar=SHOP)
    plain, _ = scenario.run(None, 0, greedy=True)
    end = KNOWN[True].eos_token_id
    found, _ = scenario.run(Ends(len(scenario.prompt), plain.tokens, end), 2, greedy=True)
    assert found.tokens == plain.tokens
    for text in ("", "One", "One, two"):  # and where the end is legal and not wanted
        free = Scenario("One, two, three", {"max_tokens": 9}, Grammar.regex("[a-zO, ]+"))
        plain, _ = free.run(None, 0, greedy=True)
        found, _ = free.run(Ends(len(free.prompt), plain.tokens, end), 2, greedy=True)
        assert found.tokens == plain.tokens, text


def sequence_of(scenario: Scenario, tokens: Sequence[int] = ()) -> Any:
    """Return a sequence of the scenario that has emitted these tokens."""
    engine = LocalEngine(SpeculativeDecoder(scenario.model(True)), scenario.known)
    [sequence] = engine._admission(Request(scenario.prompt, SamplingParams(max_tokens=60), scenario.grammar))
    engine.close()
    sequence.extend(list(tokens))
    return sequence


def test_12_masks_beyond_the_end_of_a_grammar_are_defined() -> None:
    scenario = Scenario(WISH, grammar=SHOP)
    ids, end = KNOWN[True].encode(WISH), KNOWN[True].eos_token_id
    cursor = GrammarCursor([sequence_of(scenario)], len(KNOWN[True]))
    masks = cursor.masks([[*ids, 9, 9, 9]])
    assert masks.rows[0][len(ids) :] == [None] * 4  # nothing is drawn there: the commit ends the text before
    cursor.reset()
    open_ended = Scenario("ab", grammar=Grammar.regex("a(b)?"))
    cursor = GrammarCursor([sequence_of(open_ended)], len(KNOWN[True]))
    masks = cursor.masks([KNOWN[True].encode("a")])
    assert masks.rows[0][1] is not None
    assert set(masks.rows[0][1].tensor().nonzero().flatten().tolist()) == {*KNOWN[True].encode("b"), end}


def test_13_q_and_p_see_the_same_mask_for_the_same_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    import agentspec.acceptance
    import agentspec.drafters.model

    seen: dict[str, list[PackedMasks]] = {"p": [], "q": []}

    def spy(side: str, spied_on: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spied(logits: Tensor, params: Any, masks: PackedMasks, *rest: Any) -> Tensor:
            seen[side].append(masks)
            return spied_on(logits, params, masks, *rest)

        return spied

    monkeypatch.setattr(agentspec.acceptance, "warped_logits", spy("p", warped_logits))
    monkeypatch.setattr(agentspec.drafters.model, "warp", spy("q", warp))
    scenario, sequence = Scenario(WISH, grammar=SHOP), sequence_of(Scenario(WISH, grammar=SHOP))
    decoder = SpeculativeDecoder(scenario.model(True), ModelDrafter(scenario.model(True, seed=5)), GAMMA)
    while sequence.finish_reason is None:
        for masked in seen.values():
            masked.clear()
        decoder.round(Batch([sequence]))
        [p_masks] = seen["p"]
        assert len(seen["q"]) == len(p_masks.rows[0]) - 1
        assert [p_masks.rows[0][: len(seen["q"])]] == [[q_masks.rows[0][0] for q_masks in seen["q"]]]


@pytest.mark.parametrize("wrong_from", range(GAMMA + 1))
def test_14_the_matcher_stands_where_the_tokens_end(wrong_from: int) -> None:
    scenario = Scenario(WISH, grammar=SHOP)
    plain, _ = scenario.run(None, 0, greedy=True)
    drafter = Cascade([Oracle(len(scenario.prompt), plain.tokens, GAMMA, wrong_from=wrong_from)])
    decoder, sequence = SpeculativeDecoder(scenario.model(True), drafter, GAMMA), sequence_of(scenario)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))
        fresh = compiler(KNOWN[True], len(KNOWN[True])).matcher(SHOP)
        assert all(map(fresh.accept_token, sequence.tokens))
        assert fresh.token_mask() == sequence.matcher.token_mask()
        assert fresh.is_accepting() == sequence.matcher.is_accepting()


def test_15_the_constraint_is_over_every_token() -> None:
    scenario = Scenario("No! I will not write JSON.", grammar=SHOP)
    same_as_plain(scenario, seeds=(1,))  # which compares the counter with the tokens, for every drafter


def test_16_a_model_that_loves_newlines_cannot_loop() -> None:
    plain = same_as_plain(Scenario("\n\n\n{\n\n\n \n" + "\n" * 60, {"max_tokens": 90}, Grammar.json_schema(FINAL)))
    assert json.loads(plain.text).keys() == {"ok"}
    assert not any(blank in plain.text for blank in ("\n", "\t", "  "))


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="x"'])
def test_17_a_grammar_that_cannot_roll_back_is_refused_before_any_token(attribute: str) -> None:
    grammar = Grammar.lark(f'start: some "!"\nsome[{attribute}]: /[a-z ]+/\n')
    with pytest.raises(GrammarError, match="roll back"):
        compiler(KNOWN[True], len(KNOWN[True])).matcher(grammar)


UNEXPRESSED = {
    "type": "object",
    "properties": {"count": {"type": "integer", "not": {"const": 12}}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("engine", ["llguidance", "auto"])
def test_18_a_schema_that_cannot_be_expressed_names_its_keyword_before_any_token(engine: Any) -> None:
    scenario = Scenario('{"count": 12}', grammar=Grammar.json_schema(UNEXPRESSED))
    local = LocalEngine(SpeculativeDecoder(scenario.model(True)), KNOWN[True], grammar_engine=engine)
    with pytest.raises(GrammarError, match="not"):
        local.generate([Request(scenario.prompt, SamplingParams(), scenario.grammar)])
    local.close()


@pytest.mark.parametrize(("count", "valid"), [(12, False), (13, True)])
def test_18_validated_texts_say_what_is_wrong(count: int, valid: bool) -> None:
    scenario = Scenario(f'{{"count": {count}}}{END}')
    local = LocalEngine(SpeculativeDecoder(scenario.model(True), Cascade()), KNOWN[True])
    grammar = Grammar.json_schema(UNEXPRESSED)
    request = Request(scenario.prompt, SamplingParams(temperature=0), grammar, validate=True)
    [[completion]] = local.generate([request])
    assert completion.text == f'{{"count": {count}}}'
    assert (completion.invalid is None) == valid
    assert valid or "$.count" in str(completion.invalid)
    assert list(local.stream(request))[-1].invalid == completion.invalid
    with pytest.raises(InvalidRequestError, match="JSON Schema"):
        Request(scenario.prompt, grammar=Grammar.regex("a"), validate=True)
    with pytest.raises(GrammarError):
        local.generate([Request(scenario.prompt, grammar=Grammar.json_schema({"type": 3}), validate=True)])
    local.close()


@pytest.mark.parametrize("limit", range(1, 24))
def test_19_a_call_cut_short_is_kept_and_says_so(limit: int) -> None:
    scenario = Scenario(CALL, {"max_tokens": limit}, Grammar.tools([NOW]))
    plain, _ = scenario.run(None, 0, greedy=True)
    found, _ = scenario.run(Cascade(), 4, greedy=True)
    assert found.tokens == plain.tokens
    parser = AnswerParser(
        (Grammar.__dict__ and None) or __import__("agentspec.grammars.tool_calls", fromlist=["HERMES"]).HERMES
    )
    parser.push(found.text)
    rest, calls = parser.finish()
    assert found.finish_reason == ("stop" if found.text == CALL else "length")
    assert rest.text + "".join(call.arguments for call in calls if not call.is_complete) == (
        "" if found.text == CALL else found.text
    )


# 20 to 26: sampling settings


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("grammar", [None, SHOP], ids=["free", "constrained"])
def test_20_drawn_texts_are_those_of_plain_decoding(settings: dict[str, Any], grammar: Grammar | None) -> None:
    scenario = Scenario(WISH, {**settings, "max_tokens": 25}, grammar, favour=7.0)
    for seed in (1, 2, 3):
        plain, _ = scenario.run(None, 0, False, seed)
        for name, drafter, gamma in scenario.drafters(plain, False):
            assert scenario.run(drafter, gamma, False, seed)[0].tokens == plain.tokens, name


def test_21_banned_ids_never_come_and_biases_hold_at_every_position() -> None:
    ids = KNOWN[True].encode("One, two, three, four")
    banned = tuple({ids[1], ids[3]})
    plain = same_as_plain(Scenario("One, two, three, four", {"banned_token_ids": banned, "max_tokens": 12}))
    assert not set(banned) & set(plain.tokens)
    liked = KNOWN[True].encode("seven")[0]
    settings = {"logit_bias": {liked: 100.0}, "max_tokens": 8}
    plain = same_as_plain(Scenario("One, two, three, four", settings))
    assert plain.tokens == (liked,) * 8


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.8}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}], ids=str
)
def test_22_penalties_see_the_drafted_prefix(settings: dict[str, Any]) -> None:
    scenario = Scenario("a, a, a, a, a, a, a, a, a, a", {**settings, "max_tokens": 20}, favour=7.0)
    same_as_plain(scenario, seeds=(1, 2, 3))
    free, _ = dataclasses.replace(scenario, settings={"max_tokens": 20}).run(None, 0, False)
    assert scenario.run(None, 0, False)[0].tokens != free.tokens  # the penalty makes a difference here


def test_23_a_processor_acts_on_p_and_q_and_sees_each_prefix_once_per_position() -> None:
    calls: list[tuple[int, ...]] = []

    def no_repeats(prefix: list[int], logits: Tensor) -> Tensor:
        calls.append(tuple(prefix))
        logits[prefix[-1]] = -100.0
        return logits

    scenario = Scenario("One, two, three, four", {"logits_processor": (no_repeats,), "max_tokens": 12}, favour=4.0)
    same_as_plain(scenario)
    plain, _ = scenario.run(None, 0, greedy=True)
    calls.clear()
    _, committed = scenario.run(Oracle(len(scenario.prompt), plain.tokens, GAMMA), GAMMA, greedy=True)
    assert len(calls) == len(set(calls))  # an oracle is never wrong: no prefix is tried twice
    assert len(committed) < len(plain.tokens)


def test_24_a_greedy_draft_reports_a_one_hot_q() -> None:
    scenario = Scenario("One, two, three, four")
    sequence = sequence_of(scenario)
    sequence.params = SamplingParams(temperature=0)
    batch = Batch([sequence])
    draft = ModelDrafter(scenario.model(True, seed=5)).propose(
        batch, DraftBudget([GAMMA]), GrammarCursor(batch.sequences, len(KNOWN[True]))
    )
    assert draft.q is not None
    assert torch.equal(draft.q, torch.nn.functional.one_hot(draft.tokens, len(KNOWN[True])).to(draft.q))
    cursor = GrammarCursor(batch.sequences, len(KNOWN[True]))
    assert PromptLookupDrafter().propose(batch, DraftBudget([GAMMA]), cursor).q is None


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("grammar", [None, SHOP], ids=["free", "constrained"])
def test_25_logprobs_are_those_of_the_distribution_that_was_drawn_from(raw: bool, grammar: Grammar | None) -> None:
    settings = {"temperature": 0.8, "top_k": 20, "logprobs": 2, "raw_logprobs": raw, "max_tokens": 25}
    scenario = Scenario(WISH, settings, grammar, favour=7.0)
    model, params = scenario.model(False), SamplingParams(**settings)
    plain, _ = scenario.run(None, 0, False)
    for name, drafter, gamma in scenario.drafters(plain, False):
        found, _ = scenario.run(drafter, gamma, False)
        matcher = compiler(KNOWN[True], len(KNOWN[True])).matcher(grammar) if grammar else None
        assert found.logprobs is not None
        for at, entry in enumerate(found.logprobs):
            context = [*scenario.prompt, *found.tokens[:at]]
            logits, mask = model.next_logits([context], [1]), None
            if matcher is not None:
                mask = matcher.token_mask().tensor()
                mask[KNOWN[True].eos_token_id] |= matcher.is_accepting()
                mask = PackedMasks.of(mask[None, None])
                matcher.accept_token(found.tokens[at])
            probs = logits.softmax(-1) if raw else warp(logits, [params], mask, [Prefix(context, 0, 1, frozenset())])
            assert entry.logprob == pytest.approx(probs[0, 0, entry.token].log().item(), abs=1e-4), (name, at)
            assert [i for i, _ in entry.top] == probs[0, 0].topk(2).indices.tolist()[: len(entry.top)]
    assert any(entry.logprob < -0.01 for entry in found.logprobs or ())
