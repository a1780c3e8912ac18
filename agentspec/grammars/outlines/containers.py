"""Write objects and arrays as regular expressions, in our JSON form."""

from __future__ import annotations

import re
from typing import Any, Protocol

from agentspec.errors import cut, shown
from agentspec.grammars.outlines.numbers import NUMBER
from agentspec.grammars.outlines.schemas import (
    Schema,
    bound,
    check_length,
    either,
    intersect,
    properties,
    refuse,
    required,
)
from agentspec.grammars.outlines.text import CHARACTER, in_quotes

ANY_DEPTH = 2
STRING = f'"{CHARACTER}*"'

_WITH_TUPLES = {  # before draft 2020-12, a list of `items` is what `prefixItems` is since
    "https://json-schema.org/draft/2019-09/schema",
    *(f"http://json-schema.org/draft-0{draft}/schema" for draft in (4, 6, 7)),
}


class ValueWriter(Protocol):
    """The writer of the values inside."""

    dialect: str

    def value(self, schema: Any, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of a schema."""
        ...


def any_value(depth: int = ANY_DEPTH) -> str:
    """Write JSON values of any type that nest at most ``depth`` deep."""
    scalar = f"{STRING}|{NUMBER}|true|false|null"
    if depth == 0:
        return f"(?:{scalar})"
    item = any_value(depth - 1)
    return f"(?:{scalar}|{_sequence('[', item, 0, None, ']')}|{_sequence('{', f'{STRING}: {item}', 0, None, '}')})"


def object_regex(writer: ValueWriter, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
    """Write objects of the named properties, in their order; where none is named, of any others.

    Raises:
        GrammarError: for a keyword that is not built.
    """
    if schema.get("unevaluatedProperties", True) is not True:
        refuse("unevaluatedProperties", place)
    if "dependentSchemas" in schema:
        refuse("dependentSchemas", place)
    for keyword in ("dependencies", "dependentRequired"):
        if schema.get(keyword):
            return _dependent(writer, schema, keyword, place, inside)
    named = _named(schema, place)
    if named is None:
        return _map(writer, schema, place, inside)
    needed = set(required(schema, place))
    fields = [
        (f"{in_quotes(name)}: {writer.value(part, f'{place}/properties/{name}', inside)}", name in needed)
        for name, part in named.items()
        if part is not False
    ]
    low, high = bound(schema, "minProperties", place) or 0, bound(schema, "maxProperties", place)
    if low > max(len(needed), 1) or (high is not None and high < len(fields)):
        refuse("minProperties or maxProperties that the named properties do not meet by themselves", place)
    return rf"\{{{_fields(fields, is_empty_allowed=low == 0, place=place)}\}}"


def _named(schema: Schema, place: str) -> dict[str, Any] | None:
    """Return the schema of each property that an object may hold; None where it may hold any."""
    patterns, rest = _patterns(schema, place), schema.get("additionalProperties", True)
    needed = required(schema, place)
    if not schema.get("properties") and not needed and (rest is not False or patterns):
        return None
    named = {}
    for name in dict.fromkeys([*properties(schema, place), *needed]):
        stated = [p for source, p in patterns.items() if _matches(source, name, place)]
        if name in properties(schema, place):
            stated.insert(0, properties(schema, place)[name])
        if not _is_name(name, schema.get("propertyNames", True), place) or False in (stated or [rest]):
            if name in needed:
                refuse(f"required {shown(name)}, which the schema does not allow,", place)
            continue
        named[name] = stated[0] if len(stated) == 1 else {"allOf": stated} if stated else rest
    return named


def _fields(fields: list[tuple[str, bool]], *, is_empty_allowed: bool, place: str) -> str:
    """Write properties in their order, with commas between those that are there."""
    last = max((k for k, (_, is_needed) in enumerate(fields) if is_needed), default=None)
    if last is not None:
        preceding = [f"{field}, " if is_needed else f"(?:{field}, )?" for field, is_needed in fields[:last]]
        following = [f"(?:, {field})?" for field, _ in fields[last + 1 :]]
        return "".join([*preceding, fields[last][0], *following])
    if not fields:
        return "" if is_empty_allowed else refuse("minProperties of an empty object", place)
    # Each property that may come first is written with all later ones after it: counted before it is built.
    check_length(sum((k + 1) * (len(field) + len("(?:, )?")) for k, (field, _) in enumerate(fields)), place)
    firsts = [field + "".join(f"(?:, {later})?" for later, _ in fields[k + 1 :]) for k, (field, _) in enumerate(fields)]
    return f"(?:{'|'.join(firsts)}){'?' if is_empty_allowed else ''}"


def _map(writer: ValueWriter, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
    """Write objects whose names are free."""
    low, high = bound(schema, "minProperties", place) or 0, bound(schema, "maxProperties", place)
    if low > 1:  # a name may be written twice and counts once
        refuse(f"minProperties {low}", place)
    patterns, others = _patterns(schema, place), schema.get("additionalProperties", True)
    names: Any = intersect({"type": "string"}, schema.get("propertyNames", True), place)
    if patterns:
        if len(patterns) > 1:
            refuse("patternProperties with several patterns, which a name may match at once,", place)
        [(source, others)] = patterns.items()
        names = intersect(names, {"pattern": source}, place)
    if others is False or high == 0:
        return r"\{\}" if low == 0 else refuse("minProperties of an empty object", place)
    name = writer.value(names, f"{place}/propertyNames", inside)
    return _sequence("{", f"{name}: {writer.value(others, f'{place}/additionalProperties', inside)}", low, high, "}")


def _dependent(writer: ValueWriter, schema: Schema, keyword: str, place: str, inside: tuple[str, ...]) -> str:
    """Write objects without the first property that others depend on, and those with it and its needs."""
    (trigger, needs), *others = schema[keyword].items()
    rest = {**schema, keyword: dict(others)}
    if _named(schema, place) is None or "patternProperties" in schema:
        refuse(keyword, place)
    if isinstance(needs, str):  # draft 3
        needs = [needs]
    without = {
        **rest,
        "properties": {name: part for name, part in properties(schema, place).items() if name != trigger},
        "additionalProperties": False,
    }
    with_it: Any = {**rest, "required": [*required(schema, place), trigger]}
    with_it = intersect(with_it, {"required": needs} if isinstance(needs, list) else needs, place)
    variants = [] if trigger in required(schema, place) else [without]
    if trigger in (_named(schema, place) or {}):
        variants.append(with_it)
    return either([writer.value({**variant, "type": "object"}, place, inside) for variant in variants], place)


def _patterns(schema: Schema, place: str) -> dict[str, Any]:
    patterns = schema.get("patternProperties", {})
    if not isinstance(patterns, dict):
        refuse("patternProperties that are no object", place)
    return patterns


def _matches(source: str, name: str, place: str) -> bool:
    try:
        return re.search(source, name) is not None
    except re.error as error:
        refuse(f"the pattern {shown(source)} ({cut(str(error))})", place)


def _is_name(name: str, names: Any, place: str) -> bool:
    """Whether ``propertyNames`` allows a name."""
    if isinstance(names, bool):
        return names
    known = {k: v for k, v in names.items() if k in ("pattern", "enum", "minLength", "maxLength", "type")}
    if not isinstance(names, dict) or intersect({}, names, place) != known or known.get("type", "string") != "string":
        refuse("propertyNames", place)
    low, high = bound(names, "minLength", place), bound(names, "maxLength", place)
    return (
        ("pattern" not in known or _matches(known["pattern"], name, place))
        and ("enum" not in known or name in known["enum"])
        and (low or 0) <= len(name)
        and (high is None or len(name) <= high)
    )


def array_regex(writer: ValueWriter, schema: Schema, place: str, inside: tuple[str, ...]) -> str | None:
    """Write arrays of the first items, each with its own schema, and more that share one.

    Raises:
        GrammarError: for a keyword that is not built.
    """
    for keyword in ("contains", "minContains", "maxContains"):
        if keyword in schema:
            refuse(keyword, place)
    if schema.get("unevaluatedItems", True) is not True:
        refuse("unevaluatedItems", place)
    first, rest = _items(writer, schema, place)
    low, high = bound(schema, "minItems", place) or 0, bound(schema, "maxItems", place)
    ends = [k for k, part in enumerate(first) if part is False] + ([len(first)] if rest is False else [])
    high = min([*ends, *([] if high is None else [high])], default=None)
    if schema.get("uniqueItems", False) is not False and (high is None or high > 1):
        refuse("uniqueItems", place)
    if high is not None and high < low:
        return None
    items = [writer.value(part, f"{place}/prefixItems/{k}", inside) for k, part in enumerate(first[:high])]
    more = None if high is not None and high <= len(items) else writer.value(rest, f"{place}/items", inside)
    if not items:
        return r"\[\]" if more is None else _sequence("[", more, low, high, "]")
    rest_of_items = "" if more is None else f"(?:, {more}){_times(max(low - len(items), 0), high, len(items))}"
    for k in range(len(items) - 1, 0, -1):
        rest_of_items = f", {items[k]}{rest_of_items}" if k < low else f"(?:, {items[k]}{rest_of_items})?"
    return rf"\[{items[0]}{rest_of_items}\]" if low else rf"\[(?:{items[0]}{rest_of_items})?\]"


def _items(writer: ValueWriter, schema: Schema, place: str) -> tuple[list[Any], Any]:
    """Return the schemas of the first items, and that of the others."""
    items = schema.get("items", True)
    if writer.dialect in _WITH_TUPLES:
        return (items, schema.get("additionalItems", True)) if isinstance(items, list) else ([], items)
    first = schema.get("prefixItems", [])
    if isinstance(items, list) or not isinstance(first, list):
        refuse("a list of items, but for drafts before 2020-12 that $schema names", place)
    return first, items


def _sequence(opener: str, item: str, low: int, high: int | None, closer: str) -> str:
    """Write items between brackets; ``high`` is not zero."""
    items = f"{item}(?:, {item}){_times(max(low - 1, 0), high, 1)}"
    return rf"\{opener}{items}\{closer}" if low else rf"\{opener}(?:{items})?\{closer}"


def _times(low: int, high: int | None, done: int) -> str:
    return f"{{{low},{'' if high is None else high - done}}}"
