"""Suffix drafts: the longest match, what followed it most often, as far as that is likely, and from no other text."""

from __future__ import annotations

import copy
import gc
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from enumeration import SETTINGS, TASKS, AutomatonMatcher, TableModel, Task, largest_error, table_models
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec import Batch, Cascade, Drafter, FinishReason, SamplingParams, Sequence, SpeculativeDecoder, SuffixDrafter
from agentspec.drafters import Draft, DraftBudget, DraftRow
from agentspec.drafters.suffix.endings import Endings
from agentspec.grammars import GrammarCursor
from agentspec.sequence import RequestGroup

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 100
UNBOUNDED = SamplingParams(max_tokens=10_000)


def sequence_of(prompt: SequenceOf[int], output: SequenceOf[int] = (), **how: Any) -> Sequence:
    sequence = Sequence(prompt, UNBOUNDED, seed=0, **how)
    sequence.extend(list(output))
    return sequence


def proposals(
    drafter: Drafter, sequences: SequenceOf[Sequence], gamma: int = 8, drafted: SequenceOf[int] = ()
) -> list[tuple[list[int], list[int]]]:
    """Return per row the tokens and their support, after ``drafted``."""
    batch = Batch(sequences)
    cursor = GrammarCursor(batch.sequences, VOCABULARY)
    for row in range(len(batch)):
        for token in drafted:
            cursor.consume(row, token)
    draft = drafter.propose(batch, DraftBudget([gamma] * len(batch)), cursor)
    assert draft.q is None
    cursor.reset()
    return [(row.tokens, row.support) for row in draft.rows]


def span_of(context: SequenceOf[int], gamma: int = 8, **how: Any) -> list[int]:
    [(span, _)] = proposals(SuffixDrafter(**how), [sequence_of(context)], gamma)
    return span


def words(text: str) -> list[int]:
    """One id per letter."""
    return [ord(letter) - ord("a") for letter in text if letter != " "]


# What is proposed


def test_the_longest_match_goes_before_a_more_frequent_shorter_one() -> None:
    assert span_of(words("abcx bcy bcy bcy abc"), 1) == words("x")
    assert span_of(words("abcx bcy bcy bcy abc"), 1, max_match=2) == words("y")


def test_what_followed_most_often_is_proposed_and_the_latest_of_equals() -> None:
    assert span_of(words("abx aby abx abz ab"), 1) == words("x")
    assert span_of(words("abx aby ab"), 1) == words("y")


def test_nothing_is_proposed_without_a_match() -> None:
    assert span_of(words("abcdef")) == []
    assert span_of([]) == []
    assert span_of(words("ax bx ya"), min_match=2) == []
    assert span_of(words("ax bx ya"), 1, min_match=1) == words("x")
    assert span_of(words("abab"), 0) == []


def test_a_loop_goes_on_through_what_was_just_drafted() -> None:
    assert span_of(words("xabab"), 7) == words("abababa")
    assert span_of(words("aaa"), 5) == words("aaaaa")


def test_the_span_ends_where_its_running_probability_is_too_low() -> None:
    context = words("pqamb pqamc pqanb pqaod pq")  # a is certain, then m has a half, then c a half of that
    assert span_of(context, 3, min_probability=0) == words("amc")
    assert span_of(context, 3, min_probability=0.26) == words("am")
    assert span_of(context, 3, min_probability=0.51) == words("a")


def test_more_occurrences_than_are_looked_at_are_the_latest() -> None:
    context = words("qabx rabx sabx taby uaby vab")
    assert span_of(context, 1) == words("x")
    assert span_of(context, 1, max_occurrences=3) == words("y")


def free(states: dict[int, dict[int, int]]) -> Callable[[], AutomatonMatcher]:
    return lambda: AutomatonMatcher(states, final=set(), vocab_size=VOCABULARY)


def any_of(text: str, state: int) -> dict[int, int]:
    return dict.fromkeys(words(text), state)


