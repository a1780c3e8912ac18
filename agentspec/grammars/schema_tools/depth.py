"""Bound the depth that a compiler reaches by following references as it meets them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentspec.errors import GrammarError
from agentspec.grammars.schema_tools.positions import subschemas
from agentspec.grammars.schema_tools.references import localized, target

MAX_FOLLOWED = 400
"""Schemas within each other, references followed. llguidance recurses, and crashes the process at some 2,000."""


def check_followed_depth(schema: Any, what: str) -> None:
    """Refuse chains of references that would exhaust the stack of a grammar engine.

    Raises:
        GrammarError: names the limit.
    """
    root = localized(schema)
    followed: set[str] = set()
    stack = [_next_schemas(root, root, followed)]
    while stack:
        inner = next(stack[-1], None)
        if inner is None:
            stack.pop()
            continue
        stack.append(_next_schemas(root, inner, followed))
        if len(stack) > MAX_FOLLOWED:
            raise GrammarError(
                f"{what} is more than {MAX_FOLLOWED} schemas deep where its references are followed; the limit is "
                f"{MAX_FOLLOWED}. Shorten its chains of references."
            )


def _next_schemas(root: Any, schema: Any, followed: set[str]) -> Iterator[Any]:
    """Yield the schemas within a schema, and the one that it refers to, unless that was met before."""
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in followed:
        followed.add(reference)
        yield target(root, reference)
    for path, part in subschemas(schema):
        if path[0] not in ("$defs", "definitions"):
            yield part
