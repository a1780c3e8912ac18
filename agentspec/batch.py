"""`Batch`: sequences that share a round."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.rng import RNGS, Acceptance, SequenceRng
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.sampling import Prefix, log_probs
from agentspec.sequence import Sequence, TokenLogprob


class Batch:
    """Sequences that share a round, with the randomness of their next positions.

    Args:
        sequences: unfinished, all of one acceptance rule.
        device: where the tensors of the round live.
        rng: the randomness; by default that of the sequences' seeds and rule.
        kernels: draw tokens and filter logits.
        vocab_size: ids from this on are no tokens, though the target's head may be padded; None for all of its logits.

    Raises:
        ValueError: for sequences of both rules.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        device: torch.device | str = "cpu",
        rng: SequenceRng | None = None,
        kernels: SamplingKernels = TORCH,
        vocab_size: int | None = None,
    ) -> None:
        self.sequences = list(sequences)
        self.acceptance: Acceptance = self.sequences[0].acceptance
        if any(s.acceptance != self.acceptance for s in self.sequences):
            raise ValueError("The sequences of a batch must share one acceptance rule; got both.")
        self.params = [s.params for s in self.sequences]
        self.device = device
        self.kernels = kernels
        self.vocab_size = vocab_size
        self._rng = rng

    def __len__(self) -> int:
        return len(self.sequences)

    @functools.cached_property
    def rng(self) -> SequenceRng:
        """The randomness of the round."""
        seeds, lengths = [s.seed for s in self.sequences], [s.length for s in self.sequences]
        return self._rng or RNGS[self.acceptance](seeds, lengths, self.device, self.kernels)

    @property
    def needs_probs(self) -> bool:
        """Whether the round needs full distributions (sampling, logprobs) or only the argmax."""
        return any(p.temperature > 0 or (p.logprobs is not None and not p.raw_logprobs) for p in self.params)

    def prefixes(self, drafted: SequenceOf[list[int]]) -> list[Prefix] | None:
        """Return what precedes each drafted position and the one after; None where no setting depends on it."""
        if not any(params.adjusts for params in self.params):
            return None
        return [
            Prefix(context, s.prompt_length, len(tokens) + 1, s.end_tokens)
            for s, context, tokens in zip(self.sequences, self.contexts(drafted), drafted, strict=True)
        ]

    def prefix(self, row: int, drafted: list[int]) -> Prefix:
        """Return what stands before the position after ``drafted`` tokens of a row."""
        sequence = self.sequences[row]
        return Prefix(sequence.context + drafted, sequence.prompt_length, 1, sequence.end_tokens)

    def contexts(self, drafted: SequenceOf[list[int]]) -> list[list[int]]:
        """Return the whole context of every row, drafted tokens included."""
        return [s.context + tokens for s, tokens in zip(self.sequences, drafted, strict=True)]

    def commit(
        self, row: int, tokens: list[int], logits: Tensor | None, consumed: int = 0, timer: PhaseTimer | None = None
    ) -> int:
        """Extend a sequence, with the log-probabilities that its request wants; return how many tokens it took.

        Args:
            row: of the sequence.
            tokens: accepted tokens and the next one.
            logits: ``[K+1, V]``, whose log-probabilities are reported; None where none are.
            consumed: number of tokens that the sequence's matcher has consumed already.
            timer: counts the seconds of decoding text.
        """
        sequence = self.sequences[row]
        count = sequence.extend(tokens, consumed, timer)
        if sequence.params.logprobs is not None:
            assert logits is not None  # the batch needs probs where these are not the target's own
            sequence.logprobs += _logprobs(tokens[:count], logits[:count], sequence.params.logprobs)
            del sequence.logprobs[sequence.length :]  # a stop string may have taken tokens back
        return count


def _logprobs(tokens: list[int], logits: Tensor, alternatives: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, and the likeliest alternatives, by logits ``[T, V]``."""
    logs = log_probs(logits)  # [T, V]
    chosen = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    values, ids = logs.topk(min(alternatives, logs.shape[-1]), dim=-1)
    tops = [
        tuple((i, v) for i, v in zip(row_ids, row, strict=True) if v > float("-inf"))
        for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [TokenLogprob(t, v, top) for t, v, top in zip(tokens, chosen, tops, strict=True)]
