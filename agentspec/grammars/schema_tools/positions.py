"""Positions of schemas in a schema: the keywords of all drafts that hold others, and how to list and replace them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
Path = tuple[str, ...] | tuple[str, int | str]
"""A keyword, and the name or number of one schema where it holds several."""

DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are instances: nothing in them is a schema or a reference."""

DEFINITIONS = ("$defs", "definitions")
ONE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("additionalItems", "unevaluatedItems", "contains", "contentSchema", "not", "if", "then", "else"),
)
LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
MAPS = (*DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
EITHER = ("items", "dependencies")
"""``items`` is a schema or a list of them, ``dependencies`` hold schemas or lists of names."""

IN_PLACE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
"""Keywords beside ``$ref`` whose schemas describe the value itself; those of the others describe a part of it."""


def subschemas(schema: Schema) -> Iterator[tuple[Path, Any]]:
    """Yield the schemas that stand directly in a schema, with their places."""
    for keyword, value in schema.items():
        if keyword in ONE or (keyword == "items" and not isinstance(value, list)):
            yield (keyword,), value
        elif keyword in (*LISTS, *EITHER) and isinstance(value, list):
            yield from (((keyword, index), part) for index, part in enumerate(value))
        elif keyword in (*MAPS, *EITHER) and isinstance(value, dict):
            yield from (
                ((keyword, name), part)
                for name, part in value.items()
                if keyword != "dependencies" or not isinstance(part, list | str)  # names, the latter in draft 3
            )


def with_subschemas(schema: Schema, change: Callable[[Path, Any], Any]) -> Schema:
    """Return a schema with each subschema replaced by the result of ``change``."""
    made = dict(schema)
    for path, part in subschemas(schema):
        keyword, *key = path
        if not key:
            made[keyword] = change(path, part)
            continue
        if made[keyword] is schema[keyword]:
            made[keyword] = schema[keyword].copy()
        made[keyword][key[0]] = change(path, part)
    return made
