"""Work for a thread of its own: results, exceptions, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from enumeration import TableModel
from tiny import llama
from torch import Tensor

import agentspec.models.causal_lm
from agentspec import CausalLM
from agentspec.models import as_language_model
from agentspec.models.pass_cost import measured
from agentspec.runtime.threads import apart


def test_results_and_exceptions_come_back() -> None:
    @apart
    def divide(a: int, b: int) -> tuple[float, int]:
        """A quotient."""
        return a / b, threading.get_ident()

    quotient, thread = divide(6, b=3)
    assert quotient == 2
    assert thread != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert divide.__doc__ == "A quotient."
    assert not [t for t in threading.enumerate() if "divide" in t.name]


def test_models_are_loaded_and_measured_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loading thread keeps a team of helpers, and every pass of the engine's worker takes longer."""
    llama().save_pretrained(tmp_path)
    seen: list[threading.Thread] = []

    class Watched(TableModel):
        def next_logits(self, contexts: Sequence[list[int]], last: Sequence[int]) -> Tensor:
            seen.append(threading.current_thread())
            return super().next_logits(contexts, last)

    probe = CausalLM._probe

    def watched(self: CausalLM) -> None:
        seen.append(threading.current_thread())
        probe(self)

    monkeypatch.setattr(agentspec.models.causal_lm.CausalLM, "_probe", watched)
    CausalLM.from_pretrained(tmp_path, device="cpu")
    measured(as_language_model(Watched()))
    assert len(seen) > 10
    assert threading.current_thread() not in seen
    assert not any(thread.is_alive() for thread in seen)
