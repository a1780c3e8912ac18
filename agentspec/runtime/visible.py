"""Make control characters visible: foreign names and errors must not control the terminal that shows them."""

from __future__ import annotations

import re

_UNSEEN = (
    "\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f"  # C0 but for the line feed, DEL, C1
    "\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e"  # no width, direction, ends of lines
    "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
    "\\ud800-\\udfff\\U000e0000-\\U000e007f"  # lone surrogates, tags
)
_IN_TEXT = re.compile(f"(?!\t)[{_UNSEEN}]")
_IN_LINE = re.compile(f"[\n{_UNSEEN}]")


def visible(text: object, *, lines: bool = False) -> str:
    r"""Return a text with its control characters as escapes (``\x1b``), safe to show anywhere.

    Escaped are also what changes the direction of text, what has no width but joiners, and lone surrogates.

    Args:
        text: a name, or any object with a text form.
        lines: whether it may have line feeds and tabs; a carriage return before a line feed is removed.
    """
    shown = str(text)
    if not lines:
        return _IN_LINE.sub(_escape, shown)
    return _IN_TEXT.sub(_escape, shown.replace("\r\n", "\n"))


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
