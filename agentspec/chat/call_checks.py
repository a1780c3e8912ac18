"""Calls of tools whose schemas no grammar expresses whole: the grammar takes what it can, the rest is checked."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.chat.parser import Parser, Piece, ToolCall
from agentspec.errors import GrammarError
from agentspec.grammars import expressible_parameters, inexpressible_parts
from agentspec.grammars.schema_tools import checked as without_nulls
from agentspec.grammars.schema_tools import to_json
from agentspec.grammars.schema_tools.validator import unresolvable, validator, without_unresolvable


@dataclass(frozen=True)
class CheckedTool:
    """A tool whose finished calls are checked.

    Args:
        name: of the tool.
        left_out: the keywords that the grammar does not enforce, and where they stand.
        unchecked: references that lead nowhere, so that the check cannot follow them either.
        why_invalid: says why arguments do not satisfy the tool's parameters; None where they do.
    """

    name: str
    left_out: tuple[str, ...]
    unchecked: tuple[str, ...]
    why_invalid: Callable[[str], str | None] = dataclasses.field(compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the tool as JSON, for the metadata of messages."""
        known: dict[str, Any] = {"name": self.name, "left_out": list(self.left_out)}
        return known | ({"unchecked": list(self.unchecked)} if self.unchecked else {})


def expressible_tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with parameters that a grammar can express; one without inexpressible keywords as it is."""
    expressed = []
    for tool in tools:
        parameters, left_out = expressible_parameters(tool)
        changed = {**tool, "function": {**tool["function"], "parameters": parameters}}
        expressed.append(changed if left_out else tool)
    return expressed


def checked_tools(tools: Sequence[dict[str, Any]]) -> dict[str, CheckedTool]:
    """Return those tools, by name, whose calls must be checked.

    Raises:
        GrammarError: for parameters that are no JSON Schema.
    """
    found = {}
    for tool in tools:
        _, left_out = expressible_parameters(tool)
        if left_out:
            function = tool["function"]
            found[function["name"]] = _checked(function["name"], to_json(function.get("parameters") or {}), left_out)
    return found


def check_expressible(schema: dict[str, Any] | bool) -> None:
    """Make sure that a grammar can express the schema of final answers.

    Raises:
        GrammarError: where it cannot; names the keywords.
    """
    left_out = inexpressible_parts(schema)
    if left_out:
        raise GrammarError(
            "No grammar engine can express this schema of final answers beside tools or thoughts. "
            f"Leave out of the schema: {', '.join(left_out)}."
        )


@functools.lru_cache(maxsize=1024)
def _checked(name: str, parameters: str, left_out: tuple[str, ...]) -> CheckedTool:
    schema = without_nulls(json.loads(parameters), f"The schema of the tool {name!r}")
    nowhere = unresolvable(schema)
    try:
        why_invalid = validator(to_json(without_unresolvable(schema, nowhere)))
    except GrammarError as error:
        raise GrammarError(f"The parameters of the tool {name!r} cannot be checked: {error}") from error
    return CheckedTool(name, left_out, tuple(f"$ref to {reference}" for reference in nowhere), why_invalid)


class CheckingParser:
    """A parser that says of finished calls why they are invalid.

    Args:
        parser: that takes the answer apart.
        checked: the tools whose calls are checked, by name.
    """

    def __init__(self, parser: Parser, checked: Mapping[str, CheckedTool]) -> None:
        self._parser = parser
        self._checked = checked

    def push(self, text: str) -> Piece:
        """Take more text."""
        return self._parser.push(text)

    def finish(self) -> tuple[Piece, list[ToolCall]]:
        """Return the rest of the answer, and its calls."""
        piece, calls = self._parser.finish()
        return piece, [self._check(call) for call in calls]

    def _check(self, call: ToolCall) -> ToolCall:
        tool = self._checked.get(call.name)
        if tool is None or not call.is_complete:
            return call
        return dataclasses.replace(call, invalid=tool.why_invalid(call.arguments))
