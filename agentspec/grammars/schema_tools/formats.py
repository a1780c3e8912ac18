"""Check the formats of JSON Schema, also those for which ``jsonschema`` needs other packages."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable

from agentspec.grammars.schema_tools.ecma import compiled

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)", re.ASCII)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_PLACE = r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=]|%[0-9A-Fa-f]{2}"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.\-]*:"
_WIDE = r"[^\x00-\x7f]"


def _is_date(text: str) -> bool:
    found = _DATE.fullmatch(text)
    with contextlib.suppress(ValueError):
        return found is not None and bool(datetime.date(*map(int, found.groups())))
    return False


def _is_date_time(text: str) -> bool:
    return text[10:11] in ("T", "t") and _is_date(text[:10]) and _TIME.fullmatch(text[11:]) is not None


def _is_regex(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(compiled(text))
    return False


def _is(pattern: str, longest: int | None = None) -> Callable[[str], bool]:
    known = re.compile(pattern, re.ASCII)
    return lambda text: known.fullmatch(text) is not None and (longest is None or len(text) <= longest)


CHECKS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": lambda text: _TIME.fullmatch(text) is not None,
    "date-time": _is_date_time,
    "regex": _is_regex,
    "duration": _is(rf"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|\d+W)"),
    "hostname": _is(rf"{_LABEL}(?:\.{_LABEL})*", longest=253),
    "uri": _is(rf"{_SCHEME}(?:{_PLACE})*"),
    "uri-reference": _is(rf"(?:{_PLACE})*"),
    "iri": _is(rf"{_SCHEME}(?:{_PLACE}|{_WIDE})*"),
    "iri-reference": _is(rf"(?:{_PLACE}|{_WIDE})*"),
    "uri-template": _is(rf"(?:{_PLACE}|{_WIDE}|\{{[^{{}}\s]+\}})*"),
    "json-pointer": _is(r"(?:/(?:[^~/]|~[01])*)*"),
    "relative-json-pointer": _is(r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)"),
}
"""Whether a string is of a format, by its name."""
