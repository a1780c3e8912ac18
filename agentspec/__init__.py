"""agentspec: exact speculative decoding for agents on open models."""

import importlib
import warnings
from typing import Any

from agentspec import _moved
from agentspec.batch import Batch
from agentspec.draft_length import Auto, DraftLength, Fixed
from agentspec.drafters import Draft, Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.model import ModelDrafter
from agentspec.drafters.ngram import PromptLookupDrafter
from agentspec.drafters.suffix import SuffixDrafter
from agentspec.engine import Engine
from agentspec.engine.local import LocalEngine
from agentspec.engine.request import Completion, Delta, Request
from agentspec.errors import (
    AgentSpecError,
    ContextOverflowError,
    EngineBusyError,
    EngineClosedError,
    EngineStuckError,
    GrammarError,
    IncompatiblePairError,
    InvalidRequestError,
    ModelLoadError,
    RequestFailedError,
    RequestTimeoutError,
)
from agentspec.grammars.grammar import Grammar
from agentspec.models import LanguageModel
from agentspec.models.causal_lm import CausalLM
from agentspec.models.cross_vocab.mapping import VocabMapping
from agentspec.models.cross_vocab.model import CrossVocabModel
from agentspec.sampling import SamplingParams
from agentspec.sequence import FinishReason, Sequence, TokenLogprob
from agentspec.speculative import SpeculativeDecoder
from agentspec.stats import StepStats

__all__ = [
    "AgentSpecError",
    "Auto",
    "Batch",
    "Cascade",
    "CausalLM",
    "Completion",
    "ContextOverflowError",
    "CrossVocabModel",
    "Delta",
    "Draft",
    "DraftLength",
    "Drafter",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineStuckError",
    "FinishReason",
    "Fixed",
    "Grammar",
    "GrammarError",
    "IncompatiblePairError",
    "InvalidRequestError",
    "LanguageModel",
    "LocalEngine",
    "ModelDrafter",
    "ModelLoadError",
    "PromptLookupDrafter",
    "Request",
    "RequestFailedError",
    "RequestTimeoutError",
    "SamplingParams",
    "Sequence",
    "SpeculativeDecoder",
    "StepStats",
    "SuffixDrafter",
    "TokenLogprob",
    "VocabMapping",
]


_RENAMED = {"TranslatedModel": "CrossVocabModel", "Translation": "VocabMapping"}
"""New public names by old ones, for one release."""


def __getattr__(name: str) -> Any:
    """Import ``agentspec.embedded`` when asked for; find a renamed thing by its old name, with a warning."""
    if name == "embedded":
        return importlib.import_module("agentspec.models.embedded")
    if name in _RENAMED:
        warnings.warn(f"agentspec.{name} is agentspec.{_RENAMED[name]} now.", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module 'agentspec' has no attribute {name!r}")


_moved.install()
