"""Common parts of ``verify`` and ``bench``: an engine by name, and tasks for it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from agentspec.chat import ChatFormat
from agentspec.engine.local import LocalEngine
from agentspec.engine.registry import EMBEDDED, PairSpec, load_engine
from agentspec.engine.request import Request
from agentspec.grammars.grammar import Grammar
from agentspec.sampling import SamplingParams

_LIST = "lamp 40, desk 120, chair 75, shelf 60, sofa 900, stool 35, mirror 80, carpet 150"


@dataclass(frozen=True)
class Task:
    """A text to request.

    Args:
        name: shown in tables.
        question: message of the user.
        grammar: of the answer; None for any text.
    """

    name: str
    question: str
    grammar: Grammar | None = None

    def request(self, engine: LocalEngine, params: SamplingParams) -> Request:
        """Return the request, in the chat format of the engine's model."""
        tokenizer = engine.tokenizer
        if getattr(tokenizer, "chat_template", None):
            prompt = ChatFormat(tokenizer).render([{"role": "user", "content": self.question}])
        else:
            prompt = tokenizer.encode(self.question)
        return Request(prompt, params, grammar=self.grammar)


TASKS = (
    Task("prose", "Why is the sky blue? Explain it to a child."),
    Task("copying", f"Repeat this list, word for word, twice: {_LIST}."),
    Task(
        "JSON",
        f"Which of these costs most? {_LIST}.",
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {
                    "most_expensive_item": {"enum": [entry.split()[0] for entry in _LIST.split(", ")]},
                    "price_in_dollars": {"type": "integer"},
                },
                "required": ["most_expensive_item", "price_in_dollars"],
                "additionalProperties": False,
            }
        ),
    ),
)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that choose an engine."""
    parser.add_argument("--model", default=EMBEDDED, help="target: 'embedded', a directory, or a hub name")
    parser.add_argument("--draft", help="draft model, named likewise; without one, look-up alone drafts")
    parser.add_argument("--device", help="'cpu' or 'cuda'; CUDA where there is one")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; float32 on the CPU, bfloat16 elsewhere")


def make_engine(arguments: argparse.Namespace) -> LocalEngine:
    """Load the engine that the arguments choose.

    Raises:
        ModelLoadError: for a model that cannot be loaded.
        IncompatiblePairError: for a draft with too few tokens in common with the target.
    """
    return load_engine(PairSpec(arguments.model, arguments.draft, arguments.device, arguments.dtype))


def at_least_one(text: str) -> int:
    """Parse a count of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value
