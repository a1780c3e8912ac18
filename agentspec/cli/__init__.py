"""The command line: ``agentspec demo | bench | report | verify | doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from agentspec.errors import AgentSpecError
from agentspec.runtime.visible import visible

COMMANDS = {
    "demo": "run an agent with tools on the embedded model, and show where its time went",
    "report": "percentiles over files of runs, and one file against another",
    "verify": "check that speculation is exact on a model, on this machine",
    "bench": "time a model with speculation on and off",
    "doctor": "show what this installation can do, and what to do about the rest",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    Args:
        arguments: of the command line; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="agentspec", description="Exact speculative decoding for LangChain agents.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, about in COMMANDS.items():
        module = import_module(f"agentspec.cli.{name}")
        command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        module.add(command)
        command.set_defaults(execute=module.run)
    parsed = parser.parse_args(arguments)
    try:
        status: int = parsed.execute(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (AgentSpecError, OSError) as error:
        print(f"agentspec {parsed.command}: {visible(_describe(error), lines=True)}", file=sys.stderr)
        return 2


def _describe(error: AgentSpecError | OSError) -> str:
    """Describe an error; for a file, by its name and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
