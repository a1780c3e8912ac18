"""JSON Schemas without what a grammar engine cannot express: as little is left out as can be found in a few tries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

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

_OF_SCHEMAS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Part:
    """Keywords of one place that are taken out together."""

    path: Path
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.keywords[0]} at {_pointer(self.path)}"


def expressible(schema: Any, why_not: Callable[[Any], str | None]) -> tuple[Any, tuple[str, ...]]:
    """Return a schema that an engine can express and that allows what the given one does; and what it lacks.

    Args:
        schema: a JSON Schema.
        why_not: says why an engine cannot express a schema; None where it can.
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


def repeatable(schema: Any, path: Path = ()) -> Iterator[str]:
    """Yield the places where a key that is written twice, and counts once, would pass for two."""
    if not isinstance(schema, dict):
        return
    count, others = schema.get("minProperties"), schema.get("additionalProperties", True)
    is_open = others is not False or bool(schema.get("patternProperties"))
    if isinstance(count, int | float) and count > 1 and is_open:
        yield f"repeated keys at {_pointer(path)}"
    for keyword, inner, step in inner_schemas(schema):
        yield from repeatable(inner, (*path, keyword, *step))


def left_open(schema: Any) -> Any:
    """Return a schema whose objects say that they may hold other properties, where they do not say it."""
    if not isinstance(schema, dict):
        return schema
    opened = schema.copy()
    for keyword, inner, step in inner_schemas(schema):
        put(opened, keyword, step, left_open(inner))
    if schema.get("type") == "object" or "properties" in schema:
        opened.setdefault("additionalProperties", True)
    return opened


def put(schema: dict[str, Any], keyword: str, step: Path, inner: Any) -> None:
    """Put a schema in the place of another, in a copy of what holds it."""
    if not step:
        schema[keyword] = inner
        return
    schema[keyword] = schema[keyword].copy()
    schema[keyword][step[0]] = inner


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
    for name, said in list(named.items())[:TRIES]:
        tried, missing = _expressible(said, lambda part: why_not({**shared, "properties": {**kept, name: part}}))  # noqa: B023
        kept[name] = tried
        left_out += [_below(text, name) for text in missing]
    left_out += [f"everything at {_pointer(('properties', name))}" for name in list(named)[TRIES:]]
    return {**shared, "properties": kept}, tuple(left_out)


_ASSERTING = {"anyOf", "allOf", "enum", "const", "$ref", "additionalProperties", "items", "prefixItems"}


def _below(text: str, name: str) -> str:
    what, _, place = text.rpartition(" at #")
    return f"{what} at {_pointer(('properties', name))}{place}"


def _parts(schema: Any, path: Path) -> Iterator[_Part]:
    """What may be taken out, from the outside in."""
    if not isinstance(schema, dict):
        return
    seen: set[str] = set()
    for keyword in schema:
        group = next((group for group in _TOGETHER if keyword in group), (keyword,))
        if keyword not in _KEPT and keyword not in seen:
            yield _Part(path, tuple(name for name in group if name in schema))
            seen |= set(group)
    for keyword, inner, step in inner_schemas(schema):
        yield from _parts(inner, (*path, keyword, *step))


def inner_schemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any, Path]]:
    """The schemas within a schema: under which keyword, and where there."""
    for keyword, said in schema.items():
        if keyword in _OF_SCHEMAS and isinstance(said, dict):
            yield from ((keyword, inner, (name,)) for name, inner in said.items())
        elif (keyword in _LISTS or keyword == "items") and isinstance(said, list):
            yield from ((keyword, inner, (number,)) for number, inner in enumerate(said))
        elif keyword in _SINGLE:
            yield keyword, said, ()


def _without(schema: Any, parts: Collection[_Part]) -> Any:
    by_place: dict[Path, set[str]] = {}
    for part in parts:
        by_place.setdefault(part.path, set()).update(part.keywords)
    return _copied(schema, (), by_place)


def _copied(schema: Any, path: Path, left_out: dict[Path, set[str]]) -> Any:
    if not isinstance(schema, dict):
        return schema
    missing = left_out.get(path, set())
    copied = {keyword: said for keyword, said in schema.items() if keyword not in missing}
    if "oneOf" in missing and "anyOf" not in schema:
        copied["anyOf"] = schema["oneOf"]  # one of them at least
    for keyword, inner, step in list(inner_schemas(copied)):
        origin = "oneOf" if keyword == "anyOf" and "oneOf" in missing and "anyOf" not in schema else keyword
        put(copied, keyword, step, _copied(inner, (*path, origin, *step), left_out))
    return copied


def _pointer(path: Path) -> str:
    return "/".join(["#", *(str(step).replace("~", "~0").replace("/", "~1") for step in path)])
