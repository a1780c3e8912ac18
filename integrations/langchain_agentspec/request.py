"""A call of the chat model as a request to an engine: all that can be wrong with it is found here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk

from agentspec import Delta, InvalidRequestError, LocalEngine, Request, SamplingParams
from agentspec.chat import ChatFormat, Parser
from langchain_agentspec.forms import chosen_tools, final_schema
from langchain_agentspec.messages import ChunkMaker, to_chat

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "logprobs")
DECODING = ("n", "gamma", "acceptance", "grammar_engine", "validate_output", "reasoning", "thinking_budget")
SETTINGS = (*SAMPLING, *DECODING)
"""Settings that a call may override by a keyword of the same name."""

BOUND = ("tools", "tool_choice", "response_format", "strict", "parallel_tool_calls")
"""What else a call takes."""

MAX_PARALLEL_CALLS = 8
"""Calls in one message where parallel calls are asked for."""


@dataclass(frozen=True)
class Prepared:
    """A call on its way to the engine; ``parser`` is set where its answer may hold thoughts or tool calls."""

    engine: LocalEngine
    chat: ChatFormat
    request: Request
    parser: Callable[[], Parser] | None

    def makers(self, model_name: str) -> list[ChunkMaker]:
        """One per sample."""
        return [
            ChunkMaker(
                model_name, self.parser() if self.parser else None, self.engine.tokenizer.decode, self.chat.own_ids
            )
            for _ in range(self.request.n)
        ]


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Make sure that a call's keywords are known ones.

    Raises:
        InvalidRequestError: naming those that are not, and all that are.
    """
    unknown = keywords.keys() - {*SETTINGS, *BOUND}
    if unknown:
        known = ", ".join((*SETTINGS, *BOUND))
        raise InvalidRequestError(f"Unknown settings {sorted(unknown)}; a call takes {known} and stop.")


def prepare(
    engine: LocalEngine,
    messages: Sequence[BaseMessage],
    settings: Mapping[str, Any],
    stop: Sequence[str],
    bound: Mapping[str, Any],
    dialect: str | None,
) -> Prepared:
    """A call as a request.

    Args:
        engine: that will serve it.
        messages: of the conversation.
        settings: a value for each of ``SETTINGS``.
        stop: strings that end the text.
        bound: values for some of ``BOUND``.
        dialect: of calls; None for the chat template's.

    Raises:
        InvalidRequestError: for settings, messages, tools or formats that cannot be served.
    """
    chat = ChatFormat(engine.tokenizer, dialect)
    tools = bound.get("tools") or []
    offered, required = chosen_tools(tools, bound.get("tool_choice"))
    final = final_schema(bound.get("response_format"))
    reasoning = {} if settings["reasoning"] is None else {"enable_thinking": settings["reasoning"]}
    prompt = chat.render(to_chat(messages), tools, **reasoning)
    thought = chat.thought(prompt)
    grammar = chat.answer_grammar(
        offered,
        required=required,
        parallel=MAX_PARALLEL_CALLS if bound.get("parallel_tool_calls") else 1,
        final=final,
        thought=thought,
        thinking_budget=settings["thinking_budget"],
    )
    request = Request(
        prompt,
        sampling(settings, stop, shows_special_tokens=chat.shows_special_tokens and bool(offered or thought)),
        grammar,
        n=settings["n"],
        gamma=None if settings["gamma"] == "auto" else settings["gamma"],
        acceptance=settings["acceptance"],
        grammar_engine=settings["grammar_engine"],
        validate=settings["validate_output"] and grammar is not None and grammar.kind == "json_schema",
    )
    parser = functools.partial(chat.parser, prompt, offered, has_final=final is not None, thought=thought)
    return Prepared(engine, chat, request, parser if offered or thought else None)


def sampling(settings: Mapping[str, Any], stop: Sequence[str], *, shows_special_tokens: bool = False) -> SamplingParams:
    """The sampling settings of a call.

    Raises:
        InvalidRequestError: for a value outside its range.
    """
    return SamplingParams(
        **{name: settings[name] for name in SAMPLING},
        stop=tuple(stop),
        raw_logprobs=True,  # the model's own probabilities: those of a greedy law would all be 1
        skip_special_tokens=not shows_special_tokens,
    )


def shown(maker: ChunkMaker, delta: Delta) -> Iterator[ChatGenerationChunk]:
    """A delta's chunk, unless there is nothing in it (its text may be the beginning of a call)."""
    message = maker.chunk(delta)
    if message.content or message.additional_kwargs or message.chunk_position == "last":
        info = {"finish_reason": message.response_metadata["finish_reason"]} if message.chunk_position else None
        yield ChatGenerationChunk(message=message, generation_info=info)
