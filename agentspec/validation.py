"""Texts against their JSON Schema, by ``jsonschema``: the check behind a grammar that could not express all of it."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from agentspec.errors import GrammarError, cut
from agentspec.job import Delta
from agentspec.request import Request
from agentspec.sequence import FinishReason


def validator(schema: str) -> Callable[[str], str | None]:
    """A function that says why a text is no instance of a JSON Schema; None where it is one.

    Formats are checked where ``jsonschema`` can.

    Args:
        schema: JSON, in the dialect that its ``$schema`` declares, 2020-12 where it declares none.

    Raises:
        GrammarError: for a schema that is none.
    """
    import jsonschema  # here, for texts without a schema are most of them

    described: Any = json.loads(schema)
    kind = jsonschema.validators.validator_for(described, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(described)
    except jsonschema.SchemaError as error:
        raise GrammarError(f"The JSON Schema is none: {cut(error.message)}") from error
    checker = kind(described, format_checker=kind.FORMAT_CHECKER)

    def why_invalid(text: str) -> str | None:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            return f"not JSON: {error}"
        problem = jsonschema.exceptions.best_match(checker.iter_errors(value))
        return None if problem is None else f"{problem.json_path}: {cut(problem.message)} ({problem.validator})"

    return why_invalid


class Check:
    """Compares the finished texts of a request with its JSON Schema, where that is asked for.

    Raises:
        GrammarError: for a schema that is none.
    """

    def __init__(self, request: Request) -> None:
        wanted = request.validate and request.grammar is not None
        self._why_invalid = validator(request.grammar.source) if wanted and request.grammar else None
        self._texts: defaultdict[int, str] = defaultdict(str)

    def __call__(self, delta: Delta) -> Delta:
        """The delta; on a sample's last one, with what is wrong. A text cut short says so by its finish reason."""
        if self._why_invalid is None:
            return delta
        self._texts[delta.index] += delta.text
        if delta.finish_reason is not FinishReason.STOP:
            return delta
        return dataclasses.replace(delta, invalid=self._why_invalid(self._texts[delta.index]))
