"""``ChatAgentSpec``: an open model on this machine as a LangChain chat model, decoded speculatively and exactly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from agentspec import InvalidRequestError
from agentspec.errors import cut
from agentspec.grammars import GrammarEngine
from langchain_agentspec.callbacks import PROGRESS_S, follower
from langchain_agentspec.messages import to_result
from langchain_agentspec.prepare import BOUND, CHAT, Prepared, prepare, shown
from langchain_agentspec.samples import current_sample
from langchain_agentspec.settings import STRICT, ModelSettings, canonical, check_keywords
from langchain_agentspec.structured_output import (
    answer_parser,
    call_parser,
    check_valid,
    chosen_tools,
    core_errors,
    returned,
    structured,
)
from langchain_agentspec.tools import described, json_schema_of, tool_of, tracer_schema


class ChatAgentSpec(ModelSettings, BaseChatModel):
    """A chat model on this machine: speculative decoding, valid tool calls, an account of every second.

    Takes the settings of ``ModelSettings`` (model, draft, temperature, seed, max_tokens, n, gamma, ...), and these.

    Args:
        dialect: how calls are written (``agentspec.chat.DIALECTS``); None for what the chat template shows.
        reasoning: False asks the chat template of a reasoning model for an answer without a thought; None leaves that
            to the template.
        thinking_budget: the most tokens of a reasoning model's thought, which is then ended; None for no limit.
        grammar_engine: "llguidance", "outlines", or "auto" for the first that can express what an answer may be.
        validate_output: check answers by a schema with ``jsonschema`` too, and leave to this check what the engine
            cannot express, in place of refusing the schema. Beside tools and after thoughts a schema is always
            enforced whole or refused.
        parallel_tool_calls: whether a message may hold several calls (up to ``MAX_PARALLEL_CALLS``).
        special_tokens_in_content: whether a special token that messages, tools or their results spell becomes that
            token, as chat templates do by themselves. By default it stays text, so that no foreign text begins a turn.
        streaming: whether ``invoke`` streams too, for handlers that listen to tokens.

    Example:
        ChatAgentSpec(temperature=0).bind_tools([get_weather]).invoke("What is the weather in Paris?")
    """

    model_config = STRICT

    dialect: str | None = None
    reasoning: bool | None = None
    thinking_budget: int | None = None
    grammar_engine: GrammarEngine = "auto"
    validate_output: bool = False
    parallel_tool_calls: bool = False
    special_tokens_in_content: bool = False
    streaming: bool = False

    @property
    def _llm_type(self) -> str:
        return "agentspec"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self.identity(), "dialect": self.dialect, "output_version": self.output_version}

    @classmethod
    def overridable(cls) -> tuple[str, ...]:
        """Names of the settings that a call may override."""
        return (*super().overridable(), *CHAT)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        named = canonical(kwargs)
        settings = {name: named.get(name) for name in ("model", "temperature", "max_tokens")}
        current = {name: getattr(self, name) if value is None else value for name, value in settings.items()}
        return LangSmithParams(
            ls_provider="agentspec",
            ls_model_name=current["model"],
            ls_model_type="chat",
            ls_temperature=current["temperature"],
            ls_max_tokens=current["max_tokens"],
            ls_stop=stop or named.get("stop") or self.stop,
        )

    def _resolve_model_profile(self) -> ModelProfile | None:
        return ModelProfile(
            text_inputs=True, text_outputs=True, tool_calling=True, tool_choice=True, structured_output=True
        )

    def load(self) -> ChatAgentSpec:
        """Load the models now, and not at the first call; returns this chat model."""
        self.engine_of(self.model)
        return self

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: dict[str, Any] | type | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model. Calls are always valid against the tools' schemas.

        Args:
            tools: functions, LangChain tools, pydantic classes or OpenAI tool dicts.
            tool_choice: None or "auto" leaves the choice to the model; "any", "required" or True demand a call; a
                tool's name (or OpenAI's dict) demands a call of it; "none" or False forbid calls.
            strict: accepted for compatibility; schemas are always enforced.
            parallel_tool_calls: whether a message may hold several calls; None for the model's own setting.
            response_format: schema of the final answer: every message is a tool call or an instance of it.
            **kwargs: further settings of the calls.

        Raises:
            InvalidRequestError: for an unknown ``tool_choice``.
        """
        formatted = [described(tool) for tool in tools]
        chosen_tools(formatted, tool_choice)
        bound: dict[str, Any] = {
            "tools": formatted,
            "tool_choice": tool_choice,
            "parallel_tool_calls": parallel_tool_calls,
            "response_format": response_format,
        }
        return super().bind(**{name: value for name, value in bound.items() if value is not None}, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a runnable whose answers are instances of a schema.

        The schema constrains the answer and is not written into the prompt: say there what you want to know.

        Args:
            schema: pydantic class, TypedDict, or JSON Schema; None, with "json_mode", for any JSON object.
            include_raw: give ``{"raw", "parsed", "parsing_error"}`` in place of the parsed value.
            method: "json_schema" and "json_mode" constrain the answer to the schema; "function_calling" demands a call
                of it as a tool.
            strict: accepted for compatibility; schemas are always enforced.
            **kwargs: further settings of the calls.

        Raises:
            InvalidRequestError: for an unknown method.
        """
        if "response_format" in kwargs:
            raise InvalidRequestError("with_structured_output makes its own response_format; leave one of them out.")
        if schema is None and method != "json_mode":
            raise InvalidRequestError(
                f"method={cut(repr(method))} needs a schema; 'json_mode' gives any JSON object without one."
            )
        if method == "function_calling" and schema is not None:
            return structured(self._calling(schema, **kwargs), call_parser(schema), include_raw)
        if method not in ("json_schema", "json_mode"):
            raise InvalidRequestError(
                f"method must be 'json_schema', 'function_calling' or 'json_mode', got {cut(repr(method))}."
            )
        wanted = json_schema_of(schema)
        llm = self.bind(
            response_format={"type": "json_schema", "json_schema": {"schema": wanted}},
            parsed=True,
            ls_structured_output_format={
                "kwargs": {"method": method},
                "schema": tracer_schema(wanted if schema is None else schema),
            },
            **kwargs,
        )
        return structured(llm, answer_parser(schema), include_raw)

    def _calling(self, schema: dict[str, Any] | type, **kwargs: Any) -> Runnable[LanguageModelInput, AIMessage]:
        """Bind the schema as a tool that the model must call."""
        tool = tool_of(schema)
        wanted = {"kwargs": {"method": "function_calling"}, "schema": tool}
        return self.bind_tools(
            [tool], tool_choice=tool["function"]["name"], ls_structured_output_format=wanted, **kwargs
        )

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._prepare(messages, stop, kwargs)
        makers = call.makers()
        with core_errors():
            check = returned if kwargs.get("parsed") else check_valid
            deltas = map(check, map(follower(run_manager), call.engine.stream(call.request, PROGRESS_S)))
            chunks = [(delta.index, makers[delta.index].chunk(delta)) for delta in deltas]
        return to_result(chunks, len(makers))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._prepare_stream(messages, stop, kwargs)
        maker = call.makers()[0]
        with core_errors():
            for delta in call.engine.stream(call.request):
                yield from shown(maker, maker.chunk(check_valid(delta)), delta)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = await asyncio.to_thread(self._prepare, messages, stop, kwargs)
        makers = call.makers()
        with core_errors():
            check, send = returned if kwargs.get("parsed") else check_valid, follower(run_manager)
            async with aclosing(call.engine.astream(call.request, PROGRESS_S)) as deltas:
                chunks = [(delta.index, await makers[delta.index].achunk(check(send(delta)))) async for delta in deltas]
        return to_result(chunks, len(makers))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = await asyncio.to_thread(self._prepare_stream, messages, stop, kwargs)
        maker = call.makers()[0]
        with core_errors():
            async with aclosing(call.engine.astream(call.request)) as deltas:
                async for delta in deltas:
                    message = await maker.achunk(check_valid(delta))
                    for chunk in shown(maker, message, delta):
                        yield chunk

    def _prepare_stream(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Prepared:
        call = self._prepare(messages, stop, kwargs)
        if call.request.n > 1:
            raise InvalidRequestError(f"Only one sample can be streamed, got n={call.request.n}; use invoke or n=1.")
        return call

    def _prepare(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Prepared:
        """Prepare a call as a request."""
        kwargs = canonical(kwargs)
        check_keywords(kwargs, (*self.overridable(), *BOUND))
        settings, sample = self.settings(kwargs), current_sample.get()
        if sample is not None:
            settings = sample.settings(settings)
        stops = stop if stop is not None else kwargs.get("stop") or self.stop
        engine, group = self.engine_of(settings["model"]), sample.group if sample else None
        return prepare(engine, messages, settings, stops, kwargs, self.dialect, group)

    def _generate_with_cache(self, *arguments: Any, **kwargs: Any) -> ChatResult:
        return BaseChatModel._generate_with_cache(self._of_sample(), *arguments, **kwargs)

    async def _agenerate_with_cache(self, *arguments: Any, **kwargs: Any) -> ChatResult:
        return await BaseChatModel._agenerate_with_cache(self._of_sample(), *arguments, **kwargs)

    def _of_sample(self) -> ChatAgentSpec:
        """Return this model; without its cache for one of several samples, which must be drawn anew."""
        return self if current_sample.get() is None else self.model_copy(update={"cache": False})
