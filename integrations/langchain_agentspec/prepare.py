"""A call of the chat model as a request to an engine: all that can be wrong with it is found here."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk

from agentspec import Delta, LocalEngine, Request
from agentspec.chat import ChatFormat, CheckedTool, Parser, checked_tools
from langchain_agentspec.callback_events import CountedChunk
from langchain_agentspec.messages import ChunkMaker, to_chat
from langchain_agentspec.settings import decoding, sampling
from langchain_agentspec.structured_output import chosen_tools, final_schema
from langchain_agentspec.tools import described

CHAT = (
    "grammar_engine",
    "validate_output",
    "reasoning",
    "thinking_budget",
    "parallel_tool_calls",
    "special_tokens_in_content",
)
"""Settings of a chat model alone that a call may override."""

BOUND = ("tools", "tool_choice", "response_format", "strict", "parsed")
"""What else a call takes; ``parsed`` means that a parser after it reports invalid answers."""

MAX_PARALLEL_CALLS = 8
"""Calls in one message where parallel calls are asked for."""


@dataclass(frozen=True)
class Prepared:
    """A call on its way to the engine; ``parser`` is set where its answer may hold thoughts or tool calls.

    ``template_s`` are the seconds that it took to make the request, ``checked`` the tools whose calls are checked.
    """

    model: str
    engine: LocalEngine
    chat: ChatFormat
    request: Request
    parser: Callable[[], Parser] | None
    template_s: float
    checked: tuple[CheckedTool, ...] = ()

    def makers(self) -> list[ChunkMaker]:
        """One per sample."""
        return [
            ChunkMaker(
                self.model,
                self.parser() if self.parser else None,
                self.engine.tokenizer.decode,
                self.chat.own_ids,
                self.template_s,
                self.checked,
            )
            for _ in range(self.request.n)
        ]


def prepare(
    engine: LocalEngine,
    messages: Sequence[BaseMessage],
    settings: Mapping[str, Any],
    stop: Sequence[str],
    bound: Mapping[str, Any],
    dialect: str | None,
    group: str | None = None,
) -> Prepared:
    """Prepare a call as a request.

    Args:
        engine: that will serve it.
        messages: of the conversation.
        settings: a value for each that a call may override.
        stop: strings that end the text.
        bound: values for some of ``BOUND``.
        dialect: of calls; None for the chat template's.
        group: of requests that look at each other's text for drafts.

    Raises:
        InvalidRequestError: for settings, messages, tools or formats that cannot be served.
    """
    started = time.perf_counter()
    chat = ChatFormat(engine.tokenizer, dialect, special_tokens_in_content=settings["special_tokens_in_content"])
    tools = [described(tool) for tool in bound.get("tools") or []]
    offered, required = chosen_tools(tools, bound.get("tool_choice"))
    final = final_schema(bound.get("response_format"))
    reasoning = {} if settings["reasoning"] is None else {"enable_thinking": settings["reasoning"]}
    prompt = chat.render(to_chat(messages), tools, **reasoning)
    thought = chat.thought(prompt)
    grammar = chat.answer_grammar(
        offered,
        required=required,
        parallel=MAX_PARALLEL_CALLS if settings["parallel_tool_calls"] else 1,
        final=final,
        thought=thought,
        thinking_budget=settings["thinking_budget"],
    )
    request = Request(
        prompt,
        sampling(
            settings,
            stop,
            skip_special_tokens=not (chat.shows_special_tokens and (offered or thought)),
            stop_token_ids=chat.end_tokens,
        ),
        grammar,
        **decoding(settings),
        grammar_engine=settings["grammar_engine"],
        group=group,
        validate=settings["validate_output"] and grammar is not None and grammar.kind == "json_schema",
    )
    parser = functools.partial(chat.parser, prompt, offered, has_final=final is not None, thought=thought)
    makes_parser = parser if offered or thought else None
    checked = tuple(checked_tools(offered).values())
    return Prepared(settings["model"], engine, chat, request, makes_parser, time.perf_counter() - started, checked)


def shown(maker: ChunkMaker, message: AIMessageChunk, delta: Delta) -> Iterator[ChatGenerationChunk]:
    """Return a delta's chunk, unless there is nothing in it (its text may be the beginning of a call)."""
    if message.content or message.additional_kwargs or message.chunk_position == "last":
        info = {"finish_reason": message.response_metadata["finish_reason"]} if message.chunk_position else None
        yield CountedChunk(
            message=message,
            generation_info=info,
            tokens_so_far=maker.tokens,
            acceptance_rate=delta.acceptance_rate,
        )
