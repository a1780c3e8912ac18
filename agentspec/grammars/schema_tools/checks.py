"""What is looked at before any work: how large a schema is, and whether its keywords have values of their type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentspec.errors import GrammarError, shown
from agentspec.grammars.schema_tools.depth import check_followed_depth
from agentspec.grammars.schema_tools.positions import LISTS, MAPS, ONE, Schema, with_subschemas
from agentspec.grammars.schema_tools.tags import with_required_tags
from agentspec.grammars.schema_tools.written import to_json

MAX_BYTES = 1_000_000
"""Of a schema, a pattern, a grammar or all options of a choice, in UTF-8."""
MAX_DEPTH = 100
"""Objects and arrays within each other. llguidance reads 127 levels, of which wrappers take a few."""
MAX_PARTS = 50_000
"""Objects and arrays of a schema."""
MAX_OPTIONAL = 500
"""Optional properties of one object: llguidance keeps some four items a property and 2,000 items a row."""
MAX_PROPERTIES = 5_000
"""Properties of one object, the required ones included."""


def check_size(source: str, what: str, limit: int = MAX_BYTES) -> None:
    """Refuse a text that is too large to be compiled.

    Raises:
        GrammarError: names the size and the limit.
    """
    size = len(source) if len(source) > limit else len(source.encode(errors="surrogatepass"))
    if size > limit:
        raise GrammarError(f"{what} has {size:,} bytes; the limit is {limit:,}. Make it smaller.")


def checked(schema: Any, what: str = "The JSON Schema") -> Any:
    """Return a schema that is JSON of bounded size, without keywords that are null, whose unions require their tags.

    Servers in Go write an absent keyword as null. A schema without nulls comes back as it is.

    Args:
        schema: a dict or a bool.
        what: names the schema in errors.

    Raises:
        GrammarError: names the limit that is passed, or the keyword whose value is of a wrong type, and its place.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{what} is a dict or a bool, got {type(schema).__name__}: {shown(schema)}.")
    _check_bounds(schema, what)
    try:
        source = to_json(schema)
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{what} must consist of JSON values: {error}.") from error
    check_size(source, what)
    if isinstance(schema, bool) or _is_draft_3(schema):
        return schema
    known = with_required_tags(_known(schema, what, "#"))
    check_followed_depth(known, what)
    return known if to_json(known) != source else schema


def _check_bounds(schema: Any, what: str) -> None:
    """Count without recursion, for a schema may be deeper than the stack."""
    left, parts = [(schema, 0)], 0
    while left:
        value, depth = left.pop()
        if not isinstance(value, dict | list | tuple):
            continue
        depth, parts = depth + 1, parts + 1
        if depth > MAX_DEPTH:
            _refuse(what, f"is more than {MAX_DEPTH} levels deep", f"{MAX_DEPTH} levels", "Put parts under $defs")
        if parts > MAX_PARTS:
            _refuse(what, f"has more than {MAX_PARTS:,} objects and arrays", f"{MAX_PARTS:,}", "Make it smaller")
        if isinstance(value, dict):
            _check_properties(value, what)
        left += [(part, depth) for part in (value.values() if isinstance(value, dict) else value)]


def _check_properties(schema: dict[Any, Any], what: str) -> None:
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, dict) or len(named) <= MAX_OPTIONAL:
        return
    needed = set(filter(lambda name: isinstance(name, str), required)) if isinstance(required, list) else set()
    optional = len(named.keys() - needed)
    for count, limit, kind in (
        (len(named), MAX_PROPERTIES, "properties"),
        (optional, MAX_OPTIONAL, "optional properties"),
    ):
        if count > limit:
            _refuse(what, f"has an object of {count:,} {kind}", f"{limit:,}", "Require them, or group them in objects")


def _refuse(what: str, found: str, limit: str, advice: str) -> None:
    raise GrammarError(f"{what} {found}; the limit is {limit}. {advice}.")


def _is_draft_3(schema: Schema) -> bool:
    """Whether ``required`` is a boolean of the property, ``extends`` an ``allOf``: engines refuse draft 3 by name."""
    return "draft-03" in str(schema.get("$schema"))


def _known(schema: Any, what: str, place: str) -> Any:
    """A schema in which every keyword that is there has a value of its type."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"{what} holds {shown(schema)} at {place}; expected a schema: an object, true or false.")
    kept = {keyword: value for keyword, value in schema.items() if value is not None or not _is_asserted(keyword)}
    for keyword, value in kept.items():
        if keyword in _EXPECTED:
            expected, is_right = _EXPECTED[keyword]
            if not is_right(value):
                raise GrammarError(f"{what} has {keyword}: {shown(value)} at {place}; expected {expected}.")
    for keyword in _NAMED & kept.keys():
        kept[keyword] = {name: {} if part is None else part for name, part in kept[keyword].items()}
    return with_subschemas(kept, lambda path, part: _known(part, what, "/".join((place, *map(str, path)))))


def _is_asserted(keyword: str) -> bool:
    return keyword in _EXPECTED or keyword == "enum" or keyword in ("title", "description", "$schema", "$comment")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _expected(
    keywords: Sequence[str], expected: str, is_right: Callable[[Any], bool]
) -> Iterator[tuple[str, tuple[str, Callable[[Any], bool]]]]:
    return ((keyword, (expected, is_right)) for keyword in keywords)


_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))

_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = dict(
    (
        *_expected(ONE, "a schema", _is_schema),
        *_expected(LISTS, "a list of schemas", lambda value: isinstance(value, list)),
        *_expected(MAPS, "an object of schemas", lambda value: isinstance(value, dict)),
        *_expected(("items",), "a schema or a list of schemas", lambda value: isinstance(value, dict | bool | list)),
        *_expected(("dependencies",), "an object", lambda value: isinstance(value, dict)),
        *_expected(("required",), "a list of names", _are_texts),
        *_expected(
            ("dependentRequired",),
            "an object of lists of names",
            lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
        ),
        *_expected(("type",), "a type or a list of types", lambda value: _is_text(value) or _are_texts(value)),
        *_expected(("enum",), "a list of values", lambda value: isinstance(value, list)),
        *_expected(("$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id"), "a string", _is_text),
        *_expected(("pattern", "format"), "a string", _is_text),
        *_expected(("minimum", "maximum", "multipleOf"), "a number", _is_number),
        *_expected(
            ("exclusiveMinimum", "exclusiveMaximum"),
            "a number",
            lambda value: _is_number(value) or isinstance(value, bool),  # a boolean in draft 4
        ),
        *_expected(
            (
                *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
                *("minContains", "maxContains"),
            ),
            "a whole number, 0 or more",
            _is_count,
        ),
        *_expected(("uniqueItems",), "true or false", lambda value: isinstance(value, bool)),
    )
)
