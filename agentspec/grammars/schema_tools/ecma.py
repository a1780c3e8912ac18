r"""Search with regular expressions of ECMA 262, the dialect of JSON Schema, by the package ``regex``.

Where the usual dialects differ a little, a text that any of them matches is taken: ``.`` is anything but a line feed,
and ``\s`` is a space of Unicode.
"""

from __future__ import annotations

import functools
import re

import regex

SECONDS = 2.0
"""For one search: a pattern may take exponentially long."""

_WORD = "[A-Za-z0-9_]"
_TOKEN = re.compile(
    r"\\u\{(?P<code>[0-9A-Fa-f]{1,6})\}|\\u(?P<four>[0-9A-Fa-f]{4})|\\c(?P<control>[A-Za-z])|\\k<(?P<name>\w+)>"
    r"|(?P<property>\\[pP]\{[^}]*\})|\\(?P<escaped>.)|(?P<group>\(\?<(?=[A-Za-z_]))|(?P<empty>\[\^?\])|(?P<plain>.)",
    re.DOTALL,
)
_OUTSIDE = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": _WORD,
    "W": "[^A-Za-z0-9_]",
    "s": "[\\s\ufeff]",
    "S": "[^\\s\ufeff]",
    "b": f"(?:(?<={_WORD})(?!{_WORD})|(?<!{_WORD})(?={_WORD}))",
    "B": f"(?:(?<={_WORD})(?={_WORD})|(?<!{_WORD})(?!{_WORD}))",
}
_IN_CLASS = {"d": "0-9", "w": "A-Za-z0-9_", "s": "\\s\ufeff", "b": "\\x08", **{name: f"\\{name}" for name in "DWS"}}
_CHARACTERS = {"^": r"\A", "$": r"\Z", ".": r"[^\n]"}


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text.

    Raises:
        ValueError: for an invalid regular expression.
        TimeoutError: where the search takes longer than ``SECONDS``.
    """
    return compiled(pattern).search(text, timeout=SECONDS) is not None


@functools.lru_cache(maxsize=1024)
def compiled(pattern: str) -> regex.Pattern[str]:
    """Return the compiled form of a pattern.

    Raises:
        ValueError: for an invalid regular expression.
    """
    try:
        return regex.compile(_translated(pattern))
    except (regex.error, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression of ECMA 262: {error}") from error


def _translated(pattern: str) -> str:
    parts = []
    in_class = False
    for token in _TOKEN.finditer(pattern):
        parts.append(_part(token, in_class))
        in_class = token["plain"] == "[" or (in_class and token["plain"] != "]")
    return "".join(parts)


def _part(token: re.Match[str], in_class: bool) -> str:
    if digits := token["code"] or token["four"]:
        return _literal(int(digits, 16))
    if token["control"]:
        return _literal(ord(token["control"]) % 32)
    if token["name"]:
        return f"(?P={token['name']})"
    if token["group"]:
        return "(?P<"
    if token["escaped"]:
        return _escaped(token["escaped"], in_class)
    if token["empty"]:
        return (r"\[" if in_class else "") + (r"[\s\S]" if token["empty"] == "[^]" else "(?!)")
    if token["plain"] and in_class:
        return f"\\{token['plain']}" if token["plain"] in "[&~|" else token["plain"]
    return token["property"] or _CHARACTERS.get(token["plain"], token["plain"])


def _literal(code: int) -> str:
    return f"\\U{code:08x}"


def _escaped(character: str, in_class: bool) -> str:
    known = (_IN_CLASS if in_class else _OUTSIDE).get(character)
    if known is not None:
        return known
    if character in "nrtvfx0123456789" or not character.isalnum():
        return f"\\{character}"
    return character  # an escaped letter without a special meaning
