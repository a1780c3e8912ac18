"""Leave out of JSON Schemas what a grammar engine cannot express: as little as can be found in a few tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from agentspec.grammars.schema_tools.positions import DEFINITIONS, LISTS, Path, subschemas, with_subschemas

TRIES = 64
"""Keywords of a schema, and properties, that are tried one by one; further ones are left out together."""

ALL_TRIES = 400
"""Schemas that are tried in all: each takes an engine some milliseconds."""

_TOGETHER = (
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("patternProperties", "additionalProperties"),  # which forbids what no pattern names any more
)
_KEPT = {
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "allOf", "enum", "const", "$ref"),
    *("additionalProperties", "$defs", "definitions"),
    *("title", "description", "default", "examples", "$schema", "$id", "$comment"),
}
"""Keywords that stay in the first try: the shape of a schema, and what asserts nothing."""

_SEARCHED = ("properties", *DEFINITIONS, "patternProperties", *LISTS, "items", "additionalProperties")
"""Keywords in whose schemas parts are looked for; from others a part goes with the keyword."""

Steps = tuple[str | int, ...]


@dataclass(frozen=True)
class _Part:
    """Keywords of one place that are taken out together."""

    path: Steps
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.keywords[0]} at {_pointer(self.path)}"


def expressible(schema: Any, why_not: Callable[[Any], str | None]) -> tuple[Any, tuple[str, ...]]:
    """Return a schema that an engine can express, which allows what the given one allows; and the parts it lacks.

    Args:
        schema: a JSON Schema.
        why_not: returns why an engine cannot express a schema; None where it can.
    """
    tries = itertools.count(1)
    return _expressible(schema, lambda part: why_not(part) if next(tries) <= ALL_TRIES else "too many tries")


def _expressible(schema: Any, why_not: Callable[[Any], str | None]) -> tuple[Any, tuple[str, ...]]:
    if why_not(schema) is None:
        return schema, ()
    parts = list(_parts(schema, ()))
    without = _without(schema, parts)
    if why_not(without) is None:
        return _with_as_many(schema, parts, why_not)
    return _by_properties(schema, why_not)


def repeatable(schema: Any, path: Steps = ()) -> Iterator[str]:
    """Yield the places where a key that is written twice, and counts once, would pass for two."""
    if not isinstance(schema, dict):
        return
    count, others = schema.get("minProperties"), schema.get("additionalProperties", True)
    is_open = others is not False or bool(schema.get("patternProperties"))
    if isinstance(count, int | float) and count > 1 and is_open:
        yield f"repeated keys at {_pointer(path)}"
    for step, inner in subschemas(schema):
        yield from repeatable(inner, (*path, *step))


def left_open(schema: Any) -> Any:
    """Return a schema whose objects may hold other properties explicitly, where they leave that unstated."""
    if not isinstance(schema, dict):
        return schema
    opened = with_subschemas(schema, lambda _, part: left_open(part))
    if schema.get("type") == "object" or "properties" in schema:
        opened.setdefault("additionalProperties", True)
    return opened


def _with_as_many(schema: Any, parts: list[_Part], why_not: Callable[[Any], str | None]) -> tuple[Any, tuple[str, ...]]:
    """Put back one part after the other, as far as the engine takes it."""
    left_out = list(parts)
    for part in parts[:TRIES]:
        others = [other for other in left_out if other != part]
        if why_not(_without(schema, others)) is None:
            left_out = others
    return _without(schema, left_out), tuple(map(str, left_out))


def _by_properties(schema: Any, why_not: Callable[[Any], str | None]) -> tuple[Any, tuple[str, ...]]:
    """Leave out whole properties; where that does not help, everything."""
    named = schema.get("properties") if isinstance(schema, dict) else None
    anything: Any = {"type": "object"} if isinstance(schema, dict) and schema.get("type") == "object" else {}
    if not isinstance(named, dict) or not named:
        return anything, ("everything at #",)
    beside = [name for name in ("type", "required", "additionalProperties", "$defs", "definitions") if name in schema]
    kept: dict[str, Any] = dict.fromkeys(named, True)
    for dropped in ((), ("$defs", "definitions"), ("$defs", "definitions", "additionalProperties")):
        shared = {name: schema[name] for name in beside if name not in dropped}
        if why_not({**shared, "properties": kept}) is None:
            break
    else:
        return anything, ("everything at #",)
    left_out = [f"{keyword} at #" for keyword in schema if keyword not in (*shared, "properties", *_KEPT - _ASSERTING)]
    for name, value in list(named.items())[:TRIES]:
        tried, missing = _expressible(value, lambda part: why_not({**shared, "properties": {**kept, name: part}}))  # noqa: B023
        kept[name] = tried
        left_out += [_below(text, name) for text in missing]
    left_out += [f"everything at {_pointer(('properties', name))}" for name in list(named)[TRIES:]]
    return {**shared, "properties": kept}, tuple(left_out)


_ASSERTING = {"anyOf", "allOf", "enum", "const", "$ref", "additionalProperties", "items", "prefixItems"}


def _below(text: str, name: str) -> str:
    what, _, place = text.rpartition(" at #")
    return f"{what} at {_pointer(('properties', name))}{place}"


def _parts(schema: Any, path: Steps) -> Iterator[_Part]:
    """Yield the parts that may be taken out, from the outside in."""
    if not isinstance(schema, dict):
        return
    seen: set[str] = set()
    for keyword in schema:
        group = next((group for group in _TOGETHER if keyword in group), (keyword,))
        if keyword not in _KEPT and keyword not in seen:
            yield _Part(path, tuple(name for name in group if name in schema))
            seen |= set(group)
    for step, inner in subschemas(schema):
        if step[0] in _SEARCHED:
            yield from _parts(inner, (*path, *step))


def _without(schema: Any, parts: Collection[_Part]) -> Any:
    by_place: dict[Steps, set[str]] = {}
    for part in parts:
        by_place.setdefault(part.path, set()).update(part.keywords)
    return _copied(schema, (), by_place)


def _copied(schema: Any, path: Steps, left_out: dict[Steps, set[str]]) -> Any:
    if not isinstance(schema, dict):
        return schema
    missing = left_out.get(path, set())
    copied = {keyword: value for keyword, value in schema.items() if keyword not in missing}
    is_coerced = "oneOf" in missing and "anyOf" not in schema
    if is_coerced:
        copied["anyOf"] = schema["oneOf"]  # one of them at least

    def inner(step: Path, part: Any) -> Any:
        origin = ("oneOf", *step[1:]) if is_coerced and step[0] == "anyOf" else step
        return _copied(part, (*path, *origin), left_out)

    return with_subschemas(copied, inner)


def _pointer(path: Steps) -> str:
    return "/".join(["#", *(str(step).replace("~", "~0").replace("/", "~1") for step in path)])
