"""Write JSON Schemas as regular expressions of texts in our JSON form.

Sound: what the expression matches is valid under the schema. A keyword that cannot be written soundly is refused by
name and place. The language is narrower than the schema: objects hold their named properties in the order of the
schema and no others. Values of any type nest at most two deep, and numbers with bounds have no exponent. An ``enum`` is
written as ``json.dumps`` writes it, and a ``format`` is what ``formats.py`` defines.

outlines-core has such a writer too (``json_schema.build_regex_from_schema``). This one stays for two reasons. It serves
13 of 400 real schemas (3.2 %) that llguidance refuses, for ``oneOf``, ``propertyNames``, ``dependencies``, ``not``,
counted properties and ``if``; 9 of them accept every valid instance. With a sound guard outlines-core would serve few
of these or none: beside ``properties`` version 0.2.14 drops such keywords, and it reads ``oneOf`` as ``anyOf``. It also
drops bounds of numbers, ``multipleOf`` and ``uniqueItems``. It leaves names and patterns unquoted, and its ``uri`` and
``email`` match broken JSON.
Count again with ``python examples/benchmark/schemas.py SCHEMAS.jsonl --engine llguidance outlines --outputs 0``.
"""

from __future__ import annotations

import math
import urllib.parse
from typing import Any

from agentspec.errors import GrammarError
from agentspec.grammars.outlines.containers import any_value, array_regex, object_regex
from agentspec.grammars.outlines.formats import FORMATS, REFUSED
from agentspec.grammars.outlines.numbers import integer, number
from agentspec.grammars.outlines.pattern import pattern
from agentspec.grammars.outlines.schemas import (
    ATOMS,
    KEYWORDS,
    NEVER,
    Schema,
    are_disjoint,
    asserting,
    atoms_of,
    bound,
    check_length,
    either,
    intersect,
    named_types,
    refuse,
    subtract,
    types,
    values,
)
from agentspec.grammars.outlines.text import CHARACTER, Pattern, in_quotes
from agentspec.grammars.schema_tools import checked, to_json

MAX_COUNTED = 5_000  # characters of a string: each takes 10 states, of 50,000
MAX_SCHEMAS = 20_000  # parts, each counted as often as it is referred to

_DRAFT_3 = "http://json-schema.org/draft-03/schema"
_DRAFT_4 = "http://json-schema.org/draft-04/schema"


def json_regex(schema: Schema | bool) -> str:
    """Return a regular expression of JSON texts that are valid under a schema.

    Raises:
        GrammarError: for a schema that is not built: names the keyword and its place.
    """
    schema = checked(schema)
    try:
        return Writer(schema).value(schema, "#", ())
    except RecursionError as error:
        raise GrammarError("The outlines engine does not build recursive schemas, nor schemas this deep.") from error


