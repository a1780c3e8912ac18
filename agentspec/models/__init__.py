"""The language-model seam: whole contexts in, next logits out.

``LanguageModel`` is a pure function in meaning; caches live inside an implementation and cost time, never
correctness, when lost. There is no rewind: a rejected draft, the next turn of an agent and n samples of one prompt
are all "the logits of these contexts", and an implementation finds what it has already computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class LanguageModel(Protocol):
    """Next-token logits of whole contexts. Target and draft satisfy the same seam."""

    @property
    def vocab_size(self) -> int:
        """Number of ids V that a row of logits covers."""
        ...

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
        """Logits after each of the final ``last[b]`` tokens of ``contexts[b]``.

        Returns ``[B, max(last), V]``, at least float32; row b's first ``last[b]`` entries are meant, the rest is
        padding. ``last[b] == 0`` asks for nothing and only lets an implementation cache the context (prefill).
        """
        ...


@runtime_checkable
class CachingModel(LanguageModel, Protocol):
    """A model that can say what it has cached and how far its positions reach."""

    @property
    def max_context(self) -> int:
        """Longest context, in tokens, that the model's positions cover."""
        ...

    @property
    def max_rows(self) -> int:
        """How many contexts it keeps at once."""
        ...

    def cached_tokens(self, context: list[int]) -> int:
        """Length of the longest prefix of ``context`` whose computation would be reused."""
        ...


@runtime_checkable
class BestModel(LanguageModel, Protocol):
    """A model that finds the best tokens as it scores them, which takes less than to look for them afterwards."""

    def best_of(self, logits: Tensor) -> list[list[int]] | None:
        """The first best token after each of the final ``last[b]`` tokens, where ``logits`` are as it returned them.

        ``NO_TOKEN`` stands where none has a score above -inf, or one is NaN. None where it cannot tell, and for other
        logits: a model around this one may have made them.
        """
        ...


@runtime_checkable
class PaddedModel(LanguageModel, Protocol):
    """A model whose head may score more ids than there are tokens."""

    def narrow(self, vocab_size: int) -> None:
        """Leave out the scores of ids from ``vocab_size`` on."""
        ...


@runtime_checkable
class SelectiveModel(LanguageModel, Protocol):
    """A model for which length alone does not tell which contexts fit."""

    def can_read(self, context: list[int]) -> bool:
        """Whether it can be asked about ``context``."""
        ...


def cached_tokens(model: LanguageModel, context: list[int]) -> int:
    """Tokens of ``context`` that ``model`` need not compute again; 0 for a model without a cache."""
    return model.cached_tokens(context) if isinstance(model, CachingModel) else 0


def end_tokens(model: LanguageModel) -> frozenset[int]:
    """Ids that the model was made to end its turns with, as far as it says so."""
    return frozenset(getattr(model, "end_tokens", ()))


def max_context(model: LanguageModel) -> int | None:
    """Longest context of ``model`` in tokens, None where it has no bound."""
    return model.max_context if isinstance(model, CachingModel) else None


def fits_any_threads(model: LanguageModel) -> bool:
    """Whether the scores of ``model`` are the same on any number of threads, bit for bit, as far as it says so."""
    return bool(getattr(model, "fits_any_threads", False))
