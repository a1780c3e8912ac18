"""Find the definitions that closing leaves alone: no object within them names its properties."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from agentspec.grammars.schema_tools.positions import DEFINITIONS, subschemas
from agentspec.grammars.schema_tools.references import target


def inert_references(root: Any) -> set[str]:
    """Return the references of a document to schemas in which, references followed, no object names properties."""
    named: dict[str, bool] = {}
    users: defaultdict[str, set[str]] = defaultdict(set)
    waiting = sorted(_look(root)[1])
    while waiting:
        reference = waiting.pop()
        if reference not in named:
            named[reference], inner = _look(target(root, reference))
            for other in inner:
                users[other].add(reference)
            waiting += inner
    active = [reference for reference, names in named.items() if names]
    seen = set(active)
    while active:
        new = users[active.pop()] - seen
        seen |= new
        active += new
    return named.keys() - seen


def _look(schema: Any) -> tuple[bool, set[str]]:
    """Return whether an object of a schema names properties, and the references in it and its definitions."""
    left, names, references = [(schema, True)], False, set()
    while left:
        part, counts = left.pop()
        if isinstance(part, dict):
            names |= counts and bool(part.get("properties"))
            references |= {part["$ref"]} if "$ref" in part else set()
            left += [(inner, counts and path[0] not in DEFINITIONS) for path, inner in subschemas(part)]
    return names, references
