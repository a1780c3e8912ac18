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

    def tool_grammar(self, tools: Sequence[dict[str, Any]], *, required: bool) -> Grammar:
        """The language of answers that may (or, if ``required``, must) be a call of one of the tools.

        Free text turns into a call where the opener is written; from there on only a valid call is legal.
        """
        dialect = self.dialect
        calls = " | ".join(f"tool_{i}" for i in range(len(tools)))
        rules = [
            f"tool_{i}: {to_json(dialect.opening(tool['function']['name']))} %json {to_json(_arguments_schema(tool))}"
            for i, tool in enumerate(tools)
        ]
        opener = to_json(dialect.opener)
        start = f"start: {opener} call" if required else f"start: TEXT | opener call\nopener[lazy]: TEXT {opener}"
        text = [] if required else ["TEXT: /(.|\\n)*/"]
        return Grammar.lark("\n".join([start, f"call: ({calls}) {to_json(dialect.closer)}", *rules, *text]) + "\n")


def _arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of its arguments, written with our separators.

    A model has nothing to put into parameters that are not there, so the object is closed where the schema leaves
    it open: every value of the closed schema is one of the open schema too.
    """
    schema: dict[str, Any] = dict(tool["function"].get("parameters") or {})
    schema.setdefault("type", "object")
    if not schema.keys() & {"anyOf", "allOf", "oneOf", "$ref", "patternProperties"}:
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
    return schema


class AnswerParser:
    """Takes an answer apart while it is written. Only for answers under a ``tool_grammar``.

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
