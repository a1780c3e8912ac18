"""Check the plain values that settings are made of, and bring their several forms into one."""

from __future__ import annotations

import math
import numbers
from dataclasses import MISSING, fields
from typing import Any

from agentspec.errors import InvalidRequestError, shown


def in_one_form(params: Any) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` that have several forms.

    These are None for a default, one stop string, a flag for ``logprobs`` as in OpenAI's requests, ids as text as JSON
    has them.
    """
    stop, flag, bias = params.stop, params.logprobs, dict(params.logit_bias or {})
    return {
        **{f.name: f.default for f in fields(params) if f.default is not MISSING and getattr(params, f.name) is None},
        **{f.name: _tuple(f.name, getattr(params, f.name)) for f in fields(params) if f.default == ()},
        "stop": (stop,) if isinstance(stop, str) else _tuple("stop", stop),
        "logprobs": (0 if flag else None) if isinstance(flag, bool) else flag,
        "logit_bias": {int(i) if isinstance(i, str) and i.isdecimal() else i: value for i, value in bias.items()},
    }


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError as error:
        raise InvalidRequestError(f"{name} must be a sequence, got {shown(value)}.") from error


def is_integer(value: object) -> bool:
    """Whether a value is an integer, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number, and no boolean."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False
