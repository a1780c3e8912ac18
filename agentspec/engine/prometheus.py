"""An engine's metrics in Prometheus' text format 0.0.4, for a scrape endpoint of the user's own.

Example:
    return Response(render(engine.metrics(), {"model": "embedded"}), media_type=CONTENT_TYPE)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentspec.engine.metrics import EngineMetrics
from agentspec.errors import InvalidRequestError
from agentspec.runtime.visible import visible
from agentspec.stats import PHASES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class _Family:
    """A metric: its samples by the value of its own label, where it has one."""

    name: str
    kind: str
    about: str
    label: str | None
    values: Mapping[str, float]


def render(metrics: EngineMetrics, labels: Mapping[str, str] | None = None) -> str:
    """The exposition.

    Args:
        metrics: of ``LocalEngine.metrics()``.
        labels: written on every sample, to tell engines apart (``{"model": "embedded"}``).

    Raises:
        InvalidRequestError: for a label that Prometheus does not allow, or that a metric has itself.
    """
    constant = dict(labels or {})
    families = list(_families(metrics))
    own = {family.label for family in families}
    for name in constant:
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in own:
            taken = ", ".join(sorted(label for label in own if label))
            raise InvalidRequestError(
                f"A label is made of letters, digits and _, does not begin with a digit or __, and is none of {taken}; "
                f"got {name!r}."
            )
    lines = []
    for family in families:
        lines += [f"# HELP {family.name} {_help(family.about)}", f"# TYPE {family.name} {family.kind}"]
        for value_of_label, value in family.values.items():
            of_sample = constant if family.label is None else {**constant, family.label: value_of_label}
            lines.append(f"{family.name}{_braced(of_sample)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _families(metrics: EngineMetrics) -> Iterator[_Family]:
    def counter(name: str, about: str, values: Mapping[str, float] | float, label: str | None = None) -> _Family:
        of_label = values if isinstance(values, Mapping) else {"": values}
        return _Family(f"agentspec_{name}_total", "counter", about, label, of_label)

    def gauge(name: str, about: str, value: float) -> _Family:
        return _Family(f"agentspec_{name}", "gauge", about, None, {"": value})

    seconds = dict(metrics.seconds)
    queue_s = seconds.pop("queue_s", 0.0)
    phases = [phase for phase in (*PHASES, *seconds) if phase in seconds]
    spent = {phase.removesuffix("_s"): seconds[phase] for phase in phases}
    yield counter("requests", "Requests that are over, by outcome.", metrics.requests, "outcome")
    yield counter("samples", "Finished samples, by finish reason.", metrics.samples, "finish_reason")
    yield counter("prompt_tokens", "Tokens of prompts.", metrics.prompt_tokens)
    yield counter("cached_tokens", "Tokens of prompts that the target had computed before.", metrics.cached_tokens)
    yield counter("generated_tokens", "Tokens emitted by rounds.", metrics.generated_tokens)
    yield counter("forced_tokens", "Tokens that a grammar left no choice about.", metrics.forced_tokens)
    yield counter("drafted_tokens", "Tokens drafted, by drafter.", metrics.drafted, "drafter")
    yield counter("accepted_tokens", "Drafted tokens accepted, by drafter.", metrics.accepted, "drafter")
    yield counter("rounds", "Rounds; each is a pass of the target.", metrics.rounds)
    yield counter("round_rows", "Sequences in all rounds together.", metrics.rows)
    yield counter("phase_seconds", "Seconds of the machine, by phase.", spent, "phase")
    yield counter("queue_seconds", "Seconds that sequences waited for a place.", queue_s)
    yield gauge("running_rows", "Sequences that have a place now.", metrics.running)
    yield gauge("waiting_rows", "Sequences that wait for a place now.", metrics.waiting)
    yield gauge("max_running_rows", "Places.", metrics.max_running)
    yield gauge("threads", "Threads that the worker computes with.", metrics.threads)


def _braced(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{_value(value)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _value(text: str) -> str:
    return _help(visible(text, lines=True)).replace('"', r"\"")


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(value) if isinstance(value, float) else str(value)
