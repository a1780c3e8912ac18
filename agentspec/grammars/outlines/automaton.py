"""Automata over bytes: compiled once per regular expression, kept in the disk cache."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt
import outlines_core

from agentspec.errors import GrammarError
from agentspec.runtime.cache import DiskCache

MAX_REGEX_LENGTH = 300_000
"""Characters. Of 400 real JSON Schemas, all with longer expressions had more states than ``compile.MAX_STATES``.
To find that out takes 1 to 10 s. Expressions of half the length had up to 30,000 states."""

MAX_SECONDS = 10.0
"""For one automaton. Real JSON Schemas take 40 ms at the median and 1.3 s at the 99th percentile, the largest allowed
automaton (50,000 states) 2.5 s on a busy machine. Only far larger automata, or exponential ones, reach this limit."""

_COMPILER = Path(__file__).with_name("compile.py")
_PACKAGES = str(Path(outlines_core.__file__).parents[1])
_COMMAND = f"import runpy, sys; sys.path.insert(0, {_PACKAGES!r}); runpy.run_path({str(_COMPILER)!r}, {{}}, '__main__')"
# Another version of these files may not read what this one writes.
_CODE = hashlib.sha256(_COMPILER.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
_KEY = f"outlines-core {version('outlines-core')}, automaton {_CODE}: "


@dataclass(frozen=True, eq=False)
class Automaton:
    """A deterministic automaton. State 0 is dead, 1 is the first; every other state leads to a final one.

    Args:
        moves: ``[S, C]``, the state after each class of bytes.
        classes: ``[256]``, the class of each byte.
        finals: ``[S]``, whether a text may end there.
    """

    moves: npt.NDArray[np.uint16]
    classes: npt.NDArray[np.uint8]
    finals: npt.NDArray[np.bool_]

    def after(self, state: int, text: bytes) -> int:
        """Return the state after a text."""
        for byte in text:
            state = int(self.moves[state, self.classes[byte]])
        return state

    def to_bytes(self) -> bytes:
        """Return the automaton in its binary form."""
        states, classes = self.moves.shape
        head = np.array([states, classes], dtype="<u4").tobytes()
        return head + self.classes.tobytes() + self.finals.tobytes() + self.moves.astype("<u2").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Automaton:
        """Return the automaton of a binary form.

        Raises:
            ValueError: for other bytes.
        """
        if len(data) < 8 + 256:
            raise ValueError(f"An automaton has at least 264 bytes, got {len(data)}.")
        states, count = map(int, np.frombuffer(data, dtype="<u4", count=2))
        if len(data) != 8 + 256 + states + 2 * states * count:
            raise ValueError(f"Expected {states} states of {count} classes of bytes, got {len(data)} bytes.")
        classes = np.frombuffer(data, dtype=np.uint8, offset=8, count=256)
        finals = np.frombuffer(data, dtype=np.uint8, offset=8 + 256, count=states)
        moves = np.frombuffer(data, dtype="<u2", offset=8 + 256 + states).reshape(states, count)
        if states < 2 or classes.max() >= count or moves.max() >= states or moves[0].any() or finals[0]:
            raise ValueError("The automaton leads to states that it does not have.")
        return cls(moves.astype(np.uint16), classes, finals != 0)


def build(regex: str, cache: DiskCache | None) -> Automaton:
    """Build the automaton of the texts that a regular expression matches from end to end.

    Args:
        regex: in the dialect of Rust's ``regex``.
        cache: searched first, and given the new automaton; None for no cache.

    Raises:
        GrammarError: for an invalid regular expression, for one that is too large, and where nothing matches it.
    """
    if len(regex) > MAX_REGEX_LENGTH:
        raise GrammarError(f"The regular expression has {len(regex)} characters; at most {MAX_REGEX_LENGTH} are built.")
    if cache is not None and (kept := cache.get(_KEY + regex)) is not None:
        try:
            return Automaton.from_bytes(kept)
        except ValueError:
            pass  # damaged: a miss
    made = _from_table(_compiled(regex))
    if not made.moves[1].any() and not made.finals[1]:
        raise GrammarError("The language is empty; nothing matches it.")
    if cache is not None:
        cache.set(_KEY + regex, made.to_bytes())
    return made


def _compiled(regex: str) -> bytes:
    try:
        run = subprocess.run(
            [sys.executable, "-I", "-c", _COMMAND], input=regex.encode(), capture_output=True, timeout=MAX_SECONDS
        )
    except UnicodeEncodeError as error:
        raise GrammarError(f"The grammar holds half a character: {error}.") from error
    except subprocess.TimeoutExpired as error:
        raise GrammarError(f"The automaton is too large: it takes more than {MAX_SECONDS:.0f} s to build.") from error
    reason = run.stderr.decode(errors="replace").strip()
    if run.returncode == 1:
        raise GrammarError(f"The regular expression cannot be compiled: {reason[-300:]}.")
    if run.returncode:  # out of memory, outlines-core ends the process
        raise GrammarError(f"The automaton is too large to be built: {reason[-300:] or run.returncode}.")
    return run.stdout


def _from_table(packed: bytes) -> Automaton:
    """Return the automaton that ``compile.py`` wrote."""
    states = len(packed) // (4 * 256 + 1)
    table = np.frombuffer(packed, dtype=np.int32, count=256 * states).reshape(states, 256)
    columns, classes = np.unique(table.astype(np.uint16), axis=1, return_inverse=True)
    finals = np.frombuffer(packed, dtype=np.uint8, offset=1024 * states) != 0
    return Automaton(np.ascontiguousarray(columns), classes.reshape(256).astype(np.uint8), finals)
