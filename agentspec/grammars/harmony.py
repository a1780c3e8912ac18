"""Harmony, the format of gpt-oss: messages in channels, for reasoning, preambles, calls and the final answer.

The prompt ends with ``<|start|>assistant``. A message is a header, ``<|message|>`` and a body. The header names a
channel: ``<|channel|>analysis`` for reasoning, ``commentary`` for preambles and calls, ``final`` for the answer. For a
call it names a recipient, before the channel or after it (`` to=functions.NAME``), and perhaps the type of the body
(``<|constrain|>json``). ``<|end|>`` ends a message that is not the last. The end tokens are ``<|return|>`` and, after
a call, ``<|call|>``.

Source: "OpenAI harmony response format", in the documentation of the package openai-harmony.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.grammars.schema_tools import closed, in_json_form
from agentspec.grammars.tool_calls import ANY_TEXT, ReasoningFormat, Rules, ToolCallFormat, lark

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
NEXT = START + "assistant"
"""Precedes every message of an answer but the first: the prompt ends with it."""

TYPES = (" <|constrain|>json", "<|constrain|>json", " json", " code")
"""How models write the type of a call's body."""

_MOST = 16  # messages before the last: a bound, so that no model writes empty ones without end

THOUGHT = ReasoningFormat(opener=f"{CHANNEL}analysis{MESSAGE}", end=END, gap=NEXT, closing=END)


@dataclass(frozen=True)
class HarmonyFormat(ToolCallFormat):
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
        """All text that the format writes around names and arguments."""
        return super().marks + START + END + "".join(TYPES)

    def answer_grammar(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool,
        parallel: int,
        final: dict[str, Any] | bool | None,
        thought: ReasoningFormat | None,
        is_budgeted: bool = False,
    ) -> str:
        """Return the Lark grammar of an answer: reasoning and preambles, then the final message or a call."""
        spoken = "TEXT" if final is None else f"%json {in_json_form(closed(final))}"
        rules: Rules = {
            "TEXT": ANY_TEXT,
            **self.up_to("body", END),
            "next": self.literal(NEXT),
            "type": " | ".join(map(self.literal, TYPES)),
            "thought": f"{self.literal(THOUGHT.opener)} body next",
            "preamble": f"{self.literal(f'{CHANNEL}commentary{MESSAGE}')} body next",
            "final": f"{self.literal(f'{CHANNEL}final')} type? {self.literal(MESSAGE)} {spoken}",
            **self.tool_rules(tools),
        }
        begun = "" if thought is None or thought.opener else "body next "
        steps = f"(thought | preamble){{0,{_MOST}}}" if thought else f"preamble{{0,{_MOST}}}"
        if is_budgeted:  # a budget is of one message of reasoning
            steps = "preamble?" if begun else "thought? preamble?"
        ends = [*(["call"] if tools else []), *([] if tools and required else ["final"])]
        return lark({**rules, "start": f"{begun}{steps} ({' | '.join(ends)})"})

    def call_rule(self, name: str, arguments: str) -> str:
        """Return a call of a tool as Lark terms; models write its recipient before the channel or after it."""
        to = f" to=functions.{name}"
        headers = [f"{to}{CHANNEL}commentary", f"{CHANNEL}commentary{to}", f"{CHANNEL}analysis{to}"]
        return f"({' | '.join(map(self.literal, headers))}) type? {self.literal(MESSAGE)} {arguments}"


HARMONY = HarmonyFormat()
