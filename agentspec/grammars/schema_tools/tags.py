"""Require the tags of unions: where a schema names the property that distinguishes its members, each must have it."""

from __future__ import annotations

import copy
from typing import Any

from agentspec.grammars.schema_tools.positions import Schema, subschemas
from agentspec.grammars.schema_tools.references import target


def with_required_tags(schema: Any) -> Any:
    """Return a schema in whose unions with a ``discriminator`` each member requires its tag.

    A tag with a default may be left out by JSON Schema, but parsers choose the member by it (OpenAPI 3.1, discriminator
    object; pydantic). A schema without such unions comes back as it is.
    """
    if not any(_tag_of(part) for part in _all(schema)):
        return schema
    made = copy.deepcopy(schema)
    for part in _all(made):
        tag = _tag_of(part)
        for keyword in ("oneOf", "anyOf"):
            if tag is not None and isinstance(part.get(keyword), list):
                require(tag, part[keyword], made)
    return made


def _tag_of(union: Schema) -> str | None:
    discriminator = union.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return tag if isinstance(tag, str) else None


def _all(schema: Any) -> list[Schema]:
    """Return a schema and all within it."""
    found, left = [], [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            found.append(part)
            left += [inner for _, inner in subschemas(part)]
    return found


def require(tag: str, members: list[Any], root: Any) -> None:
    """Let the members of a union require a property that they declare."""
    for member in members_of(members, root):
        required = member.setdefault("required", [])
        if tag in member["properties"] and isinstance(required, list) and tag not in required:
            required.append(tag)


def members_of(members: list[Any], root: Any) -> list[Schema]:
    """Return the objects that a union has for members, those of unions within it included."""
    found, left, seen = [], list(members), set[str]()
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            left.append(target(root, reference))
        for keyword in ("oneOf", "anyOf", "allOf"):
            left += part[keyword] if isinstance(part.get(keyword), list) else []
        found += [part] if isinstance(part.get("properties"), dict) else []
    return found
