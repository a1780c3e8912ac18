"""The exactness checker: the exact law of what rounds emit, by enumeration, not by luck.

A ``TableModel`` gives every context a known law, an ``EnumeratingDice`` replays every branch of a round with its
probability, and ``emitted_law`` folds the rounds into the law of whole texts. Compared with ``plain_law`` the
difference must be rounding (1e-12), for every drafter, setting and grammar.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from agentspec import Batch, SamplingParams, Sequence
from agentspec.sampling import Dice, Role, warp
from agentspec.sequence import Matcher

Law = dict[tuple[int, ...], float]


class TableModel:
    """A language model whose logits are a fixed pseudo-random function of the last ``order`` tokens (float64)."""

    def __init__(self, vocab_size: int = 3, seed: int = 0, order: int = 2, spread: float = 1.5) -> None:
        self.vocab_size = vocab_size
        self._order = order
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size + 1,) * order + (vocab_size,)
        self._table = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        self.calls = 0

    def logits(self, context: list[int]) -> Tensor:
        """``[V]`` after a context; a missing token counts as one more id."""
        recent = ([self.vocab_size] * self._order + context)[-self._order :]
        return self._table[tuple(recent)]

    def next_logits(self, contexts: list[list[int]], last: list[int]) -> Tensor:
        self.calls += 1
        out = torch.full((len(contexts), max(last), self.vocab_size), math.nan, dtype=torch.float64)
        for b, (context, n) in enumerate(zip(contexts, last, strict=True)):
            for k in range(n):
                out[b, k] = self.logits(context[: len(context) - n + 1 + k])
        return out


class AutomatonMatcher:
    """A grammar by hand: ``edges[state][token] -> state``; ``final`` states are complete."""

    def __init__(self, edges: dict[int, dict[int, int]], final: set[int], vocab_size: int = 3) -> None:
        self._edges, self._final, self._vocab_size = edges, final, vocab_size
        self._path = [0]

    def allowed(self) -> Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[list(self._edges.get(self._path[-1], {}))] = True
        return mask

    def advance(self, token: int) -> bool:
        state = self._edges.get(self._path[-1], {}).get(token)
        if state is None:
            return False
        self._path.append(state)
        return True

    def rewind(self, count: int) -> None:
        del self._path[len(self._path) - count :]

    def is_complete(self) -> bool:
        return self._path[-1] in self._final


class _Branches:
    """Depth-first replay of choices: each run follows a path, and the next path is the next leaf."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []  # (choice, how many there were)
        self._at = 0
        self.probability = 1.0

    def choose(self, weights: list[float]) -> int:
        if self._at == len(self._path):
            self._path.append((0, len(weights)))
        choice = self._path[self._at][0]
        self._at += 1
        self.probability *= weights[choice]
        return choice

    def runs(self) -> Iterator[None]:
        while True:
            self._at, self.probability = 0, 1.0
            yield
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            choice, count = self._path[-1]
            self._path[-1] = (choice + 1, count)


class EnumeratingDice(Dice):
    """Uniforms that take, one run after the other, every value that matters.

    The unit interval is split at the edges of the decision; a cell is played by its left end with its width as the
    probability. The left ends are where ``<`` and ``<=`` differ, 0 included.
    """

    def __init__(self, positions: list[int], branches: _Branches) -> None:
        super().__init__([0] * len(positions), positions)
        self._branches = branches

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        assert edges is not None, "a decision without edges cannot be enumerated"
        rows = edges.double().reshape(*offsets.shape, edges.numel() // max(offsets.numel(), 1))
        cells = [self._cell(row) for row in rows.flatten(0, -2).tolist()]
        return torch.tensor(cells, dtype=torch.float64).view(offsets.shape)

    def select(self, rows: list[int]) -> Dice:
        return self  # it has no state of a row

    def _cell(self, edges: list[float]) -> float:
        inside = sorted({0.0, *(e for e in edges if 0 < e < 1)})
        widths = [right - left for left, right in itertools.pairwise([*inside, 1.0])]
        return inside[self._branches.choose(widths)]


def emitted_law(
    play_round: Callable[[Batch], object],
    prompt: list[int],
    length: int,
    params: SamplingParams,
    matcher: Callable[[], Matcher] | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Law:
    """The exact law of the texts that rounds emit, cut at ``length`` tokens."""
    known: dict[tuple[int, ...], Law] = {}

    def law_after(emitted: tuple[int, ...]) -> Law:
        if emitted not in known:
            total: defaultdict[tuple[int, ...], float] = defaultdict(float)
            for text, finished, probability in rounds(emitted):
                if finished or len(text) >= length:
                    total[text[:length]] += probability
                else:
                    for whole, rest in law_after(text).items():
                        total[whole] += probability * rest
            known[emitted] = dict(total)
        return known[emitted]

    def rounds(emitted: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bool, float]]:
        branches = _Branches()
        for _ in branches.runs():
            sequence = Sequence(prompt, params, matcher=matcher() if matcher else None, end_tokens=end_tokens)
            sequence.extend(list(emitted))
            play_round(Batch([sequence], dice=EnumeratingDice([len(emitted)], branches)))
            yield tuple(sequence.tokens), sequence.finish_reason is not None, branches.probability

    return law_after(())


def plain_law(
    model: TableModel,
    prompt: list[int],
    length: int,
    params: SamplingParams,
    matcher: Callable[[], Matcher] | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Law:
    """The law of the target decoded token by token, written down without any of the decoder's code but ``warp``."""
    law: Law = {}

    def grow(emitted: tuple[int, ...], probability: float) -> None:
        state = matcher() if matcher else None
        for token in emitted:
            if state is not None and token not in end_tokens:
                state.advance(token)
        over = state is not None and state.is_complete() and not state.allowed().any()
        if len(emitted) == length or over or (emitted and emitted[-1] in end_tokens):
            law[emitted] = law.get(emitted, 0.0) + probability
            return
        mask = None
        if state is not None:
            mask = state.allowed()
            mask[list(end_tokens)] = state.is_complete()
            mask = mask[None, None]
        p = warp(model.logits(prompt + list(emitted))[None, None], [params], mask)[0, 0]
        for token, mass in enumerate(p.tolist()):
            if mass > 0:
                grow((*emitted, token), probability * mass)

    grow((), 1.0)
    return law


def largest_error(law: Law, expected: Law) -> float:
    """Largest difference between two laws over all texts."""
    return max(abs(law.get(text, 0.0) - expected.get(text, 0.0)) for text in law.keys() | expected.keys())
