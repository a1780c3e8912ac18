"""What every test stands on: no hub, two threads, and the embedded model loaded once."""

from __future__ import annotations

import os

# Read once, when transformers is imported: so before any import that leads there.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from agentspec import embedded
from agentspec.models.causal_lm import CausalLM

torch.set_num_threads(min(2, os.cpu_count() or 1))

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def embedded_model() -> tuple[CausalLM, PreTrainedTokenizerBase]:
    """The embedded model on the CPU in float32, where results are the same everywhere, and its tokenizer."""
    return embedded.load(device="cpu")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of prompts, tools and schemas that is kept beside the project, not in it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the data folder {Path(*SHARED_DATA.parts[-2:])} beside the project is missing")
    return SHARED_DATA


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests of many tiny tensors: threads gain nothing there, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
