"""A draft model of another tokenizer, by the target's ids: algorithm TLI of Timor et al. 2025 (arXiv 2502.05202).

Its distribution is the draft's, restricted to the tokens that both vocabularies have. Any q keeps p exact: what the
target alone can say is never drafted, and comes as recovered and bonus tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from agentspec.errors import IncompatiblePairError
from agentspec.models import LanguageModel, Logits, as_language_model
from agentspec.models.cross_vocab.mapping import VocabMapping
from agentspec.runtime.device import upload


class CrossVocabModel(LanguageModel):
    """A model that reads the target's ids, gives logits of them and computes with a draft's.

    Args:
        model: the draft.
        mapping: from the target's tokens to the draft's.

    Raises:
        IncompatiblePairError: for a draft whose context may end within two tokens of the target.
    """

    def __init__(self, model: LanguageModel, mapping: VocabMapping) -> None:
        self.model = model = as_language_model(model)
        self.mapping = mapping
        pairs = [(ours, theirs) for ours, theirs in mapping.shared.items() if theirs < model.vocab_size]
        self._ours, self._theirs = torch.tensor(pairs, dtype=torch.long, device=self.device).view(-1, 2).unbind(1)
        if self.max_context is not None and self.max_context < 2:
            raise IncompatiblePairError(
                f"The draft reads {model.max_context} tokens, and one token of the target may become "
                f"{mapping.longest} of them; expected a draft that reads at least two of the target's tokens."
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids V of the target."""
        return self.mapping.target_ids

    @property
    def shared_tokens(self) -> int:
        """How many of them the draft can score."""
        return len(self._ours)

    @property
    def max_context(self) -> int | None:
        """Tokens of the target that fit into the draft's context, whichever they are; ``can_read`` knows more."""
        limit = self.model.max_context
        return None if limit is None else (limit - len(self.mapping.lead)) // self.mapping.longest

    @property
    def max_running(self) -> int:
        """That of the draft."""
        return self.model.max_running

    @property
    def is_cached(self) -> bool:
        """Whether the draft is."""
        return self.model.is_cached

    @property
    def device(self) -> torch.device:
        """Where the draft computes, and where logits are returned."""
        return self.model.device

    @property
    def fits_any_threads(self) -> bool:
        """Whether its model's logits are the same on any number of threads."""
        return self.model.fits_any_threads

    @property
    def fingerprint(self) -> str | None:
        """The draft's, marked as mapped; None where it has none."""
        inner = self.model.fingerprint
        return None if inner is None else f"{inner} for {self.vocab_size} ids, {self.shared_tokens} of them shared"

    def can_read(self, context: list[int]) -> bool:
        """Whether the context holds ids of the target only, and the draft's holds the mapped ids."""
        if max(context) >= self.vocab_size:
            return False
        ids = self.mapping(context)
        return max(ids) < self.model.vocab_size and self.model.can_read(ids)

    def cached_tokens(self, context: list[int]) -> int:
        """Return the length of the longest prefix, up to a word's end, whose mapped ids are all cached.

        0 for a context that the model cannot read.
        """
        if context and not self.can_read(context):
            return 0
        return self.mapping.whole_tokens(context, self.model.cached_tokens(self.mapping(context)))

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Logits:
        """Return the logits ``[B, max(last), V]`` after the final ``last[b]`` tokens, -inf for tokens not shared.

        Those after a token are the draft's after the mapped context up to it. Raises what the draft raises,
        in terms of its own tokens.
        """
        if not contexts:
            return Logits(torch.empty(0, 0, self.vocab_size, device=self.device))
        reads = _Reads()
        for context, count in zip(contexts, last, strict=True):
            self._ask(context, count, reads)
        logits = self.model.next_logits(reads.contexts, reads.last).values  # [reads, max(reads.last), draft ids]
        at = [(read, reads.last[read] - 1 - behind) for read, behind in reads.places]
        read, position = upload(torch.tensor(at, dtype=torch.long), logits.device).view(-1, 2).unbind(1)
        known = logits[read, position].index_select(-1, self._theirs)  # [sum(last), shared]
        logits = known.new_full((len(at), self.vocab_size), -math.inf).index_copy_(-1, self._ours, known)
        return Logits(pad_sequence(list(torch.split(logits, list(last))), batch_first=True))

    def _ask(self, context: list[int], count: int, reads: _Reads) -> None:
        """Ask for what follows the last ``count`` tokens of a context."""
        whole = self.mapping(context)
        reads.contexts.append(whole)
        reads.last.append(0)
        at = len(reads.last) - 1
        for stop in range(len(context) - count + 1, len(context) + 1):
            ids = self.mapping(context[:stop])
            if whole[: len(ids)] == ids:
                behind = len(whole) - len(ids)
                reads.places.append((at, behind))
                reads.last[at] = max(reads.last[at], behind + 1)
            else:  # within a word that goes on in another spelling
                reads.places.append((len(reads.last), 0))
                reads.contexts.append(ids)
                reads.last.append(1)


@dataclass
class _Reads:
    """What is asked of the draft, and where the answers stand: in which context, that many tokens before its end."""

    contexts: list[list[int]] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
