"""Harmony, in which gpt-oss answers: messages in channels, for thoughts, preambles, calls and the final answer.

The prompt ends with ``<|start|>assistant``. A message is a header, ``<|message|>`` and a body. The header names a
channel: ``<|channel|>analysis`` for thoughts, ``commentary`` for preambles and calls, ``final`` for the answer. For a
call it names a recipient, before the channel or after it (`` to=functions.NAME``), and perhaps the type of the body
(``<|constrain|>json``). ``<|end|>`` ends a message that is not the last. The end tokens are ``<|return|>`` and, after
a call, ``<|call|>``.

Source: "OpenAI harmony response format", in the documentation of the package openai-harmony.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.grammars.schema_tools import arguments_schema, closed, in_json_form
from agentspec.grammars.tool_calls import ANY_TEXT, ReasoningFormat, ToolCallFormat, up_to

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
NEXT = START + "assistant"
"""Stands before every message of an answer but the first, whose prompt ends with it."""

TYPES = (" <|constrain|>json", "<|constrain|>json", " json", " code")
"""How models write the type of a call's body."""

_MOST = 16  # thoughts and preambles of an answer, so that no model writes empty ones for ever

THOUGHT = ReasoningFormat(opener=f"{CHANNEL}analysis{MESSAGE}", end=END, gap=NEXT, closing=END)


@dataclass(frozen=True)
class HarmonyForm(ToolCallFormat):
    """Calls as chat templates of gpt-oss render them; an answer holds one at most, as its last message."""

    opener: str = " to=functions."
    before_arguments: str = f"{{raw_name}}{CHANNEL}commentary json{MESSAGE}"
    closer: str = ""
    between: str | None = None
    after_text: str = ""
    loose_key: str | None = None

    @property
    def opens_anywhere(self) -> bool:
        """Whether calls may follow free text: not inside a message."""
        return False

    @property
    def marks(self) -> str:
        """Everything that this form writes around names and arguments."""
        return super().marks + START + END + "".join(TYPES)

    def answers(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool,
        parallel: int,
        final: dict[str, Any] | bool | None,
        thought: ReasoningFormat | None,
        is_budgeted: bool = False,
    ) -> str:
        """Return the Lark grammar of an answer: thoughts and preambles, then the final message or a call."""
        mark = f"type? {self.literal(MESSAGE)}"
        spoken = "TEXT" if final is None else f"%json {in_json_form(closed(final))}"
        rules = {
            "TEXT": ANY_TEXT,
            **up_to("body", END, self),
            "next": self.literal(NEXT),
            "type": " | ".join(map(self.literal, TYPES)),
            "thought": f"{self.literal(THOUGHT.opener)} body next",
            "preamble": f"{self.literal(f'{CHANNEL}commentary{MESSAGE}')} body next",
            "final": f"{self.literal(f'{CHANNEL}final')} {mark} {spoken}",
            **self._calls(tools),
        }
        begun = "" if thought is None or thought.opener else "body next "
        steps = f"(thought | preamble){{0,{_MOST}}}" if thought else f"preamble{{0,{_MOST}}}"
        if is_budgeted:  # of one thought
            steps = "preamble?" if begun else "thought? preamble?"
        ends = [*(["call"] if tools else []), *([] if tools and required else ["final"])]
        rules["start"] = f"{begun}{steps} ({' | '.join(ends)})"
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _calls(self, tools: Sequence[dict[str, Any]]) -> dict[str, str]:
        rules = {}
        for index, tool in enumerate(tools):
            name = tool["function"]["name"]
            self.check_name(name)
            to = f" to=functions.{name}"
            headers = [f"{to}{CHANNEL}commentary", f"{CHANNEL}commentary{to}", f"{CHANNEL}analysis{to}"]
            rules[f"header_{index}"] = " | ".join(map(self.literal, headers))
            rules[f"args_{index}"] = f"%json {in_json_form(arguments_schema(tool))}"
            rules[f"tool_{index}"] = f"header_{index} type? {self.literal(MESSAGE)} args_{index}"
        return rules | ({"call": " | ".join(f"tool_{index}" for index in range(len(tools)))} if tools else {})


HARMONY = HarmonyForm()
