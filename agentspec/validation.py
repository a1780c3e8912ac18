"""Texts against their JSON Schema, by ``jsonschema``: the check behind a grammar that could not express all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema

from agentspec.errors import GrammarError


def validator(schema: str) -> Callable[[str], str | None]:
    """A function that says why a text is no instance of a JSON Schema; None where it is one.

    Formats are checked where ``jsonschema`` can.

    Args:
        schema: JSON, in the dialect that its ``$schema`` declares, 2020-12 where it declares none.

    Raises:
        GrammarError: for a schema that is none.
    """
    described: Any = json.loads(schema)
    kind = jsonschema.validators.validator_for(described, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(described)
    except jsonschema.SchemaError as error:
        raise GrammarError(f"The JSON Schema is none: {error.message}") from error
    checker = kind(described, format_checker=kind.FORMAT_CHECKER)

    def why_invalid(text: str) -> str | None:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            return f"not JSON: {error}"
        problem = jsonschema.exceptions.best_match(checker.iter_errors(value))
        return None if problem is None else f"{problem.json_path}: {problem.message} ({problem.validator})"

    return why_invalid