class Writer:
    """The writer of one document's parts.

    In its methods ``place`` is a JSON pointer, and ``inside`` are the ``$ref``s being followed.
    """

    def __init__(self, root: Schema | bool) -> None:
        self._root = root
        named = root.get("$schema") if isinstance(root, dict) else None
        self.dialect = named.rstrip("#") if isinstance(named, str) else ""
        self._written = 0
        if self.dialect == _DRAFT_3:
            refuse("draft 3, where a boolean makes a property required,", "#")

    def value(self, schema: Any, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of a schema."""
        self._written += 1
        if self._written > MAX_SCHEMAS:
            refuse(f"a schema of more than {MAX_SCHEMAS} parts", place)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            refuse("the schema false" if schema is False else "a schema that is no object", place)
        for keyword in NEVER:
            if keyword in schema:
                refuse(keyword, place)
        if not asserting(schema):
            return any_value()
        self._check_no_identifier(schema, place)
        for keyword, write in _COMBINED.items():
            if keyword in schema:
                return _bounded(write(self, schema, place, inside), place)
        parts = [_BY_TYPE[name](self, schema, place, inside) for name in named_types(types(schema, place), place)]
        return _bounded(either(parts, place), place)

    def resolved(self, schema: Any, place: str) -> Any:
        """Return the schema that a ``$ref`` without other keywords means."""
        seen = set()
        while isinstance(schema, dict) and asserting(schema).keys() == {"$ref"}:
            if schema["$ref"] in seen:
                refuse("a recursive $ref", place)
            seen.add(schema["$ref"])
            schema = self._target(schema["$ref"], place)
        return schema

    def _target(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            refuse(f"$ref to {to_json(reference)}, only to a place in the same document", place)
        found: Any = self._root
        for part in urllib.parse.unquote(reference).split("/")[1:]:
            step: Any = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal():
                step = int(step)
            try:
                found = found[step]
            except (KeyError, IndexError, TypeError):
                refuse(f"$ref to {reference}, which the document does not have", place)
        return found

    def _check_no_identifier(self, schema: Schema, place: str) -> None:
        """Refuse references below an identifier, which would count from there."""
        root = self._root if isinstance(self._root, dict) else {}
        for name in ("$id", "id"):
            if isinstance(schema.get(name), str) and schema[name] != root.get(name) and '"$ref"' in to_json(schema):
                refuse(f"$ref below a subschema with an {name} of its own", place)

    def reference(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of a ``$ref`` and the keywords beside it."""
        target = schema["$ref"]
        if target in inside:
            refuse(f"a recursive $ref, here to {target}", place)
        # Keywords beside a `$ref` assert from draft 2019-09 on; in older drafts, to obey them is to allow less.
        beside = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
        found = self._target(target, place)
        return self.value(intersect(found, beside, place) if asserting(beside) else found, place, (*inside, target))

    def all_of(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of ``allOf`` and the keywords beside it."""
        merged: Any = {keyword: value for keyword, value in schema.items() if keyword != "allOf"}
        for part in _parts(schema, "allOf", place):
            while isinstance(part, dict) and "$ref" in part:
                target = part["$ref"]
                if target in inside:
                    refuse(f"a recursive $ref, here to {target}", place)
                inside = (*inside, target)
                beside = {keyword: value for keyword, value in part.items() if keyword != "$ref"}
                part = intersect(self._target(target, place), beside, place)
            if isinstance(part, dict) and "allOf" in part and "allOf" in merged:
                refuse("allOf within allOf", place)
            merged = intersect(merged, part, place)
        return self.value(merged, place, inside)

    def any_of(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of ``anyOf`` and the keywords beside it."""
        base = {keyword: value for keyword, value in schema.items() if keyword != "anyOf"}
        branches = _parts(schema, "anyOf", place)
        return either(
            [self._branch(base, part, f"{place}/anyOf/{k}", inside) for k, part in enumerate(branches)], place
        )

    def _branch(self, base: Schema, part: Any, place: str, inside: tuple[str, ...]) -> str | None:
        if part is False:
            return None
        return self.value({**base, "allOf": [part]} if asserting(base) else part, place, inside)

    def one_of(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of ``oneOf``, of each member those that no other member allows."""
        base = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        branches = _parts(schema, "oneOf", place)
        written = []
        for k, part in enumerate(branches):
            alone: Any = part
            for other in (*branches[:k], *branches[k + 1 :]):
                if are_disjoint(alone, other, self.resolved, place):
                    continue
                alone = intersect(base, self.resolved(alone, place), place) if alone is part else alone
                left = subtract(alone, other, self.resolved, place) if isinstance(alone, dict) else None
                if left is None:
                    refuse("oneOf whose schemas may overlap", place)
                alone = left
            written.append(self._branch(base if alone is part else {}, alone, f"{place}/oneOf/{k}", inside))
        return either(written, place)

    def negation(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values that ``not`` leaves."""
        base = {keyword: value for keyword, value in schema.items() if keyword != "not"}
        left = subtract(base, schema["not"], self.resolved, place)
        if left is None:
            refuse(f"not {to_json(schema['not'])[:60]}", place)
        return self.value(left, place, inside)

    def condition(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of ``if`` with ``then``, and those of ``else``."""
        base = {keyword: value for keyword, value in schema.items() if keyword not in ("if", "then", "else")}
        if "if" not in schema:
            return self.value(base, place, inside)
        met = {**base, "allOf": [*base.get("allOf", []), schema["if"], schema.get("then", True)]}
        unmet: Schema | None = intersect(base, self.resolved(schema.get("else", True), place), place)
        unmet = subtract(unmet, schema["if"], self.resolved, place) if unmet else None
        if unmet is None:
            refuse("if", place)
        return either([self.value(met, place, inside), self.value(unmet, place, inside)], place)

    def enumeration(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the values of ``enum`` or ``const`` that ``type`` allows."""
        named, allowed = values(schema), types(schema, place)
        if named is None or ("const" in schema and "enum" in schema):
            refuse("enum", place)
        kept = [value for value in named if atoms_of(value) <= allowed]
        for kind, keywords in KEYWORDS.items():
            beside = [keyword for keyword in keywords if keyword in schema]
            if beside and any(atoms_of(value) & ATOMS[kind] for value in kept):
                refuse(f"{beside[0]} beside enum", place)
        return either([_constant(value, place) for value in kept], place)

    def string(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str:
        """Write the strings of a schema."""
        low, high = (bound(schema, keyword, place) for keyword in ("minLength", "maxLength"))
        form = schema.get("format")
        if isinstance(form, str) and form in REFUSED:
            refuse(f"format {form}", place)
        known = FORMATS.get(form) if isinstance(form, str) else None
        if "pattern" in schema:
            if known is not None:
                refuse("pattern beside format", place)
            known = _pattern(schema["pattern"], place)
        counted = max(low or 0, high or 0)
        if known is None and counted > MAX_COUNTED:
            refuse(f"a string whose first {counted} characters are counted", place)
        if known is None:
            return f'"{CHARACTER}{{{low or 0},{"" if high is None else high}}}"'
        if (low or 0) > known.shortest or (high is not None and (known.longest is None or known.longest > high)):
            refuse(f"minLength and maxLength that cut the {'pattern' if 'pattern' in schema else 'format'}", place)
        return f'"(?:{known.regex})"'

    def number(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str | None:
        """Write the numbers of a schema; None where there are none."""
        for keyword in ("multipleOf", "divisibleBy"):
            if keyword in schema:
                refuse(keyword, place)
        low, high = self._bounds(schema, place)
        edges = [edge for edge, _ in (low, high) if edge is not None]
        # Beyond 2**53 a decimal that is read as a float may cross the bound.
        if any(edge != int(edge) or abs(edge) > 2**53 for edge in edges) or low[1] or high[1]:
            refuse("bounds of a number that are excluded, no integers or beyond 2**53", place)
        return number(*(None if edge is None else int(edge) for edge, _ in (low, high)))

    def integer(self, schema: Schema, place: str, inside: tuple[str, ...]) -> str | None:
        """Write the integers of a schema; None where there are none."""
        if schema.get("multipleOf", 1) != 1 or "divisibleBy" in schema:
            refuse("multipleOf", place)
        (low, above), (high, below) = self._bounds(schema, place)
        first = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
        last = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
        return integer(first, last)

    def _bounds(self, schema: Schema, place: str) -> tuple[tuple[Any, bool], tuple[Any, bool]]:
        """Return the lower and the upper bound, each with whether it is excluded."""
        bounds: list[tuple[Any, Any]] = []
        for name, sign in (("Minimum", 1), ("Maximum", -1)):
            edge, beyond = schema.get(name.lower()), schema.get(f"exclusive{name}")
            if isinstance(beyond, bool) and self.dialect == _DRAFT_4:
                edge, beyond, excluded = edge, None, beyond and edge is not None
            else:
                excluded = False
            for given in (edge, beyond):
                if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
                    refuse(f"a bound {to_json(given)}", place)
                if isinstance(given, float) and not math.isfinite(given):
                    refuse("an infinite bound", place)
            if beyond is not None and (edge is None or sign * beyond >= sign * edge):
                edge, excluded = beyond, True
            bounds.append((edge, excluded))
        return bounds[0], bounds[1]


def _parts(schema: Schema, keyword: str, place: str) -> list[Any]:
    if not isinstance(schema[keyword], list) or not schema[keyword]:
        refuse(f"{keyword} that is no list of schemas", place)
    parts: list[Any] = schema[keyword]
    return parts


def _pattern(source: Any, place: str) -> Pattern:
    if not isinstance(source, str):
        refuse(f"the pattern {to_json(source)}", place)
    try:
        return pattern(source)
    except ValueError as error:
        refuse(str(error), place)


def _constant(value: Any, place: str) -> str:
    """Write a value as ``json.dumps`` does."""
    if isinstance(value, float) and not math.isfinite(value):
        refuse("a number that is not finite", place)
    return in_quotes(value)


def _bounded(regex: str, place: str) -> str:
    check_length(len(regex), place)
    return regex


_COMBINED = {
    "$ref": Writer.reference,
    "if": Writer.condition,
    "then": Writer.condition,
    "else": Writer.condition,
    "allOf": Writer.all_of,
    "oneOf": Writer.one_of,
    "anyOf": Writer.any_of,
    "not": Writer.negation,
    "const": Writer.enumeration,
    "enum": Writer.enumeration,
}
_BY_TYPE = {
    "string": Writer.string,
    "number": Writer.number,
    "integer": Writer.integer,
    "boolean": lambda *_: "(?:true|false)",
    "null": lambda *_: "null",
    "array": array_regex,
    "object": object_regex,
}
