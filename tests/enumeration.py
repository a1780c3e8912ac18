"""The exactness checker: the exact distribution of what rounds emit, by enumeration, not by luck.

A ``TableModel`` gives every context a known distribution. An ``EnumeratingRng`` replays every branch of a round with
its probability, and ``emitted_distribution`` folds the rounds into that of whole texts. Its difference from
``plain_distribution`` must be rounding (1e-12), for every drafter, setting and grammar. The cases stand at the end.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from agentspec import (
    Batch,
    Cascade,
    CrossVocabModel,
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    SamplingParams,
    Sequence,
    SuffixDrafter,
    VocabMapping,
)
from agentspec.drafters import NoDrafter
from agentspec.grammars.matcher import Matcher
from agentspec.grammars.token_mask import PackedMasks, TokenMask
from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.rng import Role, SequenceRng
from agentspec.sampling import Prefix, warp

END = "<end>"
Text = tuple[int, ...]
Distribution = dict[Text, float]
Joint = dict[tuple[Text, ...], float]


class TableModel:
    """A language model whose logits are a fixed pseudo-random function of the last ``order`` tokens."""

    def __init__(
        self,
        vocab_size: int = 3,
        seed: int = 0,
        order: int = 2,
        spread: float = 1.5,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.vocab_size = vocab_size
        self._order = order
        generator = torch.Generator().manual_seed(seed)
        shape = (vocab_size + 1,) * order + (vocab_size,)
        self._table = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * spread
        self.calls = 0

    def logits(self, context: list[int]) -> Tensor:
        """``[V]`` after a context; a missing token counts as one more id."""
        return self._table[tuple(self._recent(context, len(context)))]

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        self.calls += 1
        # Padding has a distribution of its own (uniform): code that reads it draws other tokens.
        out = torch.zeros(len(contexts), max(last), self.vocab_size, dtype=self._table.dtype)
        at = [(b, k) for b, n in enumerate(last) for k in range(n)]
        if at:
            ends = [len(contexts[b]) - last[b] + 1 + k for b, k in at]
            recent = [self._recent(contexts[b], end) for (b, _), end in zip(at, ends, strict=True)]
            out[tuple(torch.tensor(at).T)] = self._table[tuple(torch.tensor(recent).T)]
        return out

    def _recent(self, context: list[int], end: int) -> list[int]:
        known = context[max(0, end - self._order) : end]
        return [self.vocab_size] * (self._order - len(known)) + known


class AutomatonMatcher(Matcher):
    """A grammar by hand: ``edges[state][token] -> state``; ``final`` states are complete."""

    def __init__(self, edges: dict[int, dict[int, int]], final: set[int], vocab_size: int = 3) -> None:
        self._edges, self._final, self._vocab_size = edges, final, vocab_size
        self.path = [0]

    def token_mask(self) -> TokenMask:
        return TokenMask.empty(self._vocab_size).with_tokens(self._edges.get(self.path[-1], {}), legal=True)

    def accept_token(self, token: int) -> bool:
        state = self._edges.get(self.path[-1], {}).get(token)
        if state is None:
            return False
        self.path.append(state)
        return True

    def rollback(self, count: int) -> None:
        del self.path[len(self.path) - count :]

    def is_accepting(self) -> bool:
        return self.path[-1] in self._final


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


class EnumeratingRng(SequenceRng):
    """Uniforms that take, one run after the other, every value that matters.

    The unit interval is split at the edges of the decision; a cell is played by its left end with its width as the
    probability. The left ends are where ``<`` and ``<=`` differ, 0 included. Native draws add up shares in another
    order, so that edges differ in their last bits: there a cell of a draw is played by its middle.
    Every number is independent of every other, so it is an error to ask for one twice: a ``SequenceRng`` would answer
    with the same number.
    """

    needs_edges = True

    def __init__(self, rows: int, branches: _Branches, kernels: SamplingKernels = TORCH) -> None:
        super().__init__([0] * rows, [0] * rows, "cpu", kernels)
        self._branches = branches
        self._rows = list(range(rows))
        self._asked: set[tuple[int, Role, int]] = set()

    def uniform(self, role: Role, offsets: Tensor, edges: Tensor | None = None) -> Tensor:
        assert edges is not None, "a decision without edges cannot be enumerated"
        for row, row_offsets in zip(self._rows, offsets.view(len(offsets), -1).tolist(), strict=True):
            for offset in row_offsets:
                assert (row, role, offset) not in self._asked, "one random number for two decisions"
                self._asked.add((row, role, offset))
        rows = edges.double().reshape(*offsets.shape, edges.numel() // max(offsets.numel(), 1))
        place = 0.0 if role is Role.ACCEPT or self._kernels is TORCH else 0.5
        cells = [self._cell(row, place) for row in rows.flatten(0, -2).tolist()]
        return torch.tensor(cells, dtype=torch.float64).view(offsets.shape)

    def select(self, rows: list[int]) -> SequenceRng:
        chosen = copy.copy(self)
        chosen._rows = [self._rows[row] for row in rows]
        return chosen

    def _cell(self, edges: list[float], place: float) -> float:
        inside = sorted({0.0, *(e for e in edges if 0 < e < 1)})
        widths = [right - left for left, right in itertools.pairwise([*inside, 1.0])]
        chosen = self._branches.choose(widths)
        return inside[chosen] + place * widths[chosen]


def joint_distribution(
    play_round: Callable[[Batch], object],
    starts: SequenceOf[Callable[[], Sequence]],
    length: int,
    kernels: SamplingKernels = TORCH,
) -> Joint:
    """Return the exact joint distribution of the texts of several sequences that share rounds.

    Args:
        play_round: one round of a decoder.
        starts: each makes a fresh sequence.
        length: where the texts are cut; a sequence that reaches it leaves the batch.
        kernels: draw and filter.
    """
    known: dict[tuple[Text, ...], Joint] = {}

    def distribution_after(emitted: tuple[Text, ...]) -> Joint:
        if emitted not in known:
            known[emitted] = fold(emitted)
        return known[emitted]

    def fold(emitted: tuple[Text, ...]) -> Joint:
        if not live(resumed(emitted)):
            return {tuple(text[:length] for text in emitted): 1.0}
        total: defaultdict[tuple[Text, ...], float] = defaultdict(float)
        branches = _Branches()
        for _ in branches.runs():
            sequences = resumed(emitted)
            playing = live(sequences)
            play_round(Batch(playing, rng=EnumeratingRng(len(playing), branches, kernels), kernels=kernels))
            for texts, rest in distribution_after(tuple(tuple(s.tokens) for s in sequences)).items():
                total[texts] += branches.probability * rest
        return dict(total)

    def resumed(emitted: tuple[Text, ...]) -> list[Sequence]:
        sequences = [start() for start in starts]
        for sequence, text in zip(sequences, emitted, strict=True):
            sequence.extend(list(text))
        return sequences

    def live(sequences: list[Sequence]) -> list[Sequence]:
        return [s for s in sequences if s.finish_reason is None and s.length < length]

    return distribution_after(((),) * len(starts))


def emitted_distribution(
    play_round: Callable[[Batch], object],
    prompt: list[int],
    length: int,
    params: SamplingParams,
    matcher: Callable[[], Matcher] | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Distribution:
    """Return the exact distribution of the texts that rounds emit, cut at ``length`` tokens."""

    def start() -> Sequence:
        return Sequence(prompt, params, matcher=matcher() if matcher else None, end_tokens=end_tokens)

    return {text: probability for (text,), probability in joint_distribution(play_round, [start], length).items()}


def plain_distribution(
    model: TableModel,
    prompt: list[int],
    length: int,
    params: SamplingParams,
    matcher: Callable[[], Matcher] | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Distribution:
    """Return the distribution of plain decoding, without any of the decoder's code but ``warp``."""
    found: Distribution = {}

    def grow(emitted: Text, probability: float) -> None:
        state = matcher() if matcher else None
        for token in emitted:
            if state is not None and token not in end_tokens:
                state.accept_token(token)
        over = state is not None and state.is_accepting() and state.token_mask().is_empty
        if len(emitted) == length or over or (emitted and emitted[-1] in end_tokens):
            found[emitted] = found.get(emitted, 0.0) + probability
            return
        mask = None
        if state is not None:
            mask = state.token_mask().tensor()
            mask[list(end_tokens)] = state.is_accepting()
            mask = PackedMasks.of(mask[None, None])
        context = prompt + list(emitted)
        prefix = Prefix(context, len(prompt), 1, end_tokens)
        p = warp(model.logits(context)[None, None], [params], mask, [prefix])[0, 0]
        for token, mass in enumerate(p.tolist()):
            if mass > 0:
                grow((*emitted, token), probability * mass)

    grow((), 1.0)
    return found


