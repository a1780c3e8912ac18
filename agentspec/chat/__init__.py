"""Messages and tools to token ids; emitted text to content and tool calls.

Messages and tools are plain dicts in OpenAI's form, a call's arguments being a dict. Nothing here knows LangChain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.dialects import Dialect, Message, detect
from agentspec.detokenizer import overlap
from agentspec.errors import InvalidRequestError
from agentspec.grammar import CallForm, Grammar, closed, to_json


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
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool = False,
        parallel: int = 1,
        final: dict[str, Any] | None = None,
    ) -> Grammar | None:
        """The language of an assistant's answers; None where it is free text.

        Args:
            tools: that may be called.
            required: whether one must be.
            parallel: the most calls in one answer.
            final: JSON Schema of an answer that is no call; None for free text, which turns into a call where the
                opener is written: from there on only a valid call is legal.
        """
        if tools:
            return Grammar.tools(tools, required=required, parallel=parallel, final=final, form=self.dialect.form)
        return None if final is None else Grammar.json_schema(closed(final))


class AnswerParser:
    """Takes an answer apart while it is written. Only for answers under an ``answer_grammar`` with tools.

    Args:
        form: of calls.
        begins_with_call: whether a call can only be the whole answer; elsewhere an opener is text (a string in JSON).
    """

    def __init__(self, form: CallForm, *, begins_with_call: bool = False) -> None:
        self._form = form
        self._begins_with_call = begins_with_call
        self._text = ""
        self._shown = 0
        self._call_at: int | None = None

    def push(self, text: str) -> str:
        """Take more text; the free text that is new and surely not part of a call."""
        self._text += text
        opener, end = self._form.opener, len(self._text)
        if self._call_at is None:
            at = self._text.find(opener, self._shown)
            is_call = at == 0 or (at > 0 and not self._begins_with_call)
            self._call_at = at if is_call else None
        if self._call_at is not None:
            return self._show(self._call_at)
        may_open = self._shown == 0 if self._begins_with_call else True
        return self._show(end - overlap(self._text, opener) if may_open else end)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest of the free text, and the calls."""
        if self._call_at is None:
            return self._show(len(self._text)), []
        calls, at = [], self._call_at
        while at < len(self._text):
            call, at = self._call(at)
            calls.append(call)
        return "", calls

    def _show(self, end: int) -> str:
        piece, self._shown = self._text[self._shown : end], max(end, self._shown)
        return piece

    def _call(self, at: int) -> tuple[ToolCall, int]:
        """The call that begins at ``at``, and where the next one would."""
        form, text = self._form, self._text
        head, tail = form.opening("\0").split(to_json("\0"))
        name_at = at + len(form.opener) + len(head)
        name, end = _value(text, name_at)
        start = end + len(tail)
        _, end = _value(text, start)
        after = end + len(form.closer)
        if text[end:after] != form.closer:
            return ToolCall(name if isinstance(name, str) else "", text[at:], is_complete=False), len(text)
        next_at = after + len(form.between) if text.startswith(form.between, after) else len(text)
        return ToolCall(str(name), text[start:end]), next_at


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends; None and the end of the text where it is cut short."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError:
        return None, len(text)
