"""What a run is doing right now, on the terminal: its last line tells of the calls that go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from agentspec.report.fold import Call
from agentspec.report.recorder import Recorder
from agentspec.runtime.visible import visible

REFRESHES_PER_SECOND = 4


@contextmanager
def following(recorder: Recorder, console: Console | None = None) -> Iterator[None]:
    """Show what the run is doing while the block runs; nothing where there is no terminal. What is shown disappears."""
    console = console or Console()
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    with Live(
        get_renderable=lambda: now(recorder), console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND
    ):
        yield


def now(recorder: Recorder) -> Group:
    """Return a line for the run, and one for every model and tool that is at work."""
    seconds, calls = recorder.now()
    models = [call for call in calls if call.kind == "model"]
    running = [call for call in calls if call.ended is None and call.kind != "chain"]
    head = f"{visible(recorder.name or 'agent run')}: {seconds:.1f} s, {len(models)} model calls"
    return Group(Text(head), *(Text("  " + line) for line in map(_line, running, [recorder.clock()] * len(running))))


def _line(call: Call, clock: float) -> str:
    seconds = clock - call.started
    if call.kind == "tool":
        return f"{visible(call.name)}() {seconds:.1f} s"
    parts = [f"{visible(call.name)} {seconds:.1f} s"]
    if call.first_token is not None and call.tokens:
        parts.append(f"{call.tokens} tokens")
        if clock > call.first_token:
            parts.append(f"{call.tokens / (clock - call.first_token):.1f} tokens/s")
    if call.acceptance_rate is not None:
        parts.append(f"{call.acceptance_rate:.0%} accepted")
    return ", ".join(parts)
