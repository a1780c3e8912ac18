"""What the views of a run share: counts that are known or None, never a part of the truth; calls in their order."""

from __future__ import annotations

from typing import Any

from test_report_terminal import example, step

from agentspec.report import ModelCall, Phases
from agentspec.report.summary import PHASES, Totals, calls_within, columns, phase_label


def call(**known: Any) -> ModelCall:
    return ModelCall(name="a", start_s=0, seconds=1, **known)


def phases(seconds: float) -> Phases:
    return Phases.model_validate(dict.fromkeys(PHASES, seconds))


def test_counts_are_those_of_all_samples_and_cached_calls_are_left_out() -> None:
    first = call(step=step(1.0), other_samples=[step(0.5)], input_tokens=70, output_tokens=12, phases=phases(0.5))
    second = call(step=step(2.0), input_tokens=30, output_tokens=6, phases=phases(0.25))
    cached = call(cached=True, step=step(9.0), input_tokens=1000)
    found = Totals.of([first, cached, second])
    assert (found.calls, found.cached, found.input_tokens, found.output_tokens) == (3, 1, 100, 18)
    assert found.phases == dict.fromkeys(PHASES, 0.75)
    assert found.count(lambda one: one.new_tokens) == 18
    assert found.acceptance_rate == 12 / 24
    assert found.tokens_per_target_call == (5 + 1) / 2


def test_what_one_call_does_not_report_is_not_known_of_all() -> None:
    found = Totals.of([call(step=step(1.0), input_tokens=70, phases=phases(1)), call(output_tokens=3)])
    assert (found.input_tokens, found.output_tokens, found.phases, found.steps) == (None,) * 4
    assert (found.count(len), found.acceptance_rate, found.tokens_per_target_call) == (None,) * 3  # type: ignore[arg-type]


def test_no_calls_have_no_counts() -> None:
    for calls in ([], [call(cached=True, step=step(1.0))]):
        found = Totals.of(calls)
        assert (found.calls, found.cached, found.steps, found.phases, found.input_tokens) == (
            len(calls),
            len(calls),
            None,
            None,
            None,
        )


def test_the_last_column_is_the_run_and_the_others_add_up_to_it() -> None:
    *iterations, run = columns(example().record())
    assert [column.name for column in iterations] == ["1", "2"]
    assert run.is_run
    assert not any(column.is_run for column in iterations)
    for name in ("total_s", "model_s", "tool_s", "framework_s", "idle_s"):
        assert sum(getattr(column, name) for column in iterations) == getattr(run, name), name
    assert [call.name for call in run.models] == ["own model", "other model"]  # a tool's own model is not among them


def test_calls_come_by_their_beginning_and_those_within_a_tool_after_it() -> None:
    record = example().record()
    found = [(depth, call.name) for depth, call in calls_within(record.iterations, record.tools)]
    assert found == [(0, "own model"), (0, "search"), (0, "ask"), (1, "inner model"), (0, "other model")]


def test_phases_are_named_for_people() -> None:
    assert [phase_label(name) for name in ("draft_prefill_s", "mask_s")] == ["draft prefill", "mask"]
