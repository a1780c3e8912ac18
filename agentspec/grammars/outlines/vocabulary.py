"""The tokens that an automaton may read next, by a walk over a trie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from agentspec.grammars.outlines.automaton import Automaton


class TokenTrie:
    """Tokens by their prefixes, so that an automaton reads a prefix once for all tokens that begin with it.

    Args:
        written: the bytes of each id, as ``agentspec.runtime.tokens.token_bytes`` gives it.
    """

    def __init__(self, written: list[bytes | None]) -> None:
        tokens = sorted((text, i) for i, text in enumerate(written) if text)
        self._ids = np.array([i for _, i in tokens], dtype=np.int64)
        self._vocab_size = len(written)
        lengths = np.array([len(text) for text, _ in tokens], dtype=np.int64)
        longest = int(lengths.max(initial=0))
        padded = b"".join(text.ljust(longest, b"\0") for text, _ in tokens)
        matrix = np.frombuffer(padded, dtype=np.uint8).reshape(len(tokens), longest)
        # Per level: where each node's parent stands in the level above, and the byte that leads from there to it.
        self._levels: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = []
        self._ends = np.zeros(len(tokens), dtype=np.int64)  # each token's node, all levels counted through
        parents = np.zeros(len(tokens), dtype=np.int64)
        is_new = np.arange(len(tokens)) == 0
        count = 0
        for depth in range(longest):
            goes_on = lengths > depth
            is_new[1:] |= (matrix[1:, depth] != matrix[:-1, depth]) | ~goes_on[:-1]
            first = np.flatnonzero(is_new & goes_on)  # of each node's tokens
            nodes = np.cumsum(is_new & goes_on) - 1
            self._levels.append((parents[first], matrix[first, depth]))
            ends_here = lengths == depth + 1
            self._ends[ends_here] = count + nodes[ends_here]
            count += len(first)
            parents = nodes
        self._nodes = count

    def legal(self, automaton: Automaton, state: int) -> npt.NDArray[np.bool_]:
        """Return ``[V]``: whether each token leads from a state to a live one."""
        reached = np.zeros(self._nodes, dtype=np.uint16)
        above = np.array([state], dtype=np.uint16)
        count = 0
        for parents, step in self._levels:
            above = automaton.moves[above[parents], automaton.classes[step]]
            if not above.any():
                break
            reached[count : count + len(above)] = above
            count += len(above)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._ids] = reached[self._ends] != 0
        return mask
