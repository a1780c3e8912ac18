"""Was it worth it? Counts of rounds, and what they say of the gain."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.report import AgentRun, Gain, Iteration, ModelCall, RunRecord, Step
from agentspec.report.gain import call_gain, plain_pass, run_gain
from agentspec.stats import FORCED, RowStats, StepStats

SECONDS = {"draft_s": 0.004, "mask_s": 0.001, "verify_s": 0.060, "sample_s": 0.005, "detokenize_s": 0.0}


def stats(*rounds: tuple[RowStats, float, int], **told: Any) -> StepStats:
    """A step of these rounds: the row, the seconds of the target's pass, the width of the block."""
    folded = StepStats(**told)
    for row, verify_s, width in rounds:
        folded.add_round(row, {**SECONDS, "verify_s": verify_s}, width)
    folded.total_s = sum(folded.seconds.values())
    return folded


def step(*rounds: tuple[RowStats, float, int], **told: Any) -> Step:
    return Step.model_validate(stats(*rounds, **told).to_dict())


def row(drafted: int, accepted: int, committed: int | None = None, **forced: int) -> RowStats:
    return RowStats({"lookup": drafted}, {"lookup": accepted}, accepted + 1 if committed is None else committed)


def run_of(*steps: Step, name: str = "run") -> RunRecord:
    calls = [ModelCall(name="llm", start_s=0.0, seconds=one.total_s, step=one) for one in steps]
    seconds = sum(one.total_s for one in steps)
    parts = {"model_s": seconds, "tool_s": 0.0, "framework_s": 0.0, "idle_s": 0.0}
    iterations = [Iteration(start_s=0.0, seconds=seconds, models=calls, **parts)]
    record = RunRecord(name=name, began_at=0.0, total_s=seconds, iterations=iterations, **parts)
    return record.model_copy(update={"gain": run_gain(record)})


# Counting


def test_a_round_is_counted_by_what_it_emitted() -> None:
    told = step((row(4, 4), 0.06, 5), (row(4, 1), 0.06, 5), (row(4, 4), 0.05, 5), (row(0, 0), 0.04, 1))
    assert told.accepted_lengths == {5: 2, 2: 1, 1: 1}
    assert sum(length * n for length, n in told.accepted_lengths.items()) == 13
    assert told.mean_accepted_length == 13 / 4
    assert told.rejections == 1
    assert {width: (c.rounds, c.least_s) for width, c in told.verify_costs.items()} == {5: (3, 0.05), 1: (1, 0.04)}
    assert told.verify_costs[5].seconds == pytest.approx(0.17)


def test_a_sequence_that_ended_inside_its_block_declined_nothing() -> None:
    """Of 4 drafted tokens the second was the last: what came behind it was not looked at."""
    assert step((row(4, 2, committed=2), 0.06, 5)).rejections == 0


def test_the_width_is_the_rows_own_where_nobody_says() -> None:
    folded = StepStats()
    folded.add_round(RowStats({"lookup": 2, FORCED: 3}, {}, 1), {"verify_s": 0.1})
    assert list(folded.verify_costs) == [6]


def test_the_making_of_the_prompt_is_part_of_the_step() -> None:
    before = stats((row(4, 4), 0.06, 5), ttft_s=0.02)
    after = before.after(0.5)
    assert (after.total_s, after.ttft_s) == (before.total_s + 0.5, 0.52)
    assert after.to_dict()["template_s"] == 0.5
    assert before.to_dict()["template_s"] == 0.0
    assert after.to_dict()["other_s"] == pytest.approx(before.to_dict()["other_s"])


# What a plain pass takes


def test_rounds_of_width_one_tell_what_a_plain_pass_takes() -> None:
    found = plain_pass({1: (8, 0.4), 5: (2, 0.2)}, reported=[(0.3, 10)])
    assert found is not None
    assert (found.seconds, found.source) == (pytest.approx(0.05), "measured")


def test_few_of_them_tell_less_than_the_engines_table() -> None:
    found = plain_pass({1: (1, 0.9), 5: (2, 0.2)}, reported=[(0.03, 10), (0.06, 5)])
    assert found is not None
    assert (found.seconds, found.source) == (pytest.approx(0.04), "engine")
    alone = plain_pass({1: (1, 0.9), 5: (2, 0.2)})
    assert alone is not None
    assert (alone.seconds, alone.source) == (0.9, "measured")


def test_a_line_goes_through_wider_blocks() -> None:
    found = plain_pass({3: (10, 0.6), 5: (5, 0.4)})  # 0.06 and 0.08: 0.01 a token
    assert found is not None
    assert (found.seconds, found.source) == (pytest.approx(0.04), "extrapolated")


@pytest.mark.parametrize("costs", [{5: (2, 0.12)}, {3: (4, 0.4), 5: (2, 0.12)}, {2: (1, 0.06), 3: (1, 0.6)}])
def test_where_no_line_makes_sense_the_cheapest_block_is_a_bound(costs: dict[int, tuple[int, float]]) -> None:
    found = plain_pass(costs)
    assert found is not None
    assert (found.seconds, found.source) == (pytest.approx(0.06), "bound")


