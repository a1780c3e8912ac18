"""Combine JSON Schemas: the types they allow, their intersection and difference, and whether they are disjoint.

Types are sets of atoms here, so that they can be intersected: ``number`` is ``integer`` and ``fraction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from agentspec.errors import GrammarError
from agentspec.grammars.schema_tools import to_json

# Schemas that refer to others twice over grow exponentially.
MAX_LENGTH = 300_000  # characters of the expression: as many as are compiled

Schema = dict[str, Any]
Resolve = Callable[[Any, str], Any]
"""A function of a schema and its place: returns the schema that its ``$ref`` means; itself where it has none."""

KEYWORDS: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "divisibleBy"),
    "array": (
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "minContains", "maxContains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    ),
}
"""The keywords that assert something of values of one type."""

COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "type")
NEVER = ("$dynamicRef", "$recursiveRef", "extends", "disallow")
ASSERTING = {*COMBINING, *NEVER, *(keyword for keywords in KEYWORDS.values() for keyword in keywords)}
"""Whatever a schema holds besides these asserts nothing in any draft."""

ATOMS = {
    "string": {"string"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "boolean": {"boolean"},
    "null": {"null"},
    "array": {"array"},
    "object": {"object"},
}
ALL = frozenset(atom for atoms in ATOMS.values() for atom in atoms)

# Keywords that depend on each other: together, from two schemas, they would assert something else than either.
_TOGETHER = (
    {"items", "prefixItems", "additionalItems", "unevaluatedItems"},
    {"contains", "minContains", "maxContains"},
    {"minimum", "exclusiveMinimum"},
    {"maximum", "exclusiveMaximum"},
    {"if", "then", "else"},
)


def refuse(what: str, place: str) -> NoReturn:
    """Raise an error that names the keyword that is not built, and its place.

    Raises:
        GrammarError: always.
    """
    raise GrammarError(f"The outlines engine does not build {what} (at {place}).")


def asserting(schema: Schema) -> Schema:
    """Return the keywords of a schema that assert something."""
    return {keyword: value for keyword, value in schema.items() if keyword in ASSERTING}


def types(schema: Schema, place: str) -> frozenset[str]:
    """Return the atoms of the types that ``type`` allows."""
    named = schema.get("type", list(ATOMS))
    listed = named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) and name in ATOMS for name in listed):
        refuse(f"type {to_json(named)}", place)
    return frozenset(atom for name in listed for atom in ATOMS[name])


def named_types(atoms: Iterable[str], place: str) -> list[str]:
    """Return the value of ``type`` for a set of atoms."""
    left = set(atoms)
    if "fraction" in left and "integer" not in left:
        refuse("numbers without the integers", place)
    if "fraction" in left:
        left -= {"fraction", "integer"}
        return [*sorted(left), "number"]
    return sorted(left)


def atoms_of(value: Any) -> set[str]:
    """Return the atoms that a value may count as: whether 1.0 is an integer depends on the draft."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, float):
        return {"integer", "fraction"} if value.is_integer() else {"fraction"}
    kinds = {int: "integer", str: "string", list: "array", dict: "object"}
    return {kinds.get(type(value), "null")}


