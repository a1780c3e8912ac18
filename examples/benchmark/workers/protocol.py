"""JSON lines between ``peers.py`` and a system in a process of its own. Standard library alone.

The worker's first line says ``{"about": ...}`` or ``{"error": ...}``. After that it answers a line by a line:
``{"forget": true}`` by ``{}``; a request ``{"prompt": [ids], "messages": [...] or null, "max_tokens", "temperature",
"n", "seed", "lark": grammar or null}`` by ``{"samples": [[ids]], "seconds", "prompt_s": or null}`` or ``{"error"}``.
Samples are told without an end token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol


class Peer(Protocol):
    """A system in a worker."""

    about: str
    """Name and version."""

    def forget(self) -> None:
        """Drop what earlier requests left."""
        ...

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        ...


def serve(load: Callable[[], Peer]) -> None:
    """Load a peer and answer until the input ends. What libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: dict[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    try:
        peer = load()
    except Exception as error:  # whatever keeps it from loading is what there is to report
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"about": peer.about})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "forget" in request:
                peer.forget()
                say({})
            else:
                say(peer.answer(request))
        except Exception as error:  # the next request may do better
            say({"error": f"{type(error).__name__}: {error}"})
