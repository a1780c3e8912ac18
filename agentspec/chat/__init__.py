"""Messages and tools to token ids; emitted text to content and tool calls.

Messages and tools are plain dicts in OpenAI's form, a call's arguments being a dict. Nothing here knows LangChain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.dialects import Dialect, Message, detect, to_json
from agentspec.constraints import Grammar
from agentspec.detokenizer import overlap
from agentspec.errors import InvalidRequestError


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made; ``arguments`` is JSON text. Of a call cut short, the text it got to."""

    name: str
    arguments: str
    is_complete: bool = True


class ChatFormat:
    """The way one tokenizer's chats are written.

    Args:
        tokenizer: of transformers, with a chat template.

    Raises:
        InvalidRequestError: for a tokenizer without a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "The tokenizer has no chat template, so messages cannot be rendered; load a chat or instruct model."
            )
        self._tokenizer = tokenizer
        self.dialect: Dialect = detect(str(tokenizer.chat_template))

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The prompt ids of a conversation, up to where the assistant answers.

        Raises:
            InvalidRequestError: where there is nothing to answer, or the template refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("The conversation is empty; expected at least one message.")
        known = self.dialect.template_knows_tools
        written = list(messages) if known else self.dialect.plain_messages(messages, tools)
        try:
            text = self._tokenizer.apply_chat_template(
                written, tools=list(tools) or None if known else None, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever their authors chose
            raise InvalidRequestError(f"The model's chat template refused the messages: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def answer_grammar(
        self, tools: Sequence[dict[str, Any]], *, required: bool = False, final: dict[str, Any] | None = None
    ) -> Grammar | None:
        """The language of an assistant's answers; None where it is free text.

        Args:
            tools: that may be called.
            required: whether one must be.
            final: JSON Schema of an answer that is no call; None for free text, which turns into a call where the
                opener is written: from there on only a valid call is legal.
        """
        if not tools:
            return None if final is None else Grammar.json_schema(final)
        opener, closer = to_json(self.dialect.opener), to_json(self.dialect.closer)
        names = [f"tool_{index}" for index in range(len(tools))]
        call = f"{opener} call"
        if required:
            start = f"start: {call}"
        elif final is not None:
            start = f"start: {call} | %json {_in_our_form(final)}"
        else:
            start = f"start: TEXT | opened call\nopened[lazy]: TEXT {opener}\nTEXT: /(.|\\n)*/"
        rules = [
            f"{name}: {to_json(self.dialect.opening(tool['function']['name']))} %json {_in_our_form(_arguments(tool))}"
            for name, tool in zip(names, tools, strict=True)
        ]
        return Grammar.lark("\n".join([start, f"call: ({' | '.join(names)}) {closer}", *rules]) + "\n")


def _in_our_form(schema: dict[str, Any]) -> str:
    """A JSON Schema for a Lark grammar of llguidance, its instances written with our separators."""
    form = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return to_json({**schema, "x-guidance": form})


def _arguments(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of its arguments.

    A model has nothing to put into parameters that are not there, so the object is closed where the schema leaves
    it open: every value of the closed schema is one of the open schema too.
    """
    schema: dict[str, Any] = {"type": "object", **(tool["function"].get("parameters") or {})}
    if schema.keys() & {"anyOf", "allOf", "oneOf", "$ref", "patternProperties", "additionalProperties"}:
        return schema
    return {**schema, "additionalProperties": False}


class AnswerParser:
    """Takes an answer apart while it is written. Only for answers under an ``answer_grammar`` with tools.

    Args:
        dialect: the form of calls.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._text = ""
        self._shown = 0
        self._call_at: int | None = None

    def push(self, text: str) -> str:
        """Take more text; the free text that is new and surely not part of a call."""
        self._text += text
        opener = self._dialect.opener
        if self._call_at is None:
            at = self._text.find(opener, self._shown)
            self._call_at = at if at >= 0 else None
        return self._show(len(self._text) - overlap(self._text, opener) if self._call_at is None else self._call_at)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the free text, and the calls."""
        if self._call_at is None:
            return self._show(len(self._text)), []
        return "", [self._call(self._text[self._call_at :])]

    def _show(self, end: int) -> str:
        piece, self._shown = self._text[self._shown : end], max(end, self._shown)
        return piece

    def _call(self, text: str) -> ToolCall:
        head, tail = self._dialect.opening("\0").split(to_json("\0"))
        written = text[len(self._dialect.opener) :]
        name, _, arguments = written.removeprefix(head).partition(tail)
        if not text.endswith(self._dialect.closer):
            return ToolCall(_json_text(name), text, is_complete=False)
        return ToolCall(_json_text(name), arguments.removesuffix(self._dialect.closer))


def _json_text(text: str) -> str:
    """The string that a piece of JSON writes; the piece itself where it was cut short."""
    try:
        return str(json.loads(text))
    except json.JSONDecodeError:
        return text
