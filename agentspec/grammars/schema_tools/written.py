"""Write JSON in one form, and keep the formats that JSON Schema defines."""

from __future__ import annotations

import json
from typing import Any

from agentspec.grammars.schema_tools.positions import DATA, MAPS
from agentspec.grammars.schema_tools.tightening import tightened

JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""The form of ``json.dumps`` and of chat templates, with fixed separators. Most structural tokens are then forced, no
model can loop in white space, and the next turn of a conversation renders to the same ids."""


def to_json(value: Any) -> str:
    """Write JSON in the form used everywhere here: ``", "``, ``": "``, raw UTF-8."""
    return json.dumps(value, ensure_ascii=False)


def in_json_form(schema: dict[str, Any] | bool) -> str:
    """Return a JSON Schema for llguidance whose instances are written in our form."""
    if isinstance(schema, bool):
        return to_json(schema)
    return to_json({**tightened(without_unknown_formats(schema)), "x-guidance": JSON_FORM})


FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
"""The formats of JSON Schema (draft 2020-12, validation, section 7.3)."""


def without_unknown_formats(schema: Any) -> Any:
    """Leave out formats that JSON Schema does not define ("int32", "password"): they assert nothing.

    Keywords that no draft knows are searched too, since a reference may lead there.
    """
    if isinstance(schema, list):
        return [without_unknown_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _cleaned(keyword, value)
        for keyword, value in schema.items()
        if not (keyword == "format" and isinstance(value, str) and value not in FORMATS)
    }


def _cleaned(keyword: str, value: Any) -> Any:
    if keyword in DATA:
        return value
    if keyword in MAPS and isinstance(value, dict):
        return {name: without_unknown_formats(part) for name, part in value.items()}
    return without_unknown_formats(value)
