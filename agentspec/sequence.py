"""Who owns the truth: the tokens of one sequence, and the one place where a block of them is committed."""

from __future__ import annotations

import functools
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from agentspec.detokenizer import Detokenizer
from agentspec.dice import DICE, Acceptance, Dice, fresh_seed
from agentspec.errors import GrammarError, InvalidRequestError
from agentspec.masks import TokenMask
from agentspec.sampling import Prefix, SamplingParams, log_probs
from agentspec.stops import Ending, StopStrings


class FinishReason(StrEnum):
    """Why a sequence ended.

    The engine of this process says ``stop`` or ``length``; a chat model says ``tool_calls`` where a call was made. Here
    nobody listens to what was cancelled, and errors are raised: ``cancelled`` and ``error`` are for engines elsewhere.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Matcher(Protocol):
    """The state of a grammar after some tokens. End tokens are not its business. Engines inherit from it."""

    def allowed(self) -> TokenMask:
        """The tokens that may come next."""
        ...

    def advance(self, token: int) -> bool:
        """Take one token; False, and no change, where it is not allowed."""
        ...

    def rewind(self, count: int) -> None:
        """Undo the last ``count`` advances."""
        ...

    def is_complete(self) -> bool:
        """Whether the text so far is a whole sentence of the grammar."""
        ...

    # What an engine may know without a mask:

    def forced(self) -> int | None:
        """The token that has to come next; None where there is a choice."""
        return self.allowed().only

    def is_over(self) -> bool:
        """Whether the text so far is a whole sentence, and no token may come next."""
        return self.is_complete() and self.allowed().is_empty


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of an emitted token under the law it was drawn from, and of the likeliest alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sequence:
    """One sample of one request: its prompt, tokens, grammar state and finish reason.

    Everything else that is known about it (KV rows, draft state) is derived and may be lost.

    Args:
        prompt: ids before the first emitted token.
        params: sampling settings.
        matcher: grammar state, owned by this sequence; None where every token is legal.
        end_tokens: ids that end the sequence.
        detokenizer: gives the text; None where none is asked for.
        seed: of this sample; None draws one.
        limit: most tokens to emit, where the context ends before ``params.max_tokens``.
        gamma: tokens to draft per round, None for the decoder's own choice.
        acceptance: rule by which its drafted tokens are accepted.
    """

    def __init__(
        self,
        prompt: SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        matcher: Matcher | None = None,
        end_tokens: Collection[int] = frozenset(),
        detokenizer: Detokenizer | None = None,
        seed: int | None = None,
        limit: int | None = None,
        gamma: int | None = None,
        acceptance: Acceptance = "rejection",
    ) -> None:
        self.params = params or SamplingParams()
        self.matcher = matcher
        self.end_tokens = frozenset(end_tokens) | frozenset(self.params.stop_token_ids)
        self.limit = self.params.max_tokens if limit is None else min(limit, self.params.max_tokens)
        if self.limit < 1 or (gamma or 0) < 0:
            raise InvalidRequestError(f"Expected limit >= 1 and gamma >= 0, got limit={limit} and gamma={gamma}.")
        self.gamma = gamma
        self.acceptance: Acceptance = acceptance
        self.seed = fresh_seed() if seed is None else seed
        self.context = list(prompt)
        self.prompt_length = len(self.context)
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.fault: BaseException | None = None
        """Why it cannot go on: a commit that ended half-way, or a matcher that raised and may stand anywhere."""
        self.siblings: SequenceOf[Sequence] = ()
        """The samples of its request, itself among them; drafters may look at what they say."""
        self._detokenizer = detokenizer
        self._stops = None
        if detokenizer is not None and self.params.stop:
            self._stops = StopStrings(self.params.stop, detokenizer, self.params.include_stop)
        self._stopped: Ending | None = None  # by a stop string

    @property
    def tokens(self) -> list[int]:
        """The emitted ids, the end token included."""
        return self.context[self.prompt_length :]

    @property
    def length(self) -> int:
        """Number of emitted tokens."""
        return len(self.context) - self.prompt_length

    @property
    def text(self) -> str:
        """The text so far; once finished, exactly the text of the emitted tokens before the end."""
        if self._stopped is not None:
            return self._stopped.text
        return self._detokenizer.text if self._detokenizer else ""

    @property
    def detokenize_seconds(self) -> float:
        """Seconds spent so far on the text."""
        return self._detokenizer.seconds if self._detokenizer else 0.0

    @property
    def settled_text(self) -> str:
        """The text that no later token can take back: without what may become a stop string."""
        if self.finish_reason is not None or self._stops is None:
            return self.text
        return self.text[: self._stops.settled()[0]]

    @property
    def settled_length(self) -> int:
        """Emitted tokens that no later token can take back, their text being whole and settled."""
        if self._detokenizer is None or self.finish_reason is not None:
            return self.length
        if self._stops is not None:
            return self._stops.settled()[1]
        if self._detokenizer.is_whole:
            return self.length
        ends = self._detokenizer.ends
        return next((n for n in range(self.length, 0, -1) if ends[n - 1] is not None), 0)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - self.length

    def extend(self, block: list[int], walked: int = 0) -> int:
        """Commit the tokens of a block up to the first boundary in it; how many were taken.

        The earliest boundary wins; at one position a stop string goes before an end token, the end of the grammar
        and the limit.

        Args:
            block: the tokens.
            walked: how many of them the matcher has taken already.
        """
        for count, token in enumerate(block, 1):
            is_text = self.matcher is not None and token not in self.end_tokens
            if is_text and self.matcher is not None and count > walked and not self.matcher.advance(token):
                raise GrammarError(f"Token {token} was drawn, which the grammar does not allow here.")
            self.context.append(token)
            if self._detokenizer is not None:
                self._detokenizer.push(token)
            reason = self._boundary(token, may_be_over=count >= walked)
            if reason is not None:
                if self.matcher is not None and count < walked:
                    self.matcher.rewind(walked - count)
                self.finish(reason)
                return count
        return len(block)

    def finish(self, reason: FinishReason) -> None:
        """End the sequence here; a stop string and the tokens wholly inside it are taken off."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return
        self._detokenizer.flush()
        if self._stopped is not None:
            del self.context[self.prompt_length + self._stopped.tokens :]

    def give_up(self, error: BaseException) -> None:
        """Note why the sequence cannot go on; the first reason counts."""
        if self.fault is None:
            self.fault = error

    def _boundary(self, token: int, may_be_over: bool) -> FinishReason | None:
        is_over = token in self.end_tokens or (may_be_over and self._grammar_is_over())
        if self._stop_string_found() or is_over:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.limit else None

    def _stop_string_found(self) -> bool:
        self._stopped = None if self._stops is None else self._stops.find()
        return self._stopped is not None

    def _grammar_is_over(self) -> bool:
        return self.matcher is not None and self.matcher.is_over()


class Batch:
    """Sequences that share a round, with the randomness of their next positions.

    Args:
        sequences: unfinished, all of one acceptance rule.
        device: where the round's tensors live.
        dice: the randomness; by default that of the sequences' seeds and rule.
    """

    def __init__(
        self, sequences: SequenceOf[Sequence], device: torch.device | str = "cpu", dice: Dice | None = None
    ) -> None:
        self.sequences = list(sequences)
        self.acceptance: Acceptance = self.sequences[0].acceptance
        if any(s.acceptance != self.acceptance for s in self.sequences):
            raise ValueError("The sequences of a batch must share one acceptance rule; got both.")
        self.params = [s.params for s in self.sequences]
        self.device = device
        self._dice = dice

    def __len__(self) -> int:
        return len(self.sequences)

    @functools.cached_property
    def dice(self) -> Dice:
        """The randomness of the round."""
        seeds, lengths = [s.seed for s in self.sequences], [s.length for s in self.sequences]
        return self._dice or DICE[self.acceptance](seeds, lengths, self.device)

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
