"""Validate texts against their JSON Schema, by ``jsonschema``, where a grammar could not express all of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from agentspec.errors import GrammarError, cut
from agentspec.grammars.schema_tools.ecma import matches
from agentspec.grammars.schema_tools.formats import CHECKS


def validator(schema: str) -> Callable[[str], str | None]:
    """Return a function from a text to the reason why it is no instance of a JSON Schema; None where it is one.

    Patterns are those of ECMA 262, multiples are decimal, all formats of JSON Schema are checked, and an object that
    repeats a key is no instance.

    Args:
        schema: JSON, in the dialect that its ``$schema`` declares, 2020-12 where it declares none.

    Raises:
        GrammarError: for an invalid schema.
    """
    import jsonschema  # slow, and most requests have no schema
    import jsonschema_specifications
    import referencing.exceptions

    described: Any = json.loads(schema)
    kind: Any = jsonschema.validators.validator_for(described, default=jsonschema.Draft202012Validator)
    formats = _formats(kind.FORMAT_CHECKER)
    try:
        kind.check_schema(described, format_checker=formats)
    except jsonschema.SchemaError as error:
        raise GrammarError(f"The JSON Schema is none: {error.json_path}: {cut(error.message)}") from error
    known = {name: check for name, check in _KEYWORDS.items() if name in kind.VALIDATORS}
    extended: Any = jsonschema.validators.extend(kind, known)  # type: ignore[no-untyped-call]
    # References lead to the schema itself and to those of JSON Schema: nothing is fetched.
    checker = extended(described, format_checker=formats, registry=jsonschema_specifications.REGISTRY)

    def why_invalid(text: str) -> str | None:
        try:
            value = parsed(text)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        try:
            problem = jsonschema.exceptions.best_match(checker.iter_errors(value))
        except (ValueError, TimeoutError, RecursionError, re.error, referencing.exceptions.Unresolvable) as error:
            return f"cannot be checked: {cut(str(error))}"
        return None if problem is None else f"{problem.json_path}: {cut(problem.message)} ({problem.validator})"

    return why_invalid


def unresolvable(schema: Any) -> tuple[str, ...]:
    """Return the references of a schema that lead neither into it nor to one of JSON Schema's own."""
    import jsonschema_specifications
    import referencing.exceptions
    import referencing.jsonschema

    resource = referencing.jsonschema.DRAFT202012.create_resource(schema)
    resolver = jsonschema_specifications.REGISTRY.resolver_with_root(resource)
    found = []
    for reference in dict.fromkeys(_references(schema)):
        try:
            resolver.lookup(reference)
        except referencing.exceptions.Unresolvable:
            found.append(reference)
    return tuple(found)


def without_unresolvable(schema: Any, references: tuple[str, ...]) -> Any:
    """Return a schema without certain references."""
    if isinstance(schema, list):
        return [without_unresolvable(part, references) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: part for key, part in schema.items() if not (key == "$ref" and part in references)}
    return {key: without_unresolvable(part, references) for key, part in kept.items()}


def _references(schema: Any) -> Iterator[str]:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for part in parts:
        yield from _references(part)


def parsed(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: for invalid JSON, and for an object that repeats a key.
    """
    return json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object repeats the key {repeated!r}")
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _formats(known: Any) -> Any:
    import jsonschema

    checker = jsonschema.FormatChecker(formats=())
    checker.checkers = {**known.checkers, **{name: (_of_strings(check), ()) for name, check in CHECKS.items()}}
    return checker


def _of_strings(check: Callable[[str], bool]) -> Callable[[object], bool]:
    return lambda value: not isinstance(value, str) or check(value)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(value, "string") and not matches(pattern, value):
        yield _problem(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(value, "object"):
        for pattern, subschema in patterns.items():
            for name, part in value.items():
                if matches(pattern, name):
                    yield from validator.descend(part, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, value: Any, schema: Any) -> Iterator[Any]:
    if not validator.is_type(value, "object"):
        return
    patterns = schema.get("patternProperties", {})
    named = schema.get("properties", {})
    others = [name for name in value if name not in named and not any(matches(p, name) for p in patterns)]
    if subschema is False and others:
        yield _problem(f"additional properties are not allowed: {', '.join(map(repr, others))}")
    elif subschema is not False:
        for name in others:
            yield from validator.descend(value[name], subschema, path=name)


def _multiple_of(validator: Any, step: Any, value: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(value, "number") and not _is_multiple(value, step):
        yield _problem(f"{value!r} is not a multiple of {step!r}")


def _is_multiple(value: Any, step: Any) -> bool:
    """Whether a value is a multiple as decimals: 0.3 is one of 0.1."""
    if not (math.isfinite(value) and step):
        return False
    return (Fraction(repr(value)) / Fraction(repr(step))).denominator == 1


def _problem(message: str) -> Any:
    import jsonschema

    return jsonschema.ValidationError(message)


_KEYWORDS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
    "divisibleBy": _multiple_of,
}
"""Keywords that are checked in another way than ``jsonschema`` does."""
