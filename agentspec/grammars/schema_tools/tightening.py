"""Forbid in JSON Schemas what a grammar engine would let through: invalid dates, and declared keys in escapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from agentspec.grammars.schema_tools.positions import DEFINITIONS, IN_PLACE, Path, Schema, subschemas, with_subschemas
from agentspec.grammars.schema_tools.references import target

_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = r"(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:{_DAY}|29|30|31)|(?:0[469]|11)-(?:{_DAY}|29|30)|02-{_DAY})|{_LEAP}-02-29)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_ZONE}"
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""The part of a format that Python's ``datetime`` reads: years from 1 on, no leap seconds."""

NAMES = 200
"""Declared properties of an object whose other keys are held to one form."""

_ALONE = {
    "$ref",
    "anyOf",
    "oneOf",
    "type",
    "title",
    "description",
    "default",
    "examples",
    "discriminator",
    *DEFINITIONS,
}
"""Keywords that assert nothing of names beside the schema that they hold or refer to."""

_CONTROLS = r"\x00-\x1f\x7f"
_CLASS = re.compile(r"\\.|\[\^(?P<members>(?:\\.|[^\]\\])+)\]", re.DOTALL)


def tightened(schema: Any) -> Any:
    r"""Return a schema that restricts an engine to valid dates, and to keys that are written in one way.

    llguidance allows escapes (``"\u0061"``) in a key that no property declares, so that it may spell a declared one.
    In the strings of a pattern it does not.
    """
    joined = _joined(schema)

    def change(path: Path, part: Any) -> Any:
        return part if path[0] in ("not", "if") else of(part)

    def of(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        made = _with_calendar(_with_safe_classes(with_subschemas(part, change)))
        return made if id(part) in joined else _with_plain_keys(made)

    return of(schema)


def _joined(root: Any) -> set[int]:
    """Return the ids of the schemas that hold for a value together with others.

    llguidance joins their properties, and refuses patterns of names that overlap.
    """
    joined: set[int] = set()
    unseen = [root]
    while unseen:
        schema = unseen.pop()
        if isinstance(schema, dict):
            if "allOf" in schema or (_in_place(schema, root) and schema.keys() - _ALONE):
                _join(schema, root, joined)
            unseen += (part for _, part in subschemas(schema))
    return joined


def _join(schema: Schema, root: Any, joined: set[int]) -> None:
    """Add a schema and all within it: two schemas of one property are joined too."""
    unseen = [schema]
    while unseen:
        part = unseen.pop()
        if isinstance(part, dict) and id(part) not in joined:
            joined.add(id(part))
            unseen += [*_in_place(part, root), *(inner for _, inner in subschemas(part))]


def _in_place(schema: Schema, root: Any) -> list[Any]:
    """Return the schemas of the same value: the parts in place, and the one referred to."""
    parts = [part for path, part in subschemas(schema) if path[0] in IN_PLACE]
    return [*parts, target(root, schema["$ref"])] if "$ref" in schema else parts


def _with_safe_classes(schema: dict[str, Any]) -> dict[str, Any]:
    r"""Return a schema whose patterns exclude control characters from classes that exclude ``"`` or ``\``.

    A class with control characters and without ``"`` or ``\`` lets llguidance (1.9.1) write these as escapes.
    """
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    changed: dict[str, Any] = {}
    if isinstance(pattern, str):
        changed["pattern"] = _CLASS.sub(_without_controls, pattern)
    if isinstance(patterns, dict):
        changed["patternProperties"] = {_CLASS.sub(_without_controls, name): part for name, part in patterns.items()}
    return {**schema, **changed}


def _without_controls(found: re.Match[str]) -> str:
    members = found["members"]
    is_meant = members is not None and ('"' in members or "\\\\" in members)
    return f"[^{members}{_CONTROLS}]" if is_meant else found[0]


def _with_calendar(schema: dict[str, Any]) -> dict[str, Any]:
    form = schema.get("format")
    pattern = PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None:
        return schema
    if "pattern" not in schema:
        return {**schema, "pattern": pattern}
    return {**schema, "allOf": [*_list(schema.get("allOf")), {"pattern": pattern}]}


def _with_plain_keys(schema: dict[str, Any]) -> dict[str, Any]:
    named, others = schema.get("properties"), schema.get("additionalProperties", True)
    if not (isinstance(named, dict) and 0 < len(named) <= NAMES) or others is False or others is None:
        return schema
    if schema.keys() & {"patternProperties", "allOf", "anyOf", "oneOf", "$ref", "unevaluatedProperties"}:
        return schema
    return {**schema, "patternProperties": {other_than(named): others}, "additionalProperties": False}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def other_than(texts: Iterable[str]) -> str:
    """Return a regular expression that is found in all texts but these."""
    return f"^{_other_than(sorted(set(texts)))}$"


def _other_than(texts: list[str]) -> str:
    """Write the texts that are none of the given ones, by their first character."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    if not branches:
        return r"[\s\S]+" if texts else r"[\s\S]*"
    firsts = "".join(map(_escaped, branches)) + (_CONTROLS if branches.keys() & set('"\\') else "")
    found = [rf"[^{firsts}][\s\S]*", *(f"{_escaped(c)}{_other_than(rest)}" for c, rest in branches.items())]
    return f"(?:{'|'.join(found)}){'' if '' in texts else '?'}"


def _escaped(character: str) -> str:
    return re.sub(r"[\\^$.|?*+()\[\]{}/\-&~#]", r"\\\g<0>", character)