def test_the_most_frequent_legal_continuation_is_proposed_and_none_where_none_is_legal() -> None:
    context = words("abxk abxk abyk abyk abyk abzm ab")
    grammar = free({0: any_of("xzq", 1), 1: any_of("kj", 2), 2: any_of("qj", 0)})
    [(span, support)] = proposals(SuffixDrafter(), [sequence_of(context, matcher=grammar())])
    assert span == words("xk")  # y is forbidden, and after xk only q and j may come, which never did
    assert support == [1 + 4 * 1 + 1, 1 + 4 * 1 + 3]  # x is two of three that are legal
    shut = free({0: any_of("qj", 0)})
    assert proposals(SuffixDrafter(), [sequence_of(context, matcher=shut())]) == [([], [])]


def test_a_span_ends_at_an_end_token() -> None:
    sequence = sequence_of(words("abcdef abc"), end_tokens=words("e"))
    assert proposals(SuffixDrafter(), [sequence])[0][0] == words("de")


def test_support_encodes_match_and_share() -> None:
    def classes(text: str, gamma: int = 1) -> list[int]:
        return proposals(SuffixDrafter(), [sequence_of(words(text))], gamma)[0][1]

    assert classes("xab yac zad qa") == [1]  # one token, a third of the continuations
    assert classes("xab yab zac qa") == [2]  # most of them
    assert classes("ab a") == [3]  # all, and only one
    assert classes("abab a") == [1 + 4 + 2]  # the longest match is of two tokens, once
    assert classes("xab yab qa") == [4]  # all of two
    assert classes("xabcdefghij xa", 8) == [7, 7, 11, 11, 11, 11, 15, 15]  # drafted tokens make the match longer


# Against the definition, and however it got there

texts = st.lists(st.integers(0, 2), max_size=40)


def by_definition(context: list[int], others: list[list[int]], gamma: int, floor: float) -> list[int]:
    """Longest match, most frequent continuation, running probability, each by looking everywhere."""

    def follows(length: int, span: list[int]) -> list[int]:
        """Return what follows the last ``length`` tokens and the span, wherever both stand."""
        wanted = context[len(context) - length :] + span
        found = []
        for text, first, last in [(context + span, 1, len(context)), *((other, 3, len(other)) for other in others)]:
            for at in range(max(first, length), last):
                if text[at - length : at + len(span)] == wanted and at + len(span) < len(text):
                    found.append(text[at + len(span)])
        return found

    longest = next((n for n in range(min(16, len(context)), 0, -1) if follows(n, [])), 0)
    span: list[int] = []
    probability = 1.0
    while longest and len(span) < gamma and (following := follows(longest, span)):
        counts = Counter(following)
        most = max(counts.values())
        probability *= most / len(following)
        if probability < floor or list(counts.values()).count(most) > 1:
            break  # of equals the definition names none
        span.append(max(counts, key=lambda token: counts[token]))
    return span


@given(texts, st.lists(texts, max_size=3), st.sampled_from([0.0, 0.2, 0.6]))
@settings(deadline=None)
def test_proposals_are_what_the_definition_says(output: list[int], others: list[list[int]], floor: float) -> None:
    prompt = [0, 1, 2]
    group = RequestGroup()
    samples = [sequence_of(prompt, text, group=group) for text in (output, *others)]
    drafter = SuffixDrafter(min_probability=floor, max_occurrences=1000)
    [(span, _)] = proposals(drafter, samples[:1])
    expected = by_definition(prompt + output, [prompt + text for text in others], 8, floor)
    assert span[: len(expected)] == expected


@given(texts, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=12), st.data())
@settings(deadline=None)
def test_an_index_that_grew_proposes_what_a_new_one_does(
    prompt: list[int], blocks: list[list[int]], data: st.DataObject
) -> None:
    grown, sequence = SuffixDrafter(min_probability=0.3), sequence_of(prompt)
    for block in blocks:
        drafted = data.draw(st.lists(st.integers(0, 2), max_size=3))
        new = SuffixDrafter(min_probability=0.3)
        assert proposals(grown, [sequence], drafted=drafted) == proposals(new, [sequence], drafted=drafted)
        sequence.extend(block)
        cut = data.draw(st.sampled_from([n for n in range(min(2, sequence.length) + 1) if n != len(block)]))
        del sequence.context[len(sequence.context) - cut :]  # as a stop string does; every round changes the length
    assert proposals(grown, [sequence]) == proposals(SuffixDrafter(min_probability=0.3), [sequence])


