"""agentspec: exact speculative decoding for agents on open models."""

import importlib
from types import ModuleType

from agentspec.draft_length import Auto, DraftLength, Fixed
from agentspec.drafters import Draft, Drafter
from agentspec.drafters.cascade import Cascade
from agentspec.drafters.lookup import PromptLookupDrafter
from agentspec.drafters.model import ModelDrafter
from agentspec.drafters.suffix import SuffixDrafter
from agentspec.engine import Engine, LocalEngine
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
from agentspec.grammar import Grammar
from agentspec.job import Delta
from agentspec.models import LanguageModel
from agentspec.models.causal_lm import CausalLM
from agentspec.models.translated import TranslatedModel
from agentspec.models.translation import Translation
from agentspec.request import Completion, Request
from agentspec.sampling import SamplingParams
from agentspec.sequence import Batch, FinishReason, Sequence, TokenLogprob
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
    "TranslatedModel",
    "Translation",
]


def __getattr__(name: str) -> ModuleType:
    """``agentspec.embedded`` is imported when asked for: it is also a command (``python -m agentspec.embedded``)."""
    if name == "embedded":
        return importlib.import_module("agentspec.embedded")
    raise AttributeError(f"module 'agentspec' has no attribute {name!r}")
