"""Types and terms of the package outlines (``outlines.types``) as plain values, from which grammars are built."""

from __future__ import annotations

import importlib
import json
from typing import Any, Literal

from agentspec.errors import GrammarError, shown


def describe(term: Any) -> tuple[Literal["json_schema", "lark", "choice", "regex"], Any]:
    """Return the kind of grammar that a term stands for, and the argument of that kind's builder.

    Raises:
        GrammarError: for an object of outlines that is no term.
    """
    dsl = importlib.import_module("outlines.types.dsl")  # the engine does without the package
    if isinstance(term, dsl.JsonSchema):
        return "json_schema", json.loads(term.schema)
    if isinstance(term, dsl.CFG):
        return "lark", term.definition
    if isinstance(term, dsl.Choice):
        return "choice", [str(item) for item in term.items]
    if isinstance(term, dsl.Term):
        return "regex", dsl.to_regex(term)
    raise GrammarError(f"Expected a type or term of outlines, got {shown(term)}.")
