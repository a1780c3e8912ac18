"""What tests of the whole system stand on: the embedded model, loaded once. Other layers have no weights."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerBase

from agentspec import embedded
from agentspec.models.causal_lm import CausalLM


@pytest.fixture(scope="session")
def embedded_model() -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """The embedded model on the CPU in float32, where results are the same everywhere, and its tokenizer."""
    return embedded.load(device="cpu")
