"""Check schemas before any work: their size, their depth, and the types of their keywords' values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentspec.errors import GrammarError, shown
from agentspec.grammars.schema_tools.depth import check_followed_depth
from agentspec.grammars.schema_tools.positions import LISTS, MAPS, ONE, Schema, subschemas, with_subschemas
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

Expected = tuple[str, Callable[[Any], bool]]
"""The type of a keyword's value in words, and whether a value is of it."""


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

    Servers in Go write an absent keyword as null. A schema without nulls is returned as it is.

    Args:
        schema: a dict or a bool.
        what: names the schema in errors.

    Raises:
        GrammarError: names the exceeded limit, or the keyword whose value is of a wrong type, and its place.
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
    present = _without_nulls(schema)
    _check_keywords(present, what)
    known = with_required_tags(present)
    check_followed_depth(known, what)
    return known if to_json(known) != source else schema


def _check_bounds(schema: Any, what: str) -> None:
    """Refuse too many levels and parts. No recursion: a schema may be deeper than the stack."""
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
    """Whether a schema declares draft 3, which engines refuse by name: its keywords have other types."""
    return "draft-03" in str(schema.get("$schema"))


class Misuse(NamedTuple):
    """A part of a schema that is none, or a keyword whose value is of a wrong type.

    Args:
        path: of the part, from the root.
        keyword: of the part; None where the part itself is no schema.
        value: that stands there.
        expected: what should stand there, in words.
    """

    path: tuple[int | str, ...]
    keyword: str | None
    value: Any
    expected: str


def find_misuses(schema: Any, expected: Mapping[str, Expected] | None = None) -> Iterator[Misuse]:
    """Yield what is no schema, and the keywords whose values are of a wrong type, from the outside in.

    Args:
        schema: to look through, references not followed.
        expected: the keywords to check and to descend into, with the type of their values; None for ``EXPECTED``.
    """
    known = EXPECTED if expected is None else expected
    unseen: list[tuple[tuple[int | str, ...], Any]] = [((), schema)]
    while unseen:
        path, part = unseen.pop()
        if isinstance(part, dict):
            for keyword, value in part.items():
                if keyword in known and not known[keyword][1](value):
                    yield Misuse(path, keyword, value, known[keyword][0])
            # A keyword that holds one schema was checked above, so only objects are left to descend into.
            inner = [(step, value) for step, value in subschemas(part) if len(step) > 1 or isinstance(value, dict)]
            unseen += [((*path, *step), value) for step, value in inner if step[0] in known][::-1]
        elif not isinstance(part, bool):
            yield Misuse(path, None, part, "a schema: an object, true or false")


def _check_keywords(schema: Any, what: str) -> None:
    for misuse in find_misuses(schema):
        place = "/".join(("#", *map(str, misuse.path)))
        if misuse.keyword is None:
            raise GrammarError(f"{what} holds {shown(misuse.value)} at {place}; expected {misuse.expected}.")
        value = f"{misuse.keyword}: {shown(misuse.value)}"
        raise GrammarError(f"{what} has {value} at {place}; expected {misuse.expected}.")


def _without_nulls(schema: Any) -> Any:
    """Return a schema without keywords that are null; a named part that is null allows anything."""
    if not isinstance(schema, dict):
        return schema
    kept = {keyword: value for keyword, value in schema.items() if value is not None or not _is_asserted(keyword)}
    for keyword in _NAMED & kept.keys():
        if isinstance(kept[keyword], dict):
            kept[keyword] = {name: {} if part is None else part for name, part in kept[keyword].items()}
    return with_subschemas(kept, lambda path, part: _without_nulls(part))


def _is_asserted(keyword: str) -> bool:
    return keyword in EXPECTED or keyword == "enum" or keyword in ("title", "description", "$schema", "$comment")


def is_text(value: Any) -> bool:
    """Whether a value is a string."""
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _expected(
    keywords: Sequence[str], expected: str, is_right: Callable[[Any], bool]
) -> Iterator[tuple[str, Expected]]:
    return ((keyword, (expected, is_right)) for keyword in keywords)


_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions"))

EXPECTED: dict[str, Expected] = dict(
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
        *_expected(("type",), "a type or a list of types", lambda value: is_text(value) or _are_texts(value)),
        *_expected(("enum",), "a list of values", lambda value: isinstance(value, list)),
        *_expected(("$ref", "$dynamicRef", "$recursiveRef", "$anchor", "$dynamicAnchor", "$id"), "a string", is_text),
        *_expected(("pattern", "format"), "a string", is_text),
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
"""The type of each keyword's value, by keyword."""
