"""``agentspec demo``: run an agent with three tools on the embedded model, and show where its time went."""

from __future__ import annotations

import argparse

from agentspec.errors import InvalidRequestError


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--repeats", type=int, default=0, help="further runs, on and off, for the ratio")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 if speculation changed a text.

    Raises:
        InvalidRequestError: without the package ``langchain``, whose agents the demo runs.
        ModelLoadError: if the embedded model can be neither found nor fetched.
    """
    try:
        from langchain_agentspec import demo
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "langchain":
            raise
        raise InvalidRequestError(
            "The demo runs an agent of the package langchain, which is missing: "
            "pip install 'langchain-agentspec[examples]'."
        ) from error
    return 0 if demo.play(arguments.repeats) else 1
