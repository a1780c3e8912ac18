"""One request's trouble is no other's: every seam, every exception, every row, early and late."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from effort import effort
from faults import EXCEPTIONS, IN_COMMIT, PLACES, ROWS, SEAMS, Panic, Scene, Trouble, alone

from agentspec import RequestFailedError

alone = functools.cache(alone)


@pytest.mark.whole
@pytest.mark.parametrize("exception", EXCEPTIONS)
@pytest.mark.parametrize("seam", SEAMS)
def test_neighbours_have_the_text_that_they_have_alone(seam: str, exception: str) -> None:
    some = [list(EXCEPTIONS).index(exception) % len(PLACES)]
    for k in effort(quick=some, whole=range(len(PLACES))):
        strike(seam, exception, *PLACES[k])


def strike(seam: str, exception: str, place: int, at: int) -> bool:
    """Play rows of which one is in trouble, then another; whether it came to that."""
    trouble = Trouble(seam, EXCEPTIONS[exception], at)
    scene = Scene(trouble)
    rows = [scene.row(index, in_trouble=index == place) for index in range(ROWS)]
    scene.play(*(request for request, _ in rows))
    for index, (_, told) in enumerate(rows):
        if index != place:
            assert told.error is None, (place, at, index)
            assert told.answer == alone(index, seam=seam), (place, at, index)
    if trouble.fired:
        expect_error(rows[place], exception)
    else:  # too short a text: it never came to it
        assert rows[place][1].answer == alone(place, True, seam=seam)
    following, told = scene.row(place)
    scene.play(following)
    assert told.answer == alone(place, seam=seam)
    assert not scene.scheduler._running
    return bool(trouble.fired)


def test_every_seam_is_struck_early_and_late_in_every_row() -> None:
    for seam in SEAMS:
        struck = [strike(seam, "ValueError", *place) for place in PLACES]
        assert sum(struck) >= 3, (seam, struck)


def expect_error(row: Any, exception: str) -> None:
    """The failing request's caller gets the exception; one that would end more than a request gets another name."""
    request, told = row
    error = request.error if told.error is None else told.error
    raised = EXCEPTIONS[exception]()
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        assert type(error) is type(raised)
        assert error.args == raised.args
    else:
        # A generator on its way makes another error of StopIteration.
        assert isinstance(error, RequestFailedError if exception != "StopIteration" else RuntimeError)
        assert type(error.__cause__) is type(raised)
    assert request.is_over


@pytest.mark.parametrize("exception", ["ValueError", "MemoryError", "Panic"])
@pytest.mark.parametrize(
    "seam", [seam for seam in SEAMS if seam not in IN_COMMIT and "prefill" not in seam and "grammar" not in seam]
)
def test_a_fault_that_does_not_repeat_fails_no_request(seam: str, exception: str) -> None:
    """A round that raised before its commit changed nothing: played again, it is the round that it would have been."""
    for place in (0, ROWS - 1):
        trouble = Trouble(seam, EXCEPTIONS[exception], 1, once=True)
        scene = Scene(trouble)
        rows = [scene.row(index, in_trouble=index == place) for index in range(ROWS)]
        scene.play(*(request for request, _ in rows))
        assert trouble.fired == 1
        for index, (_, told) in enumerate(rows):
            assert told.answer == alone(index, index == place)


def test_several_culprits_of_different_seams_leave_their_mates_alone() -> None:
    scenes = [("logits_processor", "ValueError"), ("grammar, rollback", "Panic"), ("commit, half", "KeyError")]
    scene = Scene(Trouble("none", RuntimeError), max_running=6)
    rows = []
    for index in range(6):
        if index % 2:
            seam, exception = scenes[index // 2]
            scene.trouble = Trouble(seam, EXCEPTIONS[exception], 2)
        rows.append(scene.row(index, in_trouble=bool(index % 2)))
    scene.play(*(request for request, _ in rows))
    for index, row in enumerate(rows):
        if index % 2:
            expect_error(row, scenes[index // 2][1])
        else:
            assert row[1].answer == alone(index)


# What a failure costs


@pytest.mark.parametrize("requests", [1, 2, 8, 30])
def test_a_broken_model_costs_each_request_two_passes_at_most_and_one_soon(requests: int) -> None:
    scene = Scene(Trouble("none", RuntimeError), max_running=8)

    def broken(contexts: Any, last: Any) -> Any:
        if any(last):
            scene.target.passes.append(len(contexts))
            raise RuntimeError("broken")
        return scene.target.__class__.next_logits(scene.target, contexts, last).values

    scene.target.next_logits = broken  # type: ignore[method-assign]
    rows = [scene.row(4 * index) for index in range(requests)]  # all of one acceptance rule
    scene.play(*(request for request, _ in rows))
    assert all(isinstance(told.error, RuntimeError) for _, told in rows)
    assert len(scene.target.passes) <= requests + 1  # each by itself, and once all together
    assert scene.target.passes.count(1) == requests
    del scene.target.next_logits
    after = [scene.row(4 * index) for index in range(8)]
    scene.target.passes.clear()
    scene.play(*(request for request, _ in after))
    assert [told.answer for _, told in after] == [alone(4 * index) for index in range(8)]
    assert max(scene.target.passes) > 4  # it is trusted again


def test_one_culprit_costs_one_round_again() -> None:
    trouble = Trouble("target", EXCEPTIONS["ValueError"], 0)
    scene = Scene(trouble)
    rows = [scene.row(4 * index, in_trouble=index == 1) for index in range(ROWS)]
    scene.scheduler._waiting.extend(state for request, _ in rows for state in request.sequences)
    scene.scheduler.step()
    assert sorted(scene.target.passes) == [1] * ROWS + [ROWS]
    scene.scheduler.step()
    assert scene.target.passes[-1] == max(scene.target.passes[ROWS + 1 :]) <= ROWS - 1


@pytest.mark.parametrize("seam", ["grammar, rollback", "grammar, accept_token, done", "grammar, token_mask"])
def test_a_matcher_that_raises_is_known_for_the_culprit(seam: str) -> None:
    """The others play again together, or have played: none has to be tried by itself."""
    trouble = Trouble(seam, EXCEPTIONS["Panic"], 0)
    scene = Scene(trouble, ROWS + 1)  # one of which may be done before
    rows = [scene.row(4 * index, in_trouble=index == 1) for index in range(ROWS + 1)]
    scene.scheduler._waiting.extend(state for request, _ in rows for state in request.sequences)
    while not trouble.fired:
        scene.scheduler.step()
    assert scene.target.passes
    assert 1 not in scene.target.passes
    scene.play()
    assert rows[0][1].answer == alone(0)
    assert isinstance(rows[1][1].error, RequestFailedError)
    assert isinstance(rows[1][1].error.__cause__, Panic)


def test_rounds_that_fail_only_together_become_smaller_for_a_while() -> None:
    """Memory for so many rows ran out, say: the same failure is not waited for in every round."""
    scene = Scene(Trouble("none", RuntimeError), max_running=8)
    play, failed = scene.target.next_logits, 0

    def small(contexts: Any, last: Any) -> Any:
        nonlocal failed
        if len(contexts) > 3:
            failed += 1
            raise MemoryError("too many")
        return play(contexts, last)

    scene.target.next_logits = small  # type: ignore[method-assign]
    rows = [scene.row(4 * index) for index in range(8)]
    scene.play(*(request for request, _ in rows))
    assert [told.answer for _, told in rows] == [alone(4 * index) for index in range(8)]
    assert failed == 2  # 8 rows, then 4; 2 go well
    assert 2 in scene.target.passes
