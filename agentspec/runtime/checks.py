"""Check the plain values of settings, and bring their several forms into one."""

from __future__ import annotations

import math
import numbers
from dataclasses import MISSING, fields
from typing import Any

from agentspec.errors import InvalidRequestError, shown

LEAST, GREATEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The smallest and the greatest normal float32."""

MOST = 2**63 - 1
"""The greatest integer of a tensor."""

_DIGITS = 20  # of an id that is written as text; a longer one is none


def in_one_form(params: Any) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that have several forms, each in one.

    The other forms are None for a default, one stop string, a flag for ``logprobs`` as in OpenAI's requests, and ids
    as text, as in JSON.
    """
    stop, flag, bias = params.stop, params.logprobs, dict(params.logit_bias or {})
    return {
        **{f.name: f.default for f in fields(params) if f.default is not MISSING and getattr(params, f.name) is None},
        **{f.name: _tuple(f.name, getattr(params, f.name)) for f in fields(params) if f.default == ()},
        "stop": (stop,) if isinstance(stop, str) else _tuple("stop", stop),
        "logprobs": (0 if flag else None) if isinstance(flag, bool) else flag,
        "logit_bias": {_as_id(i): value for i, value in bias.items()},
    }


def _as_id(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) <= _DIGITS else key


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError as error:
        raise InvalidRequestError(f"{name} must be a sequence, got {shown(value)}.") from error


def is_whole(value: object) -> bool:
    """Whether a value is an integer, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether a value is an integer that a tensor of ids or counts holds, and no boolean."""
    return is_whole(value) and abs(int(value)) <= MOST  # type: ignore[call-overload]


def is_finite(value: object) -> bool:
    """Whether a value is a finite real number, and no boolean."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def is_number(value: object) -> bool:
    """Whether a value is a real number that is 0 or a normal float32, and no boolean."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        size = abs(float(value))
    except OverflowError:  # an integer of hundreds of digits
        return False
    return bool(value == 0) or LEAST <= size <= GREATEST
