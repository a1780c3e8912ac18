"""A run as spans of the GenAI conventions, as OpenTelemetry's own SDK receives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import recorded

from agentspec.report import AgentRun, RunRecord
from agentspec.report.views.otel import tell

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer


class Collector:
    """A tracer and the spans that it was told of."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = self.provider.get_tracer("tests")

    def of(self, run: RunRecord) -> list[ReadableSpan]:
        AgentRun(run).to_otel(self.tracer)
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.provider.shutdown()


def tree(spans: list[ReadableSpan]) -> list[tuple[str, str | None]]:
    """Names of spans and of what they are part of, by their beginning."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    return [(span.name, names.get(span.parent.span_id) if span.parent else None) for span in spans]


def test_names_and_parents(collector: Collector) -> None:
    run = recorded.busy()
    spans = collector.of(run)
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    shop = "invoke_agent shop"
    assert sorted(tree(spans), key=str) == sorted(
        [
            (shop, None),
            ("chat embedded", shop),
            ("chat embedded", shop),
            ("chat embedded", shop),
            ("chat gpt-x-with-a-very-long-name-that-goes-on-and-on", shop),
            ("execute_tool research", shop),
            ("execute_tool get_price", shop),
            ("execute_tool get_price", shop),
            (f"execute_tool {recorded.EVIL}", shop),
            ("invoke_agent research", "execute_tool research"),
            ("chat embedded", "invoke_agent research"),
            ("execute_tool search_the_archive", "invoke_agent research"),
        ],
        key=str,
    )


def test_times_are_those_of_the_record(collector: Collector) -> None:
    run = recorded.busy()
    spans = collector.of(run)
    began = round(run.began_at * 1e9)
    calls = [*run.model_calls, *run.tool_calls]
    told = sorted(
        (span.start_time - began, span.end_time - span.start_time)
        for span in spans
        if span.start_time and span.end_time and not span.name.startswith("invoke_agent")
    )
    assert told == sorted((round(call.start_s * 1e9), round(call.seconds * 1e9)) for call in calls)
    root = next(span for span in spans if span.parent is None)
    assert (root.start_time, root.end_time) == (began, began + 10_000_000_000)


def test_a_model_call_tells_what_the_conventions_ask_for(collector: Collector) -> None:
    spans = collector.of(recorded.simple())
    chat = next(span for span in spans if span.name == "chat embedded")
    about = dict(chat.attributes or {})
    assert chat.kind == SpanKind.INTERNAL  # in this process
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.provider.name"] == "agentspec"
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "embedded"
    assert about["gen_ai.usage.input_tokens"] == 300
    assert about["gen_ai.usage.cache_read.input_tokens"] == 250
    assert about["gen_ai.usage.output_tokens"] == 12
    assert about["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert about["agentspec.drafter.lookup.accepted"] == 5
    assert about["agentspec.gain.estimated"] is True
    assert about["agentspec.iteration"] == 1
    assert "gen_ai.response.time_to_first_chunk" not in about  # it was not streamed


def test_latencies_have_the_keys_of_vllm_and_add_up(collector: Collector) -> None:
    spans = collector.of(recorded.simple())
    about = dict(next(span for span in spans if span.name == "chat embedded").attributes or {})
    latency = {key.removeprefix("gen_ai.latency."): about[key] for key in about if key.startswith("gen_ai.latency.")}
    assert latency == {
        "e2e": 3.0,
        "time_to_first_token": pytest.approx(0.9),
        "time_in_queue": pytest.approx(0.06),
        "time_in_model_prefill": pytest.approx(0.6),
        "time_in_model_decode": pytest.approx(3 * 0.72),
        "time_in_model_inference": pytest.approx(3 * 0.92),
    }
    phases = (
        "queue",
        "template",
        "prefill",
        "draft_prefill",
        "draft",
        "mask",
        "verify",
        "sample",
        "detokenize",
        "other",
    )
    assert sum(float(str(about[f"agentspec.{phase}_s"])) for phase in phases) == pytest.approx(3.0)


def test_what_is_not_known_is_left_out(collector: Collector) -> None:
    spans = collector.of(recorded.third_party())
    first, last = (span for span in spans if span.name.startswith("chat"))
    assert first.kind == SpanKind.CLIENT
    assert first.attributes is not None
    assert last.attributes is not None
    assert first.attributes["gen_ai.response.time_to_first_chunk"] == 0.25
    assert set(last.attributes) == {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "gen_ai.latency.e2e",
        "agentspec.iteration",
    }
    assert next(span for span in spans if span.parent is None).name == "invoke_agent"


def test_a_cached_answer_has_neither_tokens_nor_latencies(collector: Collector) -> None:
    spans = collector.of(recorded.busy())
    [cached] = [span for span in spans if (span.attributes or {}).get("agentspec.cached")]
    assert not any(key.startswith(("gen_ai.usage", "gen_ai.latency")) for key in cached.attributes or {})


def test_tools_name_the_call_they_answer(collector: Collector) -> None:
    spans = collector.of(recorded.simple())
    [tool] = [span for span in spans if span.name == "execute_tool get_price"]
    assert tool.attributes is not None
    assert tool.attributes["gen_ai.operation.name"] == "execute_tool"
    assert tool.attributes["gen_ai.tool.name"] == "get_price"
    assert tool.attributes["gen_ai.tool.call.id"] == "call-get_price"
    assert tool.status.status_code == StatusCode.UNSET


def test_errors_have_a_type_and_a_status(collector: Collector) -> None:
    spans = collector.of(recorded.busy())
    failed = {span.name: span for span in spans if span.status.status_code == StatusCode.ERROR}
    types = {name: (span.attributes or {})["error.type"] for name, span in failed.items()}
    assert types == {
        "invoke_agent shop": "RuntimeError",
        "chat embedded": "TimeoutError",
        f"execute_tool {recorded.EVIL}": "ValueError",
    }
    assert "the day is over" in (failed["invoke_agent shop"].status.description or "")
    assert "gen_ai.response.model" not in (failed["chat embedded"].attributes or {})
    worded = recorded.run([], 1.0, error="it just failed (badly)")
    collector.exporter.clear()
    [span] = collector.of(worded)
    assert (span.attributes or {})["error.type"] == "_OTHER"


def test_a_span_that_is_current_is_the_parent(collector: Collector) -> None:
    with collector.tracer.start_as_current_span("request") as outer:
        AgentRun(recorded.simple()).to_otel(collector.tracer)
    spans = list(collector.exporter.get_finished_spans())
    assert ("invoke_agent shop", "request") in tree(spans)
    assert {span.context.trace_id for span in spans if span.context} == {outer.get_span_context().trace_id}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    for name in ("opentelemetry", "opentelemetry.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"langchain-agentspec\[otel\]"):
        tell(recorded.simple(), collector.tracer)
