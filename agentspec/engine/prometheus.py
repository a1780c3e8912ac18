"""An engine's metrics for Prometheus; needs the extra ``prometheus``.

Example:
    REGISTRY.register(EngineCollector(engine.metrics, {"model": "embedded"}))  # beside the metrics of a service
    return Response(render(engine.metrics()), media_type=CONTENT_TYPE)  # or by an endpoint of its own
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from agentspec.engine.metrics import EngineMetrics
from agentspec.errors import InvalidRequestError
from agentspec.runtime.visible import visible
from agentspec.stats import PHASES

try:
    from prometheus_client import generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "Metrics for Prometheus need the package prometheus-client: pip install 'langchain-agentspec[prometheus]'."
    ) from error

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OWN_LABELS = ("drafter", "finish_reason", "outcome", "phase")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def render(metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> str:
    """Render metrics in Prometheus' text format 0.0.4.

    Args:
        metrics: of ``LocalEngine.metrics()``.
        labels: written on every sample, to distinguish engines (``{"model": "embedded"}``).

    Raises:
        InvalidRequestError: for a label that Prometheus does not allow, or that a metric has itself.
    """
    return generate_latest(EngineCollector(lambda: metrics, labels)).decode()


class EngineCollector(Collector):
    """Metrics of an engine, for a registry of prometheus_client: read anew at every scrape.

    Args:
        read: returns the metrics, as ``LocalEngine.metrics`` does.
        labels: as for ``render``.

    Raises:
        InvalidRequestError: as ``render``.
    """

    def __init__(self, read: Callable[[], EngineMetrics], labels: Mapping[str, str] | None = None) -> None:
        self._read = read
        self._labels = {name: visible(value, lines=True) for name, value in (labels or {}).items()}
        for name in self._labels:
            if not _LABEL.fullmatch(name) or name.startswith("__") or name in _OWN_LABELS:
                raise InvalidRequestError(
                    "A label is made of letters, digits and _, does not begin with a digit or __, and is none of "
                    f"{', '.join(_OWN_LABELS)}; got {name!r}."
                )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        now = self._read()
        seconds = dict(now.seconds)
        queue_s = seconds.pop("queue_s", 0.0)
        phases = {phase.removesuffix("_s"): seconds[phase] for phase in (*PHASES, *seconds) if phase in seconds}
        counter, gauge = self._counter, self._gauge
        yield counter("requests", "Requests that are over, by outcome.", now.requests, "outcome")
        yield counter("samples", "Finished samples, by finish reason.", now.samples, "finish_reason")
        yield counter("prompt_tokens", "Tokens of prompts.", now.prompt_tokens)
        yield counter("cached_tokens", "Tokens of prompts that the target had computed before.", now.cached_tokens)
        yield counter("generated_tokens", "Tokens emitted by rounds.", now.generated_tokens)
        yield counter("forced_tokens", "Tokens without an alternative in the grammar.", now.forced_tokens)
        yield counter("drafted_tokens", "Tokens drafted, by drafter.", now.drafted, "drafter")
        yield counter("accepted_tokens", "Drafted tokens accepted, by drafter.", now.accepted, "drafter")
        yield counter("rounds", "Rounds; each is a pass of the target.", now.rounds)
        yield counter("round_rows", "Sequences in all rounds together.", now.rows)
        yield counter("phase_seconds", "Seconds of the machine, by phase.", phases, "phase")
        yield counter("queue_seconds", "Seconds that sequences waited for a batch slot.", queue_s)
        yield gauge("running_rows", "Sequences that have a batch slot now.", now.running)
        yield gauge("waiting_rows", "Sequences that wait for a batch slot now.", now.waiting)
        yield gauge("max_running_rows", "Batch slots.", now.max_running)
        yield gauge("threads", "Threads that the worker computes with.", now.threads)

    def _counter(
        self, name: str, about: str, values: Mapping[str, float] | float, label: str | None = None
    ) -> CounterMetricFamily:
        """Return a counter with a sample per value of ``label``, or with a single one without a label."""
        own = [] if label is None else [label]
        family = CounterMetricFamily(f"agentspec_{name}", about, labels=[*self._labels, *own])
        for value_of_label, value in (values if isinstance(values, Mapping) else {"": values}).items():
            of_label = [] if label is None else [visible(value_of_label, lines=True)]
            family.add_metric([*self._labels.values(), *of_label], value)
        return family

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"agentspec_{name}", about, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
