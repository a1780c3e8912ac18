"""Sequences that share a round."""

from __future__ import annotations

import functools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from agentspec.rng import RNGS, Acceptance, SequenceRng
from agentspec.sampling import Prefix, log_probs
from agentspec.sequence import Sequence, TokenLogprob


class Batch:
    """Sequences that share a round, with the randomness of their next positions.

    Args:
        sequences: unfinished, all of one acceptance rule.
        device: where the round's tensors live.
        rng: the randomness; by default that of the sequences' seeds and rule.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], device: torch.device | str = "cpu", rng: SequenceRng | None = None
    ) -> None:
        self.sequences = list(sequences)
        self.acceptance: Acceptance = self.sequences[0].acceptance
        if any(s.acceptance != self.acceptance for s in self.sequences):
            raise ValueError("The sequences of a batch must share one acceptance rule; got both.")
        self.params = [s.params for s in self.sequences]
        self.device = device
        self._dice = rng

    def __len__(self) -> int:
        return len(self.sequences)

    @functools.cached_property
    def rng(self) -> SequenceRng:
        """The randomness of the round."""
        seeds, lengths = [s.seed for s in self.sequences], [s.length for s in self.sequences]
        return self._dice or RNGS[self.acceptance](seeds, lengths, self.device)

    @property
    def needs_laws(self) -> bool:
        """Whether more of the laws is needed than their best tokens: for a draw, or for log-probabilities."""
        return any(p.temperature > 0 or (p.logprobs is not None and not p.raw_logprobs) for p in self.params)

    def prefixes(self, spans: SequenceOf[list[int]]) -> list[Prefix] | None:
        """What stands before every position of a drafted span and behind it; None where no law looks at it."""
        if not any(params.adjusts for params in self.params):
            return None
        return [
            Prefix(context, s.prompt_length, len(span) + 1, s.end_tokens)
            for s, context, span in zip(self.sequences, self.contexts(spans), spans, strict=True)
        ]

    def prefix(self, row: int, drafted: list[int]) -> Prefix:
        """Return what stands before the position after ``drafted`` tokens of a row."""
        sequence = self.sequences[row]
        return Prefix(sequence.context + drafted, sequence.prompt_length, 1, sequence.end_tokens)

    def contexts(self, spans: SequenceOf[list[int]]) -> list[list[int]]:
        """The whole context of every row, its drafted span behind it."""
        return [s.context + span for s, span in zip(self.sequences, spans, strict=True)]

    @property
    def detokenize_seconds(self) -> float:
        """Seconds spent so far on the text of the batch's sequences."""
        return sum(s.detokenize_seconds for s in self.sequences)

    def commit(self, row: int, block: list[int], warped: Tensor | None, logits: Tensor, walked: int = 0) -> int:
        """Extend a sequence by its block; how many tokens it took.

        Args:
            row: of the sequence.
            block: accepted tokens and the recovered or bonus token.
            warped: ``[B, K+1, V]``, the logits whose softmax each position was drawn from; None where the batch
                ``needs_laws`` not.
            logits: ``[B, K+1, V]``, the target's scores that it was made of.
            walked: tokens of the block that the sequence's matcher has taken already.
        """
        sequence = self.sequences[row]
        taken = sequence.extend(block, walked)
        if sequence.params.logprobs is not None:
            reported = logits if sequence.params.raw_logprobs else warped
            assert reported is not None  # the batch needs laws
            sequence.logprobs += _logprobs(block[:taken], reported[row, :taken], sequence.params.logprobs)
            del sequence.logprobs[sequence.length :]
        return taken


def _logprobs(tokens: list[int], logits: Tensor, alternatives: int) -> list[TokenLogprob]:
    logs = log_probs(logits)  # [T, V]
    chosen = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])[:, 0].tolist()
    values, ids = logs.topk(min(alternatives, logs.shape[-1]), dim=-1)
    tops = [
        tuple((i, v) for i, v in zip(row_ids, row, strict=True) if v > float("-inf"))
        for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [TokenLogprob(t, v, top) for t, v, top in zip(tokens, chosen, tops, strict=True)]
