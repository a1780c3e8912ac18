"""JSON Schemas in the form that grammars take: bounded, closed, written in one way, without unknown formats.

``positions`` lists where schemas stand in a schema, ``references`` resolves a ``$ref``, and ``checks`` bounds size,
depth and the values of keywords before any work. ``closing`` closes objects; ``groups`` and ``satisfiable`` decide
where that is sound. ``written`` defines how JSON is written. ``tightening`` forbids what an engine would allow wrongly,
and ``leniency`` leaves out what it cannot express. ``validator`` checks finished texts, by ``formats`` and ``ecma``.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from agentspec.errors import shown
from agentspec.grammars.schema_tools.checks import MAX_BYTES, check_size, checked
from agentspec.grammars.schema_tools.closing import closed, closed_arguments
from agentspec.grammars.schema_tools.references import embedded, localized
from agentspec.grammars.schema_tools.written import FORMATS, JSON_FORM, in_json_form, to_json, without_unknown_formats

__all__ = [
    "FORMATS",
    "JSON_FORM",
    "MAX_BYTES",
    "arguments_schema",
    "check_size",
    "checked",
    "closed",
    "embedded",
    "in_json_form",
    "localized",
    "to_json",
    "without_unknown_formats",
]


_CACHED = 100_000  # characters of a schema whose closed form is kept


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's parameters as the schema of its arguments. It is cached: callers must not change it.

    Raises:
        GrammarError: for parameters that are no bounded JSON Schema; names the tool.
    """
    function = tool["function"]
    parameters = {} if function.get("parameters") is None else function["parameters"]
    what = f"The schema of the tool {shown(function['name'])}"
    try:
        source = to_json(parameters)
    except (TypeError, ValueError, RecursionError):
        source = to_json(checked(parameters, what))  # raises the error
    return (_arguments if len(source) <= _CACHED else _arguments.__wrapped__)(source, what)


@functools.lru_cache(maxsize=256)
def _arguments(source: str, what: str) -> dict[str, Any]:
    parameters = checked(json.loads(source), what)
    return closed_arguments({"type": "object", **({} if parameters is True else parameters)})
