"""`ChatFormat`: a tokenizer's chat template, with the dialect of its tool calls and reasoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from agentspec.chat.answer_parser import AnswerParser
from agentspec.chat.call_checks import (
    CheckingParser,
    check_expressible,
    checked_tools,
    expressible_tools,
)
from agentspec.chat.control_tokens import THOUGHT_MARKS, Foreign, Rendered, control_tokens
from agentspec.chat.dialects import Dialect, arrangements, detect_dialect, find_dialect
from agentspec.chat.parser import Message, Parser
from agentspec.chat.template_parser import TemplateParser
from agentspec.errors import InvalidRequestError
from agentspec.grammars.grammar import Grammar
from agentspec.grammars.schema_tools import checked, closed
from agentspec.grammars.tool_calls import ReasoningFormat, ToolCallFormat

TAIL = 16
"""Tokens at the end of a prompt that tell whether it has begun a thought."""


class ChatFormat:
    """The way one tokenizer's chats are written.

    Args:
        tokenizer: of transformers, with a chat template.
        dialect: a name of ``DIALECTS``; None finds it out from the template.
        special_tokens_in_content: whether a control token that messages or tools spell becomes that token, as chat
            templates do by themselves. By default it stays text: no message can begin a turn.

    Raises:
        InvalidRequestError: for a tokenizer without a chat template, or a dialect that it does not speak.
    """

    def __init__(self, tokenizer: Any, dialect: str | None = None, *, special_tokens_in_content: bool = False) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidRequestError(
                "The tokenizer has no chat template, so messages cannot be rendered; load a chat or instruct model."
            )
        self._tokenizer = tokenizer
        self._template = str(tokenizer.get_chat_template(tools=[]))
        self.dialect: Dialect = (
            detect_dialect(self._template) if dialect is None else find_dialect(dialect, self._template)
        )
        self.form: ToolCallFormat = _with_ids(self.dialect, tokenizer)
        written = f"{self._template}\n{_marks(self.dialect)}"
        self._control = None if special_tokens_in_content else control_tokens(tokenizer, written)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The ids that end an answer, beside those that tokenizer and checkpoint name."""
        known = self._tokenizer.get_vocab()
        return tuple(known[mark] for mark in self.dialect.ends if mark in known)

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the text of answers must hold special tokens, for calls are marked by them."""
        return bool(self.form.special) or self._ships_a_parser

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), **settings: Any) -> list[int]:
        """Return the prompt ids of a conversation, up to where the assistant answers.

        A message of the assistant may carry ``token_ids``, those in which it was emitted (``own_ids``): they go into
        the prompt as they are, where the template renders the message as it was emitted.

        Args:
            messages: of the conversation.
            tools: that the template shows to the model.
            settings: for the template (``enable_thinking=False``, say).

        Raises:
            InvalidRequestError: where there is nothing to answer, or the template refuses the messages.
        """
        if not messages:
            raise InvalidRequestError("The conversation is empty; expected at least one message.")
        text = self._text(messages, tools, settings)
        emitted = [message["token_ids"] for message in messages if message.get("token_ids")]
        if not emitted:
            return self._ids(text)
        opening = text.text.removeprefix(self._text(messages, tools, {**settings, "add_generation_prompt": False}).text)
        prompt: list[int] = []
        at = 0
        for ids in emitted:
            answer = self._tokenizer.decode(ids) if opening and self._are_ids(ids) else ""
            begin = _find(text, opening, answer, at) if answer else None
            if begin is not None:
                prompt += [*self._ids(text.part(at, begin)), *ids]
                at = begin + len(answer)
        return prompt + self._ids(text.part(at))

    def own_ids(self, text: str, tokens: Sequence[int], content: str = "") -> list[int] | None:
        """Return the ids that a text was emitted in, where its encoding differs; without the end token after it.

        A model may cut a text into tokens in its own way. With its ids in the history the next turn reads what was
        emitted, and finds all of it in the cache.

        Args:
            text: of the answer.
            tokens: in which it was emitted.
            content: the part of it that the next turn renders as text, not as calls.
        """
        spells = self._control is not None and self._control.occur_in(content, but=THOUGHT_MARKS)
        for ids in (list(tokens), list(tokens[:-1])):
            if self._tokenizer.decode(ids) == text:
                return None if not spells and self._ids(Rendered(text)) == ids else ids
        return None

    def _are_ids(self, ids: Any) -> bool:
        """Whether what a kept message holds are ids of this tokenizer."""
        size = len(self._tokenizer)
        return isinstance(ids, list | tuple) and all(isinstance(i, int) and 0 <= i < size for i in ids)

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Rendered:
        foreign = Foreign(self._control, [messages, tools, settings])  # documents, say, are settings
        hidden_tools = foreign.hidden(tools)
        refusal: Exception | None = None
        for arranged in arrangements(self.dialect.messages(foreign.hidden(messages), hidden_tools)):
            try:
                text: str = self._tokenizer.apply_chat_template(
                    arranged,
                    tools=hidden_tools if tools and self.dialect.marks else None,
                    tokenize=False,
                    **{"add_generation_prompt": True, **foreign.hidden(settings)},
                )
            except Exception as error:  # templates raise whatever their authors chose
                refusal = refusal or error
            else:
                return foreign.shown(text)
        why = foreign.shown(str(refusal)).text
        raise InvalidRequestError(f"The model's chat template refused the messages: {why}") from refusal

    def _ids(self, text: Rendered) -> list[int]:
        if text.guarded and self._control is not None:
            return self._control.encode(text)
        ids: list[int] = self._tokenizer.encode(text.text, add_special_tokens=False)
        return ids

    def thought(self, prompt: Sequence[int]) -> ReasoningFormat | None:
        """Return how the answer to a rendered prompt may begin; None where the model does not think."""
        return self.dialect.thought(self._template, self._tokenizer.decode(list(prompt[-TAIL:])))

    def answer_grammar(
        self,
        tools: Sequence[dict[str, Any]],
        *,
        required: bool = False,
        parallel: int = 1,
        final: dict[str, Any] | None = None,
        thought: ReasoningFormat | None = None,
        thinking_budget: int | None = None,
    ) -> Grammar | None:
        """Return the language of an assistant's answers; None where it is free text.

        Args:
            tools: that may be called.
            required: whether one must be.
            parallel: the most calls in one answer, where the dialect has several.
            final: JSON Schema of an answer that is no call; None for free text, which turns into a call where the
                opener is written, or where it begins with a call in another spelling: from there on only a valid call
                is legal.
            thought: that goes before the answer.
            thinking_budget: the most tokens of it; None for no limit.

        Raises:
            InvalidRequestError: for a budget where the model does not think.
            GrammarError: for a tool whose name the dialect cannot write.
        """
        if thinking_budget is not None and thought is None:
            raise InvalidRequestError(
                "thinking_budget limits the thoughts of a reasoning model; this one's chat template has none here."
            )
        if thought is None and not tools:
            return None if final is None else Grammar.json_schema(closed(checked(final)))
        if not tools and final is None and thinking_budget is None:
            return None
        if final is not None:
            check_expressible(final)
        return Grammar.tools(
            expressible_tools(tools),
            required=required,
            parallel=parallel,
            final=final,
            form=self.form,
            thought=thought,
            thinking_budget=thinking_budget,
        )

    def parser(
        self,
        prompt: Sequence[int],
        tools: Sequence[dict[str, Any]],
        *,
        has_final: bool = False,
        thought: ReasoningFormat | None = None,
    ) -> Parser:
        """Return a parser of the answer to a prompt: transformers' own, where the tokenizer ships a response template.

        Args:
            prompt: that is answered.
            tools: that may be called.
            has_final: whether an answer that is no call is JSON, in which an opener is text.
            thought: that goes before the answer.
        """
        checked_calls = checked_tools(tools)
        parser = self._parser(prompt, tools, has_final=has_final, thought=thought)
        return CheckingParser(parser, checked_calls) if checked_calls else parser

    def _parser(
        self,
        prompt: Sequence[int],
        tools: Sequence[dict[str, Any]],
        *,
        has_final: bool,
        thought: ReasoningFormat | None,
    ) -> Parser:
        names = {tool["function"]["name"] for tool in tools}
        if self._ships_a_parser and tools and not has_final:
            theirs = self._tokenizer.get_response_parser(prefix=list(prompt), tools=list(tools))
            spelled = self.form.openers(len(names))
            return TemplateParser(theirs, AnswerParser(self.form, thought=thought, names=names) if spelled else None)
        form = self.form if tools else None
        return self.dialect.parser(form, thought=thought, begins_with_call=has_final, names=names)

    @property
    def _ships_a_parser(self) -> bool:
        # A template that knows no calls of ours cannot have a parser that does.
        return bool(self.dialect.marks) and getattr(self._tokenizer, "response_template", None) is not None


def _find(text: Rendered, opening: str, answer: str, at: int) -> int | None:
    """Return where an answer stands after an opening that the template wrote, from an offset on; None for nowhere."""
    while (found := text.text.find(opening + answer, at)) >= 0:
        begin = found + len(opening)
        if not text.spells_in(found, begin):
            return begin
        at = found + 1
    return None


def _marks(dialect: Dialect) -> str:
    """Return all that a dialect writes around calls and thoughts."""
    thought = dialect.thought("</think>", "") or ReasoningFormat()
    return dialect.form.marks + thought.opener + thought.end + thought.gap


def _with_ids(dialect: Dialect, tokenizer: Any) -> ToolCallFormat:
    """Return a form with the ids of those of its marks that are special tokens of a tokenizer."""
    written = _marks(dialect)
    known = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dataclasses.replace(dialect.form, special=tuple((mark, i) for mark, i in known.items() if mark in written))
