"""Decide whether a schema surely has instances: a heuristic on the safe side, where False means unsure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.grammars.schema_tools.positions import DEFINITIONS, Schema, subschemas
from agentspec.grammars.schema_tools.references import target
from agentspec.grammars.schema_tools.written import to_json

_STRING = ("minLength", "maxLength", "pattern", "format")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("items", "prefixItems", "minItems", "maxItems")
_OBJECT = ("properties", "required", "additionalProperties", "unevaluatedProperties")
_COMBINING = ("anyOf", "enum", "const", "type")
_UNSURE = (
    *("$dynamicRef", "$recursiveRef", "oneOf", "not", "if", "then", "else", "uniqueItems", "contains", "minContains"),
    *("maxContains", "unevaluatedItems", "additionalItems", "patternProperties", "minProperties", "maxProperties"),
    *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "divisibleBy", "extends", "disallow"),
)
ASSERTING = {"$ref", "allOf", *_COMBINING, *_STRING, *_NUMBER, *_ARRAY, *_OBJECT, *_UNSURE}
"""Whatever a schema holds besides these asserts nothing."""

_DEEP = 40


@dataclass(frozen=True)
class Satisfiable:
    """A check of the schemas of one document, whose references are pointers from its root."""

    root: Any

    def is_lively(self, schema: Any) -> bool:
        """Whether a schema surely has instances, and each property that it names occurs in one."""
        left, seen = [schema], set()
        while left:
            part = left.pop()
            if not self.has_instance(part) or not _has_room(part):
                return False
            if not isinstance(part, dict):
                continue
            left += [inner for path, inner in subschemas(part) if path[0] not in DEFINITIONS and not _ends(path, inner)]
            reference = part.get("$ref")
            if reference is not None and reference not in seen:
                seen.add(reference)
                left.append(target(self.root, reference))
        return True

    def has_instance(self, schema: Any, inside: frozenset[str] = frozenset(), deep: int = 0) -> bool:
        """Whether a schema surely has an instance.

        Args:
            schema: of the document.
            inside: references that are being followed: a schema that needs itself has no end.
            deep: calls within each other.
        """
        flat = None if deep > _DEEP else self._flat(schema, inside)
        if flat is None:
            return False
        parts, inside = flat
        merged = merge([part for part in parts if part is not True])
        return merged is not None and self._holds(merged, lambda part: self.has_instance(part, inside, deep + 1))

    def _flat(self, schema: Any, inside: frozenset[str]) -> tuple[list[Any], frozenset[str]] | None:
        """Return a schema, those it refers to and its ``allOf`` as a list; None where it needs itself."""
        parts, left, seen = [], [schema], set(inside)
        while left:
            part = left.pop()
            if not isinstance(part, dict):
                parts.append(part)
                continue
            reference = part.get("$ref")
            if reference in seen:
                return None
            if reference is not None:
                seen.add(reference)
                left.append(target(self.root, reference))
            left += part.get("allOf", ())
            parts.append({keyword: value for keyword, value in part.items() if keyword not in ("$ref", "allOf")})
        return parts, frozenset(seen)

    def _holds(self, schema: Schema, holds: Callable[[Any], bool]) -> bool:
        """Whether a schema without references has an instance; ``holds`` decides for those within it."""
        stated = schema.keys() & ASSERTING
        if stated & set(_UNSURE):
            return False
        if "anyOf" in stated:
            return stated <= {"anyOf", "type"} and any(holds(_of_type(part, schema)) for part in schema["anyOf"])
        if stated & {"enum", "const"}:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return len(stated - {"type"}) == 1 and any(kind_of(value) & kinds(schema) for value in values)
        return any(_BY_KIND[kind](schema, holds) for kind in kinds(schema))


def merge(parts: Sequence[Any]) -> Schema | None:
    """Return one schema for several that hold together; None where that is not simple."""
    if not all(isinstance(part, dict) for part in parts):
        return None
    asserting = [part for part in parts if part.keys() & ASSERTING]
    if len(asserting) == 1:
        return dict(asserting[0])
    merged: Schema = {
        "properties": {},
        "required": [],
        "type": sorted(frozenset(_BY_KIND).intersection(*map(kinds, asserting))),
    }
    for part in asserting:
        if part.keys() & ASSERTING - {"properties", "required", "type"}:
            return None
        for name, value in part.get("properties", {}).items():
            if to_json(merged["properties"].setdefault(name, value)) != to_json(value):
                return None
        merged["required"] += part.get("required", [])
    return merged


def kinds(schema: Schema) -> frozenset[str]:
    """Return the types that ``type`` allows; ``number`` with ``integer``, which it contains."""
    named = schema.get("type", list(_BY_KIND))
    known = {named} if isinstance(named, str) else set(named)
    return frozenset((known | ({"integer"} if "number" in known else set())) & _BY_KIND.keys())


def kind_of(value: Any) -> frozenset[str]:
    """Return the types of a value."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int | float):
        return frozenset(("number", "integer") if value == value // 1 else ("number",))
    known: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return frozenset((known.get(type(value), "null"),))


def _of_type(part: Any, schema: Schema) -> Any:
    return {"allOf": [part, {"type": schema["type"]}]} if "type" in schema else part


def _ends(path: Sequence[Any], schema: Any) -> bool:
    """Whether a place only forbids anything more."""
    return schema is False and path[0] in ("additionalProperties", "unevaluatedProperties", "items")


def _has_room(schema: Any) -> bool:
    """Whether a list can have every item that its schema describes."""
    if not isinstance(schema, dict) or "maxItems" not in schema:
        return True
    return bool(schema["maxItems"] > len(schema.get("prefixItems", ())))


def _string(schema: Schema, holds: Callable[[Any], bool]) -> bool:
    lengths = schema.keys() & {"minLength", "maxLength"}
    if schema.keys() & {"pattern", "format"}:
        return not lengths
    return bool(schema.get("minLength", 0) <= schema.get("maxLength", float("inf")))


def _number(schema: Schema, holds: Callable[[Any], bool]) -> bool:
    low = [schema[keyword] for keyword in ("minimum", "exclusiveMinimum") if keyword in schema]
    high = [schema[keyword] for keyword in ("maximum", "exclusiveMaximum") if keyword in schema]
    if any(isinstance(edge, bool) for edge in (*low, *high)):
        return False
    return not low or not high or ("multipleOf" not in schema and min(high) - max(low) >= 2)


def _array(schema: Schema, holds: Callable[[Any], bool]) -> bool:
    low, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if low > schema.get("maxItems", low) or isinstance(schema.get("items"), list):
        return False
    return all(map(holds, first[: int(low)])) and (low <= len(first) or holds(schema.get("items", True)))


def _object(schema: Schema, holds: Callable[[Any], bool]) -> bool:
    named = schema.get("properties", {})
    others = [schema[keyword] for keyword in ("additionalProperties", "unevaluatedProperties") if keyword in schema]
    return all(holds(named[name]) if name in named else all(map(holds, others)) for name in schema.get("required", ()))


_BY_KIND: dict[str, Callable[[Schema, Callable[[Any], bool]], bool]] = {
    "string": _string,
    "number": _number,
    "integer": _number,
    "boolean": lambda schema, holds: True,
    "null": lambda schema, holds: True,
    "array": _array,
    "object": _object,
}
