"""The language-model seam: whole contexts in, next logits out.

A `LanguageModel` is a pure function in meaning; caches live inside an implementation and cost time, never correctness,
when lost. There is no rewind: a rejected draft, the next turn of an agent and n samples of one prompt are all "the
logits of these contexts", and an implementation finds what it has already computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from agentspec.models.backends.sampling import TORCH, SamplingKernels
from agentspec.models.logits import Logits

__all__ = ["LanguageModel", "Logits", "SamplingKernels", "as_language_model"]

UNCACHED_ROWS = 64
"""Sequences that share a round of a target without a cache."""


class LanguageModel(ABC):
    """Next-token logits of whole contexts. Target and draft model satisfy the same seam.

    ``vocab_size`` and ``next_logits`` are all that a model needs; the rest has defaults.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids V that a row of logits covers."""

    @abstractmethod
    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Logits:
        """Return the logits after each of the final ``last[b]`` tokens of ``contexts[b]``.

        The values are ``[B, max(last), V]``, at least float32; row b's first ``last[b]`` entries are meant, the rest is
        padding. ``last[b] == 0`` asks for nothing and only lets an implementation cache the context (prefill).
        """

    @property
    def device(self) -> torch.device:
        """Where the model computes, and where logits are returned."""
        return torch.device("cpu")

    @property
    def max_context(self) -> int | None:
        """Longest context in tokens; None without a bound."""
        return None

    @property
    def max_running(self) -> int:
        """How many contexts share a pass without pushing each other out of the cache."""
        return UNCACHED_ROWS

    @property
    def is_cached(self) -> bool:
        """Whether a context that was read once is read faster the next time: whether prefill is of use."""
        return False

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that the model was made to end its turns with."""
        return frozenset()

    @property
    def fingerprint(self) -> str | None:
        """What the cost of a pass depends on, beside the machine; None where that is not known."""
        return None

    @property
    def fits_any_threads(self) -> bool:
        """Whether logits are the same on any number of threads, bit for bit."""
        return False

    @property
    def sampling_kernels(self) -> SamplingKernels:
        """What draws from this model's distributions and filters its logits."""
        return TORCH

    def cached_tokens(self, context: list[int]) -> int:
        """Return the length of the longest prefix of ``context`` whose computation would be reused."""
        return 0

    def can_read(self, context: list[int]) -> bool:
        """Return whether the model can be asked about a ``context`` of ids below ``vocab_size``."""
        return self.max_context is None or len(context) <= self.max_context


def as_language_model(model: Any) -> LanguageModel:
    """Return a model as a ``LanguageModel``: itself, or a user's bare one in an adapter.

    Args:
        model: has ``vocab_size`` and ``next_logits``, which may return a tensor; may have the other attributes.

    Raises:
        TypeError: for what has neither.
    """
    if isinstance(model, LanguageModel):
        return model
    if not callable(getattr(model, "next_logits", None)) or not hasattr(model, "vocab_size"):
        raise TypeError(f"Expected a model with vocab_size and next_logits, got {type(model).__name__}.")
    return BareModel(model)


class BareModel(LanguageModel):
    """A user's model by duck typing: what it lacks has the default. This is the one place that asks what it has.

    Args:
        model: the user's.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def vocab_size(self) -> int:
        """The model's own."""
        return int(self.model.vocab_size)

    def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Logits:
        """Return the model's logits, which may be a tensor."""
        found = self.model.next_logits(contexts, last)
        return found if isinstance(found, Logits) else Logits(found)

    @property
    def device(self) -> torch.device:
        """The model's own, or the CPU."""
        return torch.device(getattr(self.model, "device", "cpu"))

    @property
    def max_context(self) -> int | None:
        """The model's own, or none."""
        found: int | None = getattr(self.model, "max_context", None)
        return found

    @property
    def max_running(self) -> int:
        """The model's own (``max_rows`` of old), or the default."""
        return int(getattr(self.model, "max_running", getattr(self.model, "max_rows", super().max_running)))

    @property
    def is_cached(self) -> bool:
        """Whether the model says what it has cached."""
        return callable(getattr(self.model, "cached_tokens", None))

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The model's own (``end_tokens`` of old), or none."""
        ids: Collection[int] = getattr(self.model, "end_token_ids", getattr(self.model, "end_tokens", ()))
        return frozenset(ids)

    @property
    def fingerprint(self) -> str | None:
        """The model's own, or none."""
        found: str | None = getattr(self.model, "fingerprint", None)
        return found

    @property
    def fits_any_threads(self) -> bool:
        """The model's own word, or no."""
        return bool(getattr(self.model, "fits_any_threads", False))

    @property
    def sampling_kernels(self) -> SamplingKernels:
        """The model's own, or torch's."""
        found: SamplingKernels = getattr(self.model, "sampling_kernels", TORCH)
        return found

    def cached_tokens(self, context: list[int]) -> int:
        """Return the model's own count, or 0."""
        return int(self.model.cached_tokens(context)) if self.is_cached else 0

    def can_read(self, context: list[int]) -> bool:
        """Return the model's own answer, or the default's."""
        asked = getattr(self.model, "can_read", None)
        return super().can_read(context) if asked is None else bool(asked(context))
