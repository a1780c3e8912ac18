"""An agent run as OpenTelemetry spans, by the GenAI semantic conventions (status "development", 2026).

``invoke_agent`` holds ``chat`` and ``execute_tool``; a tool that runs an agent holds an ``invoke_agent`` of its own.
Latencies of a model call stand under ``gen_ai.latency.*``, with the keys and the meaning that vLLM gives them;
whatever only this project knows stands under ``agentspec.*``. What is not known is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentspec.report.schema import Gain, Iteration, ModelCall, Phases, RunRecord, ToolCall

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

Value = str | bool | int | float | list[str]

IN_PROCESS = "agentspec"
"""Provider whose models run in this process, whose spans are therefore no client's."""

_PREFILL = ("prefill_s", "draft_prefill_s")
_DECODE = ("draft_s", "mask_s", "verify_s", "sample_s", "detokenize_s")


def tell(run: RunRecord, tracer: Tracer) -> None:
    """Tell a tracer of a finished run, with the times of the record.

    Raises:
        ModuleNotFoundError: without the package ``opentelemetry-api``.
    """
    try:
        import opentelemetry.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Spans need the package opentelemetry-api: pip install 'langchain-agentspec[otel]'."
        ) from error
    teller = _Teller(tracer, round(run.began_at * 1e9))
    inside = teller.span("invoke_agent", run.name, None, 0.0, run.total_s, dict(_about_run(run)), run.error)
    teller.calls(run.iterations, run.tools, inside)


@dataclass(frozen=True)
class _Teller:
    """Makes spans.

    Args:
        tracer: takes them.
        began_ns: time of day at which the run began, in nanoseconds.
    """

    tracer: Tracer
    began_ns: int

    def span(
        self,
        operation: str,
        name: str | None,
        parent: Context | None,
        start_s: float,
        seconds: float,
        about: dict[str, Value | None],
        error: str | None = None,
        is_client: bool = False,
    ) -> Context:
        """One span, begun and ended; returns the context for what is part of it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        known = {key: value for key, value in about.items() if value is not None}
        span = self.tracer.start_span(
            f"{operation} {name}" if name else operation,
            context=parent,
            kind=SpanKind.CLIENT if is_client else SpanKind.INTERNAL,
            attributes={"gen_ai.operation.name": operation, **known},
            start_time=self._time(start_s),
        )
        if error is not None:
            span.set_attribute("error.type", _error_type(error))
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=self._time(start_s) + round(seconds * 1e9))
        return set_span_in_context(span, parent)

    def calls(self, iterations: Sequence[Iteration], early: Sequence[ToolCall], parent: Context) -> None:
        """Send the calls of an agent, and what is within them."""
        for tool in early:
            self.tool(tool, None, parent)
        for number, iteration in enumerate(iterations, 1):
            for call in iteration.models:
                about = {**dict(_about_model(call)), "agentspec.iteration": number}
                is_client = call.provider != IN_PROCESS
                self.span("chat", call.name, parent, call.start_s, call.seconds, about, call.error, is_client)
            for tool in iteration.tools:
                self.tool(tool, number, parent)

    def tool(self, call: ToolCall, iteration: int | None, parent: Context) -> None:
        """Send a tool, and the agent within it."""
        about: dict[str, Value | None] = {
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.tool_call_id,
            "gen_ai.tool.type": "function",
            "agentspec.iteration": iteration,
            "agentspec.run_id": call.id,
        }
        inside = self.span("execute_tool", call.name, parent, call.start_s, call.seconds, about, call.error)
        for tool in call.tools:
            self.tool(tool, None, inside)
        if call.iterations:
            begin, last = call.iterations[0].start_s, call.iterations[-1]
            seconds = last.start_s + last.seconds - begin
            agent = self.span("invoke_agent", call.name, inside, begin, seconds, {"gen_ai.agent.name": call.name})
            self.calls(call.iterations, [], agent)

    def _time(self, seconds: float) -> int:
        return self.began_ns + round(seconds * 1e9)


def _about_run(run: RunRecord) -> Iterator[tuple[str, Value | None]]:
    yield "gen_ai.agent.name", run.name
    for name in ("model_s", "tool_s", "framework_s", "idle_s", "budget_s"):
        yield f"agentspec.{name}", getattr(run, name)
    yield "agentspec.iterations", len(run.iterations)
    if run.gain is not None:
        yield from _about_gain(run.gain)


def _about_model(call: ModelCall) -> Iterator[tuple[str, Value | None]]:
    yield "gen_ai.provider.name", call.provider
    yield "gen_ai.request.model", call.name
    if call.error is None:
        yield "gen_ai.response.model", call.name
    yield "gen_ai.request.stream", True if call.streamed else None
    yield "gen_ai.request.choice.count", len(call.steps) if len(call.steps) > 1 else None
    yield "gen_ai.response.finish_reasons", None if call.finish_reason is None else [call.finish_reason]
    yield "agentspec.run_id", call.id
    yield "agentspec.node", call.node
    if call.cached:
        yield "agentspec.cached", True
        return  # no model was at work: neither tokens nor latencies of one
    yield "gen_ai.usage.input_tokens", call.input_tokens
    yield "gen_ai.usage.output_tokens", call.output_tokens
    yield "gen_ai.response.time_to_first_chunk", call.ttft_s if call.streamed else None
    yield "gen_ai.latency.e2e", call.seconds
    yield "gen_ai.latency.time_to_first_token", call.ttft_s
    if call.phases is not None:
        yield from _latencies(call.phases)
    if call.steps:
        yield from _about_steps(call)


def _latencies(phases: Phases) -> Iterator[tuple[str, Value | None]]:
    """Yield seconds under vLLM's keys, and every phase under our own."""
    prefill, decode = (sum(getattr(phases, name) for name in names) for names in (_PREFILL, _DECODE))
    yield "gen_ai.latency.time_in_queue", phases.queue_s
    yield "gen_ai.latency.time_in_model_prefill", prefill
    yield "gen_ai.latency.time_in_model_decode", decode
    yield "gen_ai.latency.time_in_model_inference", prefill + decode
    for name in Phases.model_fields:
        yield f"agentspec.{name}", getattr(phases, name)


def _about_steps(call: ModelCall) -> Iterator[tuple[str, Value | None]]:
    """Return the counts of all samples of a call."""
    cached = sum(step.cached_tokens for step in call.steps)
    yield "gen_ai.usage.cache_read.input_tokens", cached if len(call.steps) == 1 else None
    for name in ("cached_tokens", "rounds", "target_calls", "drafted_tokens", "accepted_tokens", "forced_tokens"):
        yield f"agentspec.{name}", sum(getattr(step, name) for step in call.steps)
    if call.gain is not None:
        for drafter, counts in call.gain.drafters.items():
            yield f"agentspec.drafter.{drafter}.drafted", counts.drafted
            yield f"agentspec.drafter.{drafter}.accepted", counts.accepted
        yield from _about_gain(call.gain)


def _about_gain(gain: Gain) -> Iterator[tuple[str, Value | None]]:
    yield "agentspec.acceptance_rate", gain.acceptance_rate
    yield "agentspec.mean_accepted_length", gain.mean_accepted_length
    if gain.ratio is not None:
        yield "agentspec.gain.ratio", gain.ratio
        yield "agentspec.gain.estimated", gain.estimated


def _error_type(error: str) -> str:
    """Class of the exception that an error's repr begins with; ``_OTHER``, as the conventions say, without one."""
    named = re.match(r"([A-Za-z_][\w.]*)\(", error)
    return named[1] if named else "_OTHER"
