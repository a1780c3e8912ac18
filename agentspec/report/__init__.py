"""An agent run as data: which model and tool calls it made, and where its wall time went.

A tracker (in the integrations) tells a ``Recorder`` what begins and ends; ``fold`` makes a ``RunRecord`` of it, whose
seconds each belong to a model, to tools, or to the framework around them; ``AgentRun`` is the run in a user's hands.
"""

from agentspec.report.recorder import Recorder
from agentspec.report.run import AgentRun, read_runs
from agentspec.report.schema import SCHEMA, Gain, Iteration, ModelCall, Phases, RunRecord, Step, ToolCall

__all__ = [
    "SCHEMA",
    "AgentRun",
    "Gain",
    "Iteration",
    "ModelCall",
    "Phases",
    "Recorder",
    "RunRecord",
    "Step",
    "ToolCall",
    "read_runs",
]
