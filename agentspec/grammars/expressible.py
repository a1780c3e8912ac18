"""What a grammar of tool calls can express of JSON Schemas, and what it leaves to the check of the text."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Mapping
from typing import Any

from agentspec.grammars.schema_tools import arguments_schema, checked, closed, in_json_form, to_json
from agentspec.grammars.schema_tools.leniency import expressible, left_open, repeatable


def expressible_parameters(tool: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the parameters of a tool as a grammar of calls can express them, and the keywords that this leaves out.

    Args:
        tool: an OpenAI tool dict.

    Raises:
        GrammarError: for parameters that are no bounded JSON Schema; names the tool.
    """
    function = tool["function"]
    parameters = {} if function.get("parameters") is None else function["parameters"]
    try:
        source = to_json(parameters)
    except (TypeError, ValueError, RecursionError):
        source = to_json(arguments_schema({"function": function}))  # raises with the reason
    lenient, left_out = _expressible_parameters(str(function.get("name")), source)
    return (json.loads(lenient) if left_out else parameters), left_out


@functools.lru_cache(maxsize=1024)  # agents send the same tools at every step
def _expressible_parameters(name: str, source: str) -> tuple[str, tuple[str, ...]]:
    arguments = arguments_schema({"function": {"name": name, "parameters": json.loads(source)}})
    lenient, left_out = _expressible(to_json(arguments))
    return to_json(left_open(json.loads(lenient))), (*left_out, *repeatable(arguments))


def inexpressible_parts(schema: dict[str, Any] | bool) -> tuple[str, ...]:
    """Return the keywords of a schema, with their places, that no grammar of tool calls or reasoning can express."""
    return _expressible(to_json(closed(checked(schema))))[1]


@functools.lru_cache(maxsize=1024)
def _expressible(source: str) -> tuple[str, tuple[str, ...]]:
    # By string, so that an engine is imported where it is needed.
    why_inexpressible = importlib.import_module("agentspec.grammars.llguidance").why_inexpressible

    def reason(schema: Any) -> str | None:
        found: str | None = why_inexpressible(in_json_form(schema))
        return found

    schema, left_out = expressible(json.loads(source), reason)
    return to_json(schema), left_out
