"""The forms in which LangChain states what an answer may be, and reads it: tool_choice, response_format, parsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import ContextOverflowError as CoreContextOverflowError
from langchain_core.exceptions import ModelTimeoutError, OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from agentspec import ContextOverflowError, Delta, InvalidRequestError
from agentspec.errors import EngineStuckError, RequestTimeoutError, shown
from langchain_agentspec.tools import described as described
from langchain_agentspec.tools import json_schema_of as json_schema_of


def chosen_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return the tools that may be called, and whether one must be.

    Raises:
        InvalidRequestError: for a choice that is none of the known ones and no tool's name.
    """
    if choice in ("none", False):
        return [], False
    if choice in (None, "auto"):
        return tools, False
    if choice in ("any", "required", True) and tools:
        return tools, True
    name = choice
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        names = [tool["function"]["name"] for tool in tools]
        raise InvalidRequestError(
            "tool_choice must be 'auto', 'none' or False, or, to demand a call, 'any', 'required', True or the name of "
            f"one of the tools {names}; got {shown(choice)}."
        )
    return named, True


def final_schema(response_format: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of the final answer; None where it is free.

    Raises:
        InvalidRequestError: for a format of another form.
    """
    if response_format is None:
        return None
    if isinstance(response_format, type):
        return json_schema_of(response_format)
    if isinstance(response_format, dict):
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind == "json_schema":
            schema = (response_format.get("json_schema") or {}).get("schema")
            if isinstance(schema, dict):
                return schema
        elif "properties" in response_format or "$schema" in response_format or "anyOf" in response_format:
            return response_format
    raise InvalidRequestError(
        "response_format must be a class, a JSON Schema, or {'type': 'json_schema', 'json_schema': {'schema': ...}}, "
        f"{{'type': 'json_object'}} or {{'type': 'text'}}; got {shown(response_format)}."
    )


def _called(message: AIMessage, schema: Any) -> Any:
    """Return the arguments of a message's call, as an instance of a pydantic class where one is named.

    Raises:
        OutputParserException: where the call was cut short, or the class does not take its arguments.
    """
    refused = [str(call["error"]) for call in message.invalid_tool_calls if call.get("error")]
    if refused:
        raise OutputParserException(f"The call does not satisfy its schema: {refused[0]}")
    if not message.tool_calls:
        raise OutputParserException(
            f"Expected a whole tool call, got one that was cut short (raise max_tokens?): {message.invalid_tool_calls}"
        )
    arguments = message.tool_calls[0]["args"]
    try:
        return arguments if schema is None else schema(**arguments)
    except ValueError as error:  # pydantic's ValidationError is one, of both its versions
        raise OutputParserException(f"{schema.__name__} does not take {arguments}: {error}") from error


def structured(llm: Runnable[Any, Any], parser: Runnable[Any, Any], include_raw: bool) -> Runnable[Any, Any]:
    """Return a model and its parser; with ``include_raw`` an answer that does not parse is reported, not raised."""
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _is_pydantic(schema: Any) -> bool:
    return isinstance(schema, type) and is_basemodel_subclass(schema)


def answer_parser(schema: Any) -> Runnable[Any, Any]:
    """Return a parser of answers that are instances of a schema."""
    return WholePydanticParser(pydantic_object=schema) if _is_pydantic(schema) else WholeJsonParser()


def call_parser(schema: Any) -> Runnable[Any, Any]:
    """Return a parser of calls of a schema as a tool."""
    made_of = schema if _is_pydantic(schema) else None
    return RunnableLambda(lambda message: _called(message, made_of))


class PromptTooLongError(ContextOverflowError, CoreContextOverflowError):
    """A prompt beyond the model's context, as LangChain's core names it too."""


class CallTimeoutError(RequestTimeoutError, ModelTimeoutError):
    """A call that took longer than its timeout, as LangChain's core names it too."""


class CallStuckError(EngineStuckError, CallTimeoutError):
    """A call that took longer than its timeout, and whose engine is stuck."""


@contextmanager
def core_errors() -> Iterator[None]:
    """Raise what LangChain's core has a name for under that name."""
    try:
        yield
    except ContextOverflowError as error:
        raise PromptTooLongError(str(error)) from error
    except EngineStuckError as error:
        raise CallStuckError(str(error)) from error
    except RequestTimeoutError as error:
        raise CallTimeoutError(str(error)) from error


def check_valid(delta: Delta) -> Delta:
    """Return the delta.

    Raises:
        OutputParserException: where it ends a text that does not satisfy its schema.
    """
    if delta.invalid is not None:
        raise _invalid(delta.invalid, delta.text)
    return delta


def returned(delta: Delta) -> Delta:
    """Return the delta as it is: a parser reports what is wrong with it."""
    return delta


def _invalid(why: str, text: str) -> OutputParserException:
    return OutputParserException(f"The answer does not satisfy its schema: {why}", llm_output=text)


class WholeJsonParser(JsonOutputParser):
    """JSON that is whole: what was cut short is an error, not a smaller object. Streams partial objects."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the value; while streaming (``partial``), what there is of it."""
        _check_whole(result, partial)
        return super().parse_result(result, partial=partial)


class WholePydanticParser(PydanticOutputParser[Any]):
    """As ``WholeJsonParser``, to instances of a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """Return the instance."""
        _check_whole(result, partial)
        return super().parse_result(result, partial=partial)


def _check_whole(result: list[Generation], partial: bool) -> None:
    if partial:
        return
    if isinstance(result[0], ChatGeneration):
        why = result[0].message.response_metadata.get("agentspec", {}).get("invalid")
        if why is not None:
            raise _invalid(why, result[0].text)
    try:
        json.loads(result[0].text)
    except json.JSONDecodeError as error:
        raise OutputParserException(
            f"Expected a whole JSON value, got one that was cut short (raise max_tokens?): {shown(result[0].text)}",
            llm_output=result[0].text,
        ) from error