def largest_error(found: Distribution, expected: Distribution) -> float:
    """Return the largest difference between two distributions over all texts."""
    return max(abs(found.get(text, 0.0) - expected.get(text, 0.0)) for text in found.keys() | expected.keys())


SETTINGS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7, top-k 2": SamplingParams(temperature=0.7, top_k=2),
    "top-p 0.8": SamplingParams(top_p=0.8),
    "min-p 0.3": SamplingParams(min_p=0.3),
    "greedy": SamplingParams(temperature=0),
    "penalties": SamplingParams(
        min_tokens=2, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.4, logit_bias={1: 0.5}
    ),
}


def automaton() -> AutomatonMatcher:
    """A choice, a cycle, two forced tokens on end, a complete state that may go on, and one where nothing follows."""
    edges = {0: {0: 1, 1: 0}, 1: {2: 2}, 2: {0: 3}, 3: {0: 0, 1: 3, 2: 4}}
    return AutomatonMatcher(edges, final={3, 4}, vocab_size=4)


@dataclass(frozen=True)
class Task:
    """What is decoded: texts of ``length`` tokens after a prompt; the highest id is the end token."""

    vocab_size: int = 3
    length: int = 4
    matcher: Callable[[], Matcher] | None = None
    max_tokens: int | None = None
    prompt: tuple[int, ...] = (0, 1, 0)

    def params(self, setting: str) -> SamplingParams:
        """The named setting, with this task's limit."""
        params = SETTINGS[setting]
        return dataclasses.replace(params, max_tokens=self.max_tokens) if self.max_tokens else params

    def start(self, setting: str, **how: Any) -> Sequence:
        """A fresh sequence; ``how`` is its seed, gamma, acceptance."""
        matcher = self.matcher() if self.matcher else None
        ends = frozenset([self.vocab_size - 1])
        return Sequence(self.prompt, self.params(setting), matcher=matcher, end_tokens=ends, **how)

    def emitted(
        self, play_round: Callable[[Batch], object], setting: str, kernels: SamplingKernels = TORCH
    ) -> Distribution:
        """Return the exact distribution of what rounds emit."""
        joint = joint_distribution(play_round, [lambda: self.start(setting)], self.length, kernels)
        return {text: probability for (text,), probability in joint.items()}

    def plain(self, target: TableModel, setting: str) -> Distribution:
        """Return the distribution of plain decoding."""
        ends = frozenset([self.vocab_size - 1])
        return plain_distribution(target, list(self.prompt), self.length, self.params(setting), self.matcher, ends)


