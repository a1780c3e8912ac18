"""The forms in which LangChain states what an answer may be, and reads it: tool_choice, response_format, parsers."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import Generation
from langchain_core.utils.function_calling import convert_to_json_schema

from agentspec import InvalidRequestError


def chosen_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], bool]:
    """The tools that may be called, and whether one must be.

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
            f"one of the tools {names}; got {choice!r}."
        )
    return named, True


def final_schema(response_format: Any) -> dict[str, Any] | None:
    """The JSON Schema of the final answer; None where it is free.

    Raises:
        InvalidRequestError: for a format of another form.
    """
    if response_format is None:
        return None
    if isinstance(response_format, type):
        return convert_to_json_schema(response_format)
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
        f"{{'type': 'json_object'}} or {{'type': 'text'}}; got {response_format!r}."
    )


class WholeJsonParser(JsonOutputParser):
    """JSON that is whole: what was cut short is an error, not a smaller object. Streams partial objects."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The value; while streaming (``partial``), what there is of it."""
        _expect_whole(result, partial)
        return super().parse_result(result, partial=partial)


class WholePydanticParser(PydanticOutputParser[Any]):
    """As ``WholeJsonParser``, to instances of a pydantic class."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The instance."""
        _expect_whole(result, partial)
        return super().parse_result(result, partial=partial)


def _expect_whole(result: list[Generation], partial: bool) -> None:
    if partial:
        return
    try:
        json.loads(result[0].text)
    except json.JSONDecodeError as error:
        raise OutputParserException(
            f"Expected a whole JSON value, got one that was cut short (raise max_tokens?): {result[0].text!r}",
            llm_output=result[0].text,
        ) from error