def values(schema: Schema) -> list[Any] | None:
    """Return the values that ``const`` or ``enum`` lists; None where there is neither."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def intersect(one: Any, other: Any, place: str) -> Any:
    """Return a schema of the values that two schemas allow. Neither may hold a ``$ref`` beside other keywords.

    Raises:
        GrammarError: for two different values of a keyword that cannot be combined.
    """
    if one is False or other is False:
        return False
    one, other = ({} if one is True else one), ({} if other is True else other)
    if not isinstance(one, dict) or not isinstance(other, dict):
        refuse("a schema that is no object", place)
    new = asserting(other)
    merged = {**one}
    if "type" in one and "type" in new:
        merged["type"] = named_types(types(one, place) & types(new, place), place)
        new.pop("type")
    if one.keys() & {"properties", "additionalProperties"} and new.keys() & {"properties", "additionalProperties"}:
        if "patternProperties" in {**one, **new}:
            refuse("patternProperties in two schemas at once", place)
        merged |= _intersect_properties(one, new, place)
        new = {k: v for k, v in new.items() if k not in ("properties", "additionalProperties")}
    if "required" in one and "required" in new:
        merged["required"] = [*required(one, place), *required(new, place)]
        new.pop("required")
    for keyword, value in new.items():
        if keyword in one and to_json(one[keyword]) != to_json(value):
            refuse(f"two different {keyword} for one value", place)
        for group in _TOGETHER:
            if keyword in group and keyword not in one and one.keys() & group:
                refuse(f"{keyword} beside {', '.join(sorted(one.keys() & group))} of another schema", place)
        merged[keyword] = value
    return merged


def _intersect_properties(one: Schema, other: Schema, place: str) -> Schema:
    rest = [schema.get("additionalProperties", True) for schema in (one, other)]
    named = [properties(schema, place) for schema in (one, other)]
    names = list(dict.fromkeys([*named[0], *named[1]]))
    return {
        "properties": {name: _conjoin(*(p.get(name, r) for p, r in zip(named, rest, strict=True))) for name in names},
        "additionalProperties": _conjoin(*rest),
    }


def _conjoin(one: Any, other: Any) -> Any:
    if one is True or one == {} or one == other:
        return other
    if other is True or other == {}:
        return one
    return False if one is False or other is False else {"allOf": [one, other]}


def subtract(schema: Schema, other: Any, resolve: Resolve, place: str) -> Schema | None:
    """Return a schema of values that ``schema`` allows and ``other`` does not; None where none is found.

    Sound only because objects are written with the properties of ``schema`` alone.
    """
    other = resolve(other, place)
    if other is False or (isinstance(other, dict) and are_disjoint(schema, other, resolve, place)):
        return schema
    if not isinstance(other, dict):
        return None
    stated = asserting(other)
    if stated.keys() == {"type"}:
        left = types(schema, place) - types(other, place)
        return {**schema, "type": named_types(left, place)} if left and values(schema) is None else None
    if types(schema, place) != {"object"} or not _is_plain_object(schema):
        return None
    for name in required(other, place):
        if name not in required(schema, place):
            left_out = {n: value for n, value in properties(schema, place).items() if n != name}
            return {**schema, "properties": left_out, "additionalProperties": False}
    return None


def _is_plain_object(schema: Schema) -> bool:
    """Whether its properties are all that its objects hold."""
    return "properties" in schema and not schema.keys() & ({*COMBINING, "patternProperties"} - {"type"})


def are_disjoint(one: Any, other: Any, resolve: Resolve, place: str) -> bool:
    """Whether it is sure that no value is valid under both schemas."""
    one, other = resolve(one, place), resolve(other, place)
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    if not types(one, place) & types(other, place):
        return True
    for first, second in ((one, other), (other, one)):
        named = values(first)
        if named is None:
            continue
        others = values(second)
        if others is not None:
            return not {to_json(_equal_form(v)) for v in named} & {to_json(_equal_form(v)) for v in others}
        if not any(atoms_of(value) & types(second, place) for value in named):
            return True
    if types(one, place) == types(other, place) == {"object"}:
        shared = set(required(one, place)) & set(required(other, place))
        one_of, other_of = properties(one, place), properties(other, place)
        return any(
            name in one_of and name in other_of and are_disjoint(one_of[name], other_of[name], resolve, place)
            for name in sorted(shared)
        )
    return False


def _equal_form(value: Any) -> Any:
    """Bring equal JSON values into one form: 1.0 is 1, and the order of keys does not matter."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_equal_form(item) for item in value]
    if isinstance(value, dict):
        return {name: _equal_form(value[name]) for name in sorted(value)}
    return value


def required(schema: Schema, place: str) -> list[str]:
    """Return the names in ``required``."""
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("required that is no list of names", place)
    return names


def properties(schema: Schema, place: str) -> dict[str, Any]:
    """Return the schemas in ``properties``."""
    named = schema.get("properties", {})
    if not isinstance(named, dict):
        refuse("properties that are no object", place)
    return named


def bound(schema: Schema, keyword: str, place: str) -> int | None:
    """Return the count that a keyword sets; None where it is absent."""
    count = schema.get(keyword)
    if count is None:
        return None
    is_whole = isinstance(count, int) or (isinstance(count, float) and count.is_integer())
    if isinstance(count, bool) or not is_whole or count < 0:
        refuse(f"{keyword} {to_json(count)}", place)
    return int(count)


def check_length(length: int, place: str) -> None:
    """Refuse an expression that is too long to be compiled.

    Raises:
        GrammarError: names the length and the limit.
    """
    if length > MAX_LENGTH:
        refuse(f"a schema that takes a regular expression of {length:,} characters, more than {MAX_LENGTH:,},", place)


def either(parts: Sequence[str | None], place: str) -> str:
    """Write an alternative of the expressions that are there."""
    kept = list(dict.fromkeys(part for part in parts if part is not None))
    if not kept:
        refuse("a schema without a value", place)
    return kept[0] if len(kept) == 1 else f"(?:{'|'.join(kept)})"