def test_without_passes_nothing_is_known() -> None:
    assert plain_pass({}) is None
    gain = call_gain([step()])
    assert gain is not None
    assert (gain.ratio, gain.plain_pass_s, gain.c, gain.theory, gain.saved_s) == (None,) * 5
    assert call_gain([]) is None


# The gain


def gained() -> Gain:
    rounds = [(row(4, 4), 0.06, 5)] * 3 + [(row(4, 1), 0.06, 5)] + [(row(0, 0), 0.04, 1)] * 8
    gain = call_gain([step(*rounds)])
    assert gain is not None
    return gain


def test_the_estimate_is_tokens_times_a_plain_round() -> None:
    gain = gained()
    assert gain.estimated
    assert (gain.tokens, gain.target_calls, gain.target_calls_saved) == (25, 12, 13)
    assert gain.plain_pass_s == pytest.approx(0.04)
    assert gain.decode_s == pytest.approx(12 * 0.010 + 4 * 0.06 + 8 * 0.04)
    rest = 12 * 0.006 / (16 + 12)  # masks and sampling, per position
    assert gain.plain_decode_s == pytest.approx(25 * (0.04 + rest))
    assert gain.ratio == pytest.approx(25 * (0.04 + rest) / gain.decode_s)
    assert gain.saved_s == pytest.approx(gain.plain_decode_s - gain.decode_s)


def test_drafts_that_were_not_accepted_are_wasted_time() -> None:
    gain = gained()
    assert gain.draft_s == pytest.approx(0.048)
    assert gain.wasted_draft_s == pytest.approx(0.048 * 3 / 16)
    assert gain.acceptance_rate == 13 / 16
    assert gain.c == pytest.approx(0.048 / 16 / 0.04)


def test_the_paper_is_asked_with_what_was_measured() -> None:
    theory = gained().theory
    assert theory is not None
    assert theory.alpha == 13 / 14  # of 14 tokens that were examined one was declined
    assert theory.gamma == 16 / 12
    assert theory.v == pytest.approx((4 * 0.06 + 8 * 0.04) / 12 / 0.04)
    assert theory.tokens_per_round == pytest.approx((1 - theory.alpha ** (theory.gamma + 1)) / (1 - theory.alpha))
    assert theory.improvement == pytest.approx(theory.tokens_per_round / (theory.gamma * theory.c + 1))
    assert theory.improvement_at_v < theory.improvement


def test_plain_decoding_gains_nothing() -> None:
    gain = call_gain([step(*[(RowStats({}, {}, 1), 0.04, 1)] * 10)])
    assert gain is not None
    plain = 10 * (0.04 + 0.006)
    assert gain.plain_decode_s == pytest.approx(plain)
    assert gain.ratio == pytest.approx(plain / (plain + 10 * 0.004))  # but for the asking of a drafter
    assert (gain.theory, gain.c, gain.wasted_draft_s) == (None, None, 0.0)


def test_models_of_a_run_are_estimated_each_by_its_own_passes() -> None:
    fast, slow = (step(*[(row(0, 0), seconds, 1)] * 10) for seconds in (0.01, 0.1))
    run = run_of(fast, slow)
    [iteration] = run.iterations
    other = iteration.models[1].model_copy(update={"name": "other"})
    two = run.model_copy(update={"iterations": [iteration.model_copy(update={"models": [iteration.models[0], other]})]})
    gain = run_gain(two)
    assert gain is not None
    assert gain.plain_pass_s is None  # there is no one pass
    assert gain.plain_decode_s == pytest.approx(10 * (0.016 + 0.106))


def test_a_baseline_makes_it_a_measurement() -> None:
    fast = AgentRun(run_of(step(*[(row(4, 4), 0.06, 5)] * 4)))
    plain = AgentRun(run_of(step(*[(row(0, 0), 0.05, 1)] * 20), name="plain"))
    assert fast.gain is not None
    assert fast.gain.estimated
    gain = fast.compare_to(plain)
    assert gain is not None
    assert gain == fast.gain == AgentRun.from_dict(fast.to_dict()).gain
    assert (gain.estimated, gain.baseline, gain.same_tokens) == (False, "plain", True)
    assert gain.ratio == pytest.approx(20 * 0.06 / (4 * 0.07))


def test_a_baseline_that_said_something_else_is_compared_by_the_token() -> None:
    fast = AgentRun(run_of(step(*[(row(4, 4), 0.06, 5)] * 4)))
    plain = AgentRun(run_of(step(*[(row(0, 0), 0.05, 1)] * 10)))
    gain = fast.compare_to(plain)
    assert gain is not None
    assert gain.same_tokens is False
    assert gain.ratio == pytest.approx(20 * 0.06 / (4 * 0.07))


def test_a_baseline_that_does_not_tell_changes_nothing() -> None:
    fast = AgentRun(run_of(step(*[(row(4, 4), 0.06, 5)] * 4)))
    before = fast.gain
    assert fast.compare_to(AgentRun(run_of())) is None
    assert fast.gain == before