@given(st.lists(texts, min_size=2, max_size=6), st.data())
@settings(deadline=None)
def test_the_next_turn_goes_on_from_the_last_and_proposes_what_a_new_drafter_does(
    parts: list[list[int]], data: st.DataObject
) -> None:
    """Turns that are over, that still run, that go on elsewhere."""
    drafter, context, running = SuffixDrafter(scope="request"), list[int](), []
    for part in parts:
        kept = data.draw(st.integers(0, len(context)))
        context = context[: kept if data.draw(st.booleans()) else len(context)] + part
        turn = sequence_of(context, [1])
        running.append(turn)
        for each in running:
            assert proposals(drafter, [each]) == proposals(SuffixDrafter(), [each])
        if data.draw(st.booleans()):
            running.remove(turn)
            turn.finish(FinishReason.STOP)


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many positions were taken in."""
    count: Counter[str] = Counter()
    extend = Endings.extend

    def counted(self: Endings, ids: array[int], end: int, first: int = 0) -> None:
        count["positions"] += max(0, end - self.end)
        extend(self, ids, end, first)

    monkeypatch.setattr(Endings, "extend", counted)
    return count


def test_only_what_is_new_is_taken_in(indexed: Counter[str]) -> None:
    drafter = SuffixDrafter()
    prompt = [i * i % 97 for i in range(1000)]
    sequence = sequence_of(prompt)
    proposals(drafter, [sequence])
    assert indexed.pop("positions") == 1000
    for block in ([5], [6, 7, 8]):
        sequence.extend(block)
        proposals(drafter, [sequence])
        assert indexed.pop("positions") == len(block)
    samples = [sequence_of(prompt) for _ in range(5)]
    proposals(drafter, samples)
    assert indexed.pop("positions", 0) == 0
    for each in (*samples, sequence):
        each.finish(FinishReason.STOP)
    result = [1, 2, 3]
    proposals(drafter, [sequence_of([*sequence.context, *result])])
    assert indexed.pop("positions") == sequence.length + len(result)


def test_a_prompt_is_indexed_while_it_is_read(indexed: Counter[str]) -> None:
    prompt, drafter = words("abcabd") * 40, SuffixDrafter()
    for count in (100, 200, len(prompt) - 1):  # as the scheduler has it read, but for the last token
        drafter.prefill([prompt[:count]])
    assert indexed.pop("positions") == len(prompt) - 1
    assert proposals(drafter, [sequence_of(prompt)]) == proposals(SuffixDrafter(), [sequence_of(prompt)])


def test_prompts_that_are_read_side_by_side_change_no_proposal() -> None:
    same = words("abcabdabcabe") * 5
    prompts = [[*same, *words("xyzxy")], [*same, *words("uvwuv")], words("klmkl")]
    drafter, running = SuffixDrafter(scope="request"), []
    for count in (30, 50, 60, 64):
        drafter.prefill([prompt[:count] for prompt in prompts])
    for prompt in prompts:
        running.append(sequence_of(prompt))
        drafter.prefill([prompts[0]])  # again, by a request that comes later
        for each in running:
            assert proposals(drafter, [each]) == proposals(SuffixDrafter(), [each])


# Who sees what


def test_a_request_shares_nothing() -> None:
    group = RequestGroup()
    sequence, other = sequence_of([1, 2, 3], group=group), sequence_of([1, 2, 3], [4, 5, 6], group=group)
    for scope, expected in (("request", []), ("siblings", [4, 5, 6]), ("engine", [4, 5, 6])):
        drafter = SuffixDrafter(scope=scope)  # type: ignore[arg-type]
        assert [span for span, _ in proposals(drafter, [other, sequence])][1] == expected
        assert [span for span, _ in proposals(drafter, [sequence])] == [expected]


def test_siblings_do_not_share_with_other_requests() -> None:
    other, sequence = sequence_of([1, 2, 3], [4, 5, 6]), sequence_of([1, 2, 3])
    for scope, expected in (("siblings", []), ("engine", [4, 5, 6])):
        assert proposals(SuffixDrafter(scope=scope), [sequence, other])[0][0] == expected  # type: ignore[arg-type]


def play(drafter: Drafter, prompt: SequenceOf[int], output: SequenceOf[int]) -> None:
    """Play a sequence with this output to its end, its last token unseen by the drafter, and drop it."""
    sequence = sequence_of(prompt, output[:-1])
    proposals(drafter, [sequence])
    sequence.extend([output[-1]])
    sequence.finish(FinishReason.STOP)


def test_an_engine_remembers_finished_outputs_whole_and_none_of_their_prompts() -> None:
    for scope, expected in (("engine", [4, 5, 6, 7]), ("siblings", [])):
        drafter = SuffixDrafter(scope=scope)  # type: ignore[arg-type]
        play(drafter, [9, 8, 1, 2, 3], [4, 5, 6, 7])
        play(drafter, [50], [51, 52])
        assert proposals(drafter, [sequence_of([2, 3])])[0][0] == expected
        assert proposals(drafter, [sequence_of([9, 8])])[0][0] == []


def test_an_output_counts_once_when_its_sequence_is_still_there() -> None:
    """The memory's and the sibling's copy of one text are one."""
    drafter = SuffixDrafter(scope="engine")
    group = RequestGroup()
    first, _, _, asking = (sequence_of([1, 2], output, group=group) for output in ([3], [4], [4], []))
    proposals(drafter, [first])
    first.finish(FinishReason.STOP)
    assert proposals(drafter, [asking], 1) == [([4], [1 + 4 + 1])]


def test_the_memory_is_bounded_and_forgets_the_oldest_first() -> None:
    drafter = SuffixDrafter(scope="engine", memory=400, max_match=4)
    for k in range(30):
        play(drafter, [0], [k + 1] * 3 + [60 + k] * 17)
        assert sum(len(ids) for ids, _ in drafter._memory.generations) <= 400
    play(drafter, [0], [99])
    remembered = [bool(proposals(drafter, [sequence_of([k + 1] * 3)], 8)[0][0][-1] >= 60) for k in range(30)]
    assert remembered == sorted(remembered)
    assert 10 <= sum(remembered) < 25
    play(drafter, [0], list(range(1, 90)) * 10)
    play(drafter, [0], [99])
    assert sum(len(ids) for ids, _ in drafter._memory.generations) <= 400


def test_no_memory_remembers_nothing() -> None:
    drafter = SuffixDrafter(scope="engine", memory=0)
    play(drafter, [1, 2, 3], [4, 5, 6, 7])
    assert proposals(drafter, [sequence_of([2, 3])])[0][0] == []


def test_the_index_of_prompts_is_bounded_but_for_the_newest() -> None:
    drafter = SuffixDrafter(memory=100)
    for k in range(20):
        proposals(drafter, [sequence_of([k] * 30)])
        assert sum(len(known.ids) for known in drafter._prompts._known) <= 100
    proposals(drafter, [sequence_of([1, 2] * 100)])
    assert [len(known.ids) for known in drafter._prompts._known] == [200]


@pytest.mark.parametrize("scope", ["request", "siblings", "engine"])
def test_sequences_are_not_kept_alive(scope: Any) -> None:
    drafter = SuffixDrafter(scope=scope)
    sequence = sequence_of([1, 2, 1, 2])
    proposals(drafter, [sequence])
    gone = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert gone() is None
    assert not drafter._texts


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_match": 0},
        {"min_match": 5, "max_match": 4},
        {"min_probability": 1.1},
        {"scope": "world"},
        {"memory": -1},
        {"max_occurrences": 0},
    ],
    ids=str,
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SuffixDrafter(**wrong)


# In a cascade, and exact


def test_the_running_probability_goes_on_after_forced_tokens() -> None:
    """x is a half; f is forced; then u is a half again: a quarter in all."""
    context = words("qabxfu rabyfw sabxfv tabzfw kab")
    grammar = {0: any_of("xyz", 1), 1: any_of("f", 2), 2: any_of("uvwe", 3), 3: any_of("ab", 3)}
    for floor, expected in ((0.0, "xfv"), (0.3, "xf")):
        sequence = sequence_of(context, matcher=free(grammar)())
        drafter = Cascade([SuffixDrafter(min_probability=floor)])
        assert proposals(drafter, [sequence], 2)[0][0] == words(expected)
        assert proposals(drafter, [sequence], 2)[0][0] == words(expected), "the same round again"


class Remembering(Drafter):
    """A suffix drafter that begins every round with the same memory."""

    name = "remembering"

    def __init__(self) -> None:
        self.drafter = SuffixDrafter(scope="engine")
        for output in ([1, 0, 2, 0, 1], [0, 0, 1, 1], [1, 2, 0, 3]):
            play(self.drafter, [0, 1, 0], output)
        proposals(self.drafter, [sequence_of([0])])
        self.drafter._latest = []
        self.proposed = 0

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Any:
        drafter = SuffixDrafter(scope="engine")
        drafter._memory = copy.deepcopy(self.drafter._memory)
        draft = drafter.propose(batch, budget, cursor)
        self.proposed += sum(draft.lengths)
        return draft


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_distribution_is_the_targets_whatever_was_remembered(setting: str, task: Task) -> None:
    target, _ = table_models(task, seed=1)
    drafter = Remembering()
    for gamma in (1, 3):
        found = task.emitted(SpeculativeDecoder(target, drafter, gamma).round, setting)
        assert largest_error(found, task.plain(target, setting)) < 1e-12
    assert drafter.proposed > 0


def test_texts_of_siblings_are_drafted_and_change_no_coupled_text() -> None:
    target = TableModel(4, seed=4)

    def texts_of(scope: Any, gamma: int) -> tuple[list[list[int]], int]:
        drafter, accepted = SpeculativeDecoder(target, SuffixDrafter(min_match=3, scope=scope)), 0
        every: list[list[int]] = []
        for request in range(3):
            settings = SamplingParams(max_tokens=40, temperature=0.5)
            how: dict[str, Any] = {"gamma": gamma, "acceptance": "coupled", "group": RequestGroup()}
            samples = [Sequence([0, 1], settings, seed=5 * request + i, **how) for i in range(5)]
            while live := [sample for sample in samples if sample.finish_reason is None]:
                accepted += sum(sum(row.accepted.values()) for row in drafter.round(Batch(live)).rows)
            every += [sample.tokens for sample in samples]
        return every, accepted

    plain, _ = texts_of("request", 0)
    alone, by_itself = texts_of("request", 4)
    shared, with_siblings = texts_of("siblings", 4)
    remembered, with_memory = texts_of("engine", 4)
    assert plain == alone == shared == remembered
    assert by_itself < with_siblings < with_memory


class Repeating(Drafter):
    """Proposes the same tokens in every round, at the first position where it is asked."""

    def __init__(self, name: str, span: SequenceOf[int]) -> None:
        self.name, self._span, self.asked_at = name, list(span), list[int]()

    def propose(self, batch: Batch, budget: DraftBudget, cursor: GrammarCursor) -> Draft:
        proposed = [] if self.asked_at else self._span
        self.asked_at.append(cursor.drafted(0))
        for token in proposed:
            cursor.consume(0, token)
        return Draft.of_tokens([proposed], self.name, batch.device)


def test_a_drafter_is_asked_again_only_where_others_went_on() -> None:
    grammar = AutomatonMatcher({0: {0: 1, 1: 1}, 1: {0: 2}, 2: {0: 2, 1: 2}}, set())  # the second token is forced
    first, second, third = Repeating("one", [1]), Repeating("two", []), Repeating("two", [1, 1])
    batch = Batch([Sequence([0], UNBOUNDED, matcher=grammar)])
    draft = Cascade([first, second, third]).propose(batch, DraftBudget([9]), GrammarCursor(batch.sequences, 3))
    assert draft.rows == (DraftRow([1, 0, 1, 1], ["one", "forced", "two", "two"], [0] * 4),)
    assert (first.asked_at, second.asked_at, third.asked_at) == ([0, 2, 4], [2, 4], [2])
