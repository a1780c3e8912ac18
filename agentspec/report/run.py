"""``AgentRun``: an agent run in a user's hands, over its record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentspec.report.files import append, read
from agentspec.report.gain import measured_gain
from agentspec.report.recorder import Recorder
from agentspec.report.schema import Gain, Iteration, ModelCall, RunRecord, ToolCall

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


class AgentRun:
    """A run, as it goes on or as it was read back.

    Args:
        source: what records the run, or the finished record of one.
    """

    def __init__(self, source: Recorder | RunRecord) -> None:
        self._source = source
        self._finished = source if isinstance(source, RunRecord) else None
        self._baseline: AgentRun | None = None

    @property
    def record(self) -> RunRecord:
        """The run by the schema ``agentspec.run/1``, on which every view is based."""
        if self._finished is None and isinstance(self._source, Recorder):
            record = self._source.record()
            if not self._source.is_closed:
                return record
            self._finished = record
        if self._finished is None:
            raise TypeError(f"A run is made of a Recorder or a RunRecord, got {self._source!r}.")
        return self._finished

    @property
    def name(self) -> str | None:
        """Name of the run."""
        return self._source.name

    @property
    def total_s(self) -> float:
        """Wall time, in seconds."""
        return self.record.total_s

    @property
    def model_s(self) -> float:
        """Seconds in which a model of the agent itself was at work."""
        return self.record.model_s

    @property
    def tool_s(self) -> float:
        """Seconds in which a tool, but no model of the agent itself, was at work."""
        return self.record.tool_s

    @property
    def framework_s(self) -> float:
        """The other seconds: graph, messages, callbacks, the program itself."""
        return self.record.framework_s

    @property
    def iterations(self) -> list[Iteration]:
        """The turns of the tool loop."""
        return self.record.iterations

    @property
    def model_calls(self) -> list[ModelCall]:
        """All model calls, those of agents within tools too."""
        return self.record.model_calls

    @property
    def tool_calls(self) -> list[ToolCall]:
        """All tool calls, those of agents within tools too."""
        return self.record.tool_calls

    @property
    def gain(self) -> Gain | None:
        """Whether speculation was worth it: estimated, or measured after ``compare_to``; None without known steps."""
        return self.record.gain

    def compare_to(self, baseline: AgentRun) -> Gain | None:
        """Measure the gain over the same run without speculation (``gamma=0``); keep it in the record.

        None where either run tells of no step.
        """
        gain = measured_gain(self.record, baseline.record)
        if gain is not None:
            self._finished = self.record.model_copy(update={"gain": gain})
        return gain

    def to_dict(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        return self.record.model_dump(mode="json")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the run that ``to_dict`` gave.

        Raises:
            pydantic.ValidationError: for what is no run of this version of the schema; it is a ``ValueError``.
        """
        return cls(RunRecord.model_validate(values))

    def append_to(self, path: Path | str) -> None:
        """Write the run at the end of a file of runs, a line of JSON each; ``read_runs`` reads them back."""
        append(self.record, Path(path))

    def print(self) -> None:
        """Show the run on the terminal."""
        from agentspec.report.views.terminal import show  # rich is slow to import

        show(self.record)

    def to_html(self, path: Path | str) -> None:
        """Write the run as a page that needs nothing but itself.

        Raises:
            OSError: for a path that cannot be written.
        """
        from agentspec.report.views.html import write

        write(self.record, Path(path))

    def to_chrome_trace(self, path: Path | str) -> None:
        """Write the run as a trace that Perfetto and chrome://tracing open.

        Raises:
            OSError: for a path that cannot be written.
        """
        from agentspec.report.views.trace import write

        write(self.record, Path(path))

    def to_otel(self, tracer: Tracer) -> None:
        """Tell an OpenTelemetry tracer of the run, as spans of the GenAI conventions; needs the extra ``otel``.

        A span that is current here becomes the parent of them all.

        Raises:
            ModuleNotFoundError: without the package ``opentelemetry-api``.
        """
        from agentspec.report.views.otel import tell

        tell(self.record, tracer)

    def _repr_html_(self) -> str:
        """Return the run as a notebook shows it."""
        from agentspec.report.views.html import fragment

        return fragment(self.record)


def read_runs(path: Path | str) -> tuple[list[AgentRun], list[str]]:
    """Read the runs in a file, and what is wrong with its other lines, each by its number.

    What can be read is read: a line that was cut off, of another version of the schema or no JSON at all is named and
    left out. Empty lines are nothing.

    Raises:
        OSError: for a file that cannot be opened.
    """
    records, problems = read(Path(path))
    return [AgentRun(record) for record in records], problems