TASKS = {
    "free": Task(),
    "free, limited": Task(max_tokens=4),
    "constrained": Task(vocab_size=4, length=5, matcher=automaton),
}


def table_models(task: Task, seed: int, dtype: torch.dtype = torch.float64) -> tuple[TableModel, TableModel]:
    """A target and a draft that disagree."""
    target, draft = (TableModel(task.vocab_size, seed=2 * seed + k, dtype=dtype) for k in range(2))
    return target, draft


def drafters(target: TableModel, draft: TableModel) -> dict[str, Drafter]:
    """Every drafter, by the name of its case."""
    return {
        "none": NoDrafter(),
        "model": ModelDrafter(draft),
        "self": ModelDrafter(target),
        "unmasked": ModelDrafter(draft, masked=False),
        "another vocabulary": ModelDrafter(
            CrossVocabModel(CachingTable(target.vocab_size, seed=11), letter_mapping(target.vocab_size))
        ),
        "lookup": PromptLookupDrafter(min_ngram=1),
        "suffix": SuffixDrafter(),
        "suffix cascade": Cascade([SuffixDrafter(min_match=2, min_probability=0.4), ModelDrafter(draft)]),
        "cascade": Cascade([PromptLookupDrafter(min_ngram=2), ModelDrafter(draft)]),
        "forced": Cascade(),
    }


class CachingTable(TableModel):
    """A ``TableModel`` with the interface of a model with a cache; it caches nothing."""

    max_context, max_rows = 10_000, 8

    def cached_tokens(self, context: list[int]) -> int:
        return 0


@functools.cache
def letter_mapping(vocab_size: int) -> VocabMapping:
    """To a draft with the same letters in another order, but for one: where that alone is legal, nothing is drafted."""
    letters = "abcdefgh"[: vocab_size - 1]
    return VocabMapping(letter_tokenizer([*letters, END]), letter_tokenizer(["x", END, *reversed(letters[:-1])]))


def letter_tokenizer(tokens: SequenceOf[str]) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are these tokens, in their order; each is a letter, or the end."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


DRAFTERS = tuple(drafters(TableModel(), TableModel()))
