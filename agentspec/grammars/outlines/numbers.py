"""Write numbers as regular expressions: JSON's own, and those within bounds."""

from __future__ import annotations

NATURAL = "(?:0|[1-9][0-9]*)"
FRACTION = r"(?:\.[0-9]+)?"
INTEGER = f"-?{NATURAL}"
NUMBER = rf"{INTEGER}{FRACTION}(?:[eE][+-]?[0-9]+)?"


def integer(low: int | None, high: int | None) -> str | None:
    """Write the integers within bounds, both included; None where there is none."""
    if low is None and high is None:
        return INTEGER
    return _either(
        _natural(max(low or 0, 0), high),
        _signed(_natural(max(-high, 1) if high is not None else 1, None if low is None else -low)),
    )


def number(low: int | None, high: int | None) -> str | None:
    """Write the numbers within bounds, both included and integers; None where there is none.

    With a bound they are written without an exponent, but for a lower bound of zero alone.
    """
    if low is None and high is None:
        return NUMBER
    if (low, high) == (0, None):
        return NUMBER.removeprefix("-?")
    return _either(
        _positive(max(low or 0, 0), high),
        _signed(_positive(max(-high, 0) if high is not None else 0, None if low is None else -low)),
    )


def _positive(low: int, high: int | None) -> str | None:
    """Write decimals from ``low`` to ``high``: below ``high`` with any fraction, ``high`` itself only with zeros."""
    if high is None:
        return f"{_natural(low, None)}{FRACTION}"
    if high < low:
        return None
    below = _natural(low, high - 1)
    return _either(below and f"{below}{FRACTION}", rf"{high}(?:\.0+)?")


def _natural(low: int, high: int | None) -> str | None:
    """Write integers from ``low``, which is not negative, to ``high``."""
    if high is None:
        size = len(str(low))
        return _either(_natural(low, 10**size - 1), f"[1-9][0-9]{{{size},}}") if low else NATURAL
    if high < low:
        return None
    parts = []
    while low <= high:  # up to the next number with more digits, all of one length
        last = min(high, 10 ** len(str(low)) - 1)
        parts.append(_same_length(str(low), str(last)))
        low = last + 1
    return _either(*parts)


def _same_length(low: str, high: str) -> str:
    """Write the numbers between two of the same number of digits."""
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{len(low)}}}"
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _same_length(low[1:], high[1:])
    if len(low) == 1:
        return f"[{first}-{last}]"
    rest = len(low) - 1
    parts = []
    if set(low[1:]) != {"0"}:
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if set(high[1:]) != {"9"}:
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{rest}}}")
    return f"(?:{'|'.join(parts)})"


def _signed(positive: str | None) -> str | None:
    return positive and f"-{positive}"


def _either(*parts: str | None) -> str | None:
    kept = [part for part in parts if part]
    return f"(?:{'|'.join(kept)})" if kept else None
