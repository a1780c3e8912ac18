"""How much of a test is run: a quick part of it in ``make test``, the whole in ``make test-all``."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

WHOLE = os.environ.get("AGENTSPEC_TESTS") == "whole"


def effort(*, quick: T, whole: T) -> T:
    """Choose by the environment: ``AGENTSPEC_TESTS=whole`` for the whole. Mark the test ``whole`` as well."""
    return whole if WHOLE else quick
