"""JSON Schemas as grammars take them: closed, in one written form, without what asserts nothing."""

from __future__ import annotations

import json
from typing import Any

JSON_FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON is written as ``json.dumps`` and chat templates write it, with fixed separators: most structural tokens are then
forced, no model can loop in white space, and the next turn of a conversation renders to the same ids."""


def to_json(value: Any) -> str:
    """JSON in the one form in which it is written everywhere here: ``", "``, ``": "``, raw UTF-8."""
    return json.dumps(value, ensure_ascii=False)


def in_json_form(schema: dict[str, Any] | bool) -> str:
    """A JSON Schema for llguidance, its instances written in our form."""
    if isinstance(schema, bool):
        return to_json(schema)
    return to_json({**without_unknown_formats(schema), "x-guidance": JSON_FORM})


FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
"""The formats of JSON Schema (draft 2020-12, validation, section 7.3)."""


def without_unknown_formats(schema: Any) -> Any:
    """A schema without formats that JSON Schema does not define ("int32", "password"): they assert nothing."""
    if isinstance(schema, list):
        return [without_unknown_formats(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "enum", "default", "examples") else without_unknown_formats(value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in FORMATS)
    }


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's parameters as the schema of its arguments."""
    schema: dict[str, Any] = closed({"type": "object", **(tool["function"].get("parameters") or {})})
    if schema.get("properties") or schema.keys() & _SAYS_WHAT_ELSE:
        return schema
    return {**schema, "additionalProperties": False}


def closed(schema: Any) -> Any:
    """A schema whose objects hold the properties they name and no others, where it leaves that open.

    A model has nothing to put into properties that are not there, and a small one does not stop inventing them. Every
    value of the closed schema is one of the open schema too. Objects that say what else they may hold, or that are put
    together of parts, stay as they are.
    """
    if not isinstance(schema, dict) or "allOf" in to_json(schema) or _extends(schema):
        return schema
    inner = {
        **{key: closed(schema[key]) for key in ("items",) if key in schema},
        **{key: [closed(part) for part in schema[key]] for key in ("anyOf", "prefixItems") if key in schema},
        **{key: _closed_values(schema[key]) for key in ("properties", "$defs", "definitions") if key in schema},
    }
    named = schema.get("properties") or {}
    is_open = named and not schema.keys() & _SAYS_WHAT_ELSE and named.keys() >= set(schema.get("required", ()))
    return {**schema, **inner, **({"additionalProperties": False} if is_open else {})}


_SAYS_WHAT_ELSE = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "dependentSchemas",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
}


def _extends(schema: Any) -> bool:
    """Whether a part refers to a definition and adds to it, so that the definition must stay open."""
    if isinstance(schema, list):
        return any(map(_extends, schema))
    if not isinstance(schema, dict):
        return False
    return ("$ref" in schema and "properties" in schema) or any(map(_extends, schema.values()))


def _closed_values(schemas: Any) -> Any:
    return {name: closed(part) for name, part in schemas.items()} if isinstance(schemas, dict) else schemas
