"""JSON Schemas as grammars take them: bounded, closed, in one written form, without what asserts nothing.

``positions`` says where schemas stand in a schema, ``references`` what a ``$ref`` means, ``checks`` what is looked at
before any work, ``closing`` how objects are closed (``groups`` and ``satisfiable`` say where that may be done), and
``written`` how JSON is written. ``tightening`` adds what an engine would let through, and ``leniency`` leaves out what
it cannot express.
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
    """Return a tool's parameters as the schema of its arguments, which must not be changed: it is kept.

    Raises:
        GrammarError: names the tool, and what is wrong with its parameters.
    """
    function = tool["function"]
    parameters = {} if function.get("parameters") is None else function["parameters"]
    what = f"The schema of the tool {shown(function['name'])}"
    try:
        source = to_json(parameters)
    except (TypeError, ValueError, RecursionError):
        source = to_json(checked(parameters, what))  # says what is wrong
    return (_arguments if len(source) <= _CACHED else _arguments.__wrapped__)(source, what)


@functools.lru_cache(maxsize=256)
def _arguments(source: str, what: str) -> dict[str, Any]:
    parameters = checked(json.loads(source), what)
    return closed_arguments({"type": "object", **({} if parameters is True else parameters)})
