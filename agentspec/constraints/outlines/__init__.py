"""outlines' types as grammars: whoever has them can go on using them."""

from __future__ import annotations

import json
from typing import Any

from outlines.types import dsl

from agentspec.errors import GrammarError
from agentspec.grammar import Grammar


def describe(term: Any) -> Grammar:
    """The grammar of an outlines type or term (``outlines.types``).

    Raises:
        GrammarError: for something of outlines that is no term.
    """
    if isinstance(term, dsl.JsonSchema):
        return Grammar.json_schema(json.loads(term.schema))
    if isinstance(term, dsl.CFG):
        return Grammar.lark(term.definition)
    if isinstance(term, dsl.Choice):
        return Grammar.choice([str(item) for item in term.items])
    if isinstance(term, dsl.Term):
        return Grammar.regex(dsl.to_regex(term))
    raise GrammarError(f"Expected a type or term of outlines, got {term!r}.")
