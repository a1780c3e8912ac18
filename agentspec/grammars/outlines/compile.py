"""Compile a regular expression to an automaton over bytes, by outlines-core, in a process of its own.

``python compile.py`` reads a regular expression and writes the automaton. It is a process because nothing in
outlines-core can be bounded or stopped: the automaton of a short expression may be exponentially large
(``(a|b)*a(a|b){30}``), and where memory ends the whole process does. So this file imports nothing of agentspec, and
starts in 15 ms.
"""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections import defaultdict
from collections.abc import Mapping

from outlines_core import Index, Vocabulary

MAX_STATES = 50_000
MAX_BYTES = 2 * 2**30

_EOS = 2**16
_NUL = b"\0"
_BYTES = [bytes([byte]) for byte in range(256)]
# Every byte, and every byte after the NUL that precedes each text.
_VOCABULARY = Vocabulary(
    _EOS, {token: [byte + 256 * k] for k in (0, 1) for byte, token in enumerate(_NUL * k + b for b in _BYTES)}
)


def transitions(regex: str) -> tuple[dict[int, dict[int, int]], set[int], int]:
    r"""Return ``{state: {byte: next state}}``, the final states and the first state of ``regex``, matched whole.

    outlines-core matches as a search does: of ``a|ab`` it never matches ``ab``. It has no automaton for an expression
    that begins with ``^``, or that may be empty and ends in ``$``. It also builds the states of a search that may start
    anywhere, which are exponentially many for a bounded JSON string. ``(?:\0(?:regex)\z|)`` has none of these: the
    empty alternative matches at once wherever a search might start, and so ends it. After the NUL the match is anchored
    up to the end.

    Raises:
        ValueError: for an invalid regular expression.
    """
    _check_regex(regex)
    index = Index(rf"(?:\x00(?:{regex})\z|)", _VOCABULARY)
    moves = index.get_transitions()
    start = index.get_initial_state()
    first = moves.pop(start)
    finals = index.get_final_states() - {start}
    moves = {
        state: {byte: after for byte, after in row.items() if byte < 256 and after != start}
        for state, row in moves.items()
    }
    # A text may be empty: then the NUL alone is a match.
    after_nul = first.get(0, -1)
    moves[start] = {byte - 256: after for byte, after in first.items() if 256 <= byte < 512}
    return moves, finals | ({start} if after_nul in finals else set()), start


def _check_regex(regex: str) -> None:
    """Check the expression alone: ``a)|(?:b`` in parentheses would be valid. After an empty branch nothing is built."""
    try:
        Index("|" + regex, Vocabulary(_EOS, {_NUL: [0]}))
    except ValueError as error:
        if "NFA" in str(error):
            raise ValueError(
                "it is no regular expression of Rust's regex crate, which has no look-around and no back-references"
            ) from error


def find_useful(moves: dict[int, dict[int, int]], finals: set[int], start: int) -> set[int]:
    """Return the states that the first one leads to and that lead to a final one."""
    onward = {state: set(row.values()) for state, row in moves.items()}
    backward = defaultdict(set)
    for state, following in onward.items():
        for after in following:
            backward[after].add(state)
    return _reach(onward, {start}) & _reach(backward, finals)


def _reach(steps: Mapping[int, set[int]], starts: set[int]) -> set[int]:
    found, todo = set(starts), list(starts)
    while todo:
        new = steps.get(todo.pop(), set()) - found
        found |= new
        todo.extend(new)
    return found


def packed(regex: str) -> bytes:
    """Return per state 256 int32, the state after each byte, then per state a byte that is 1 where it is final.

    State 0 is dead, and 1 the first.

    Raises:
        ValueError: for an invalid regular expression, or one of more than ``MAX_STATES`` states.
    """
    moves, finals, start = transitions(regex)
    alive = find_useful(moves, finals, start)
    names = {state: name for name, state in enumerate([start, *sorted(alive - {start})], 1)}
    if len(names) > MAX_STATES:
        raise ValueError(f"its automaton has {len(names)} states, and at most {MAX_STATES} are supported")
    table = array("i", bytes(4 * 256 * (len(names) + 1)))
    for state, name in names.items():
        for byte, after in moves.get(state, {}).items():
            if after in alive:
                table[256 * name + byte] = names[after]
    return table.tobytes() + bytes([0, *(state in finals for state in names)])


def main() -> None:
    """Compile from stdin to stdout; the reason of a refusal goes to stderr, with exit status 1."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere, and a lower limit stays
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    try:
        sys.stdout.buffer.write(packed(sys.stdin.buffer.read().decode()))
    except ValueError as error:
        sys.exit(str(error))
    except MemoryError:
        sys.exit(f"its automaton takes more than {MAX_BYTES >> 30} GB to build")


if __name__ == "__main__":
    main()
