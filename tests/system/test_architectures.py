"""Every causal architecture of transformers is served with its own logits, or refused by name, as the docs say."""

from __future__ import annotations

import pytest
import torch
import transformers
from architecture_sizes import VARIANTS
from architectures import (
    ARCHITECTURES,
    PAGE,
    Outcome,
    WrongScoresError,
    page,
    read_page,
    try_architecture,
    try_variant,
)

from agentspec.models import attention, probe
from agentspec.models.backends.native import compiles

pytestmark = [pytest.mark.sweep, pytest.mark.usefixtures("one_thread")]

TEXT = PAGE.read_text(encoding="utf-8")
VERSION, STATED = read_page(TEXT)
REMEDY = "run `python tests/architectures.py` and look at the difference"


def check(name: str, found: Outcome) -> None:
    """Compare with the docs, where they were made with the transformers that is here."""
    if transformers.__version__ != VERSION:
        pytest.skip(f"the docs are of transformers {VERSION}: {found.status}, {found.detail}")
    assert name in STATED, f"{name} is not in {PAGE.name}: {REMEDY}"
    if "ImportError" in STATED[name].detail and found != STATED[name]:
        pytest.skip(f"the docs were made without a package that is here: {found.status}, {found.detail}")
    assert found.status == STATED[name].status, f"{found.detail}; {REMEDY}"
    if found.status != "served" or compiles("auto"):
        assert found.detail == STATED[name].detail, REMEDY


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *STATED} - {*VARIANTS}))
def test_an_architecture_is_served_right_or_refused_as_the_docs_say(name: str) -> None:
    if name not in ARCHITECTURES:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    check(name, try_architecture(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_served_right_or_refused_as_the_docs_say(name: str) -> None:
    if VARIANTS[name].architecture not in ARCHITECTURES:
        pytest.skip(f"transformers {transformers.__version__} has no {VARIANTS[name].architecture}")
    check(name, try_variant(name))


def test_the_docs_hold_nothing_else() -> None:
    assert set(STATED) - {*ARCHITECTURES} == set(VARIANTS) or transformers.__version__ != VERSION
    rows = {name: found for name, found in STATED.items() if name not in VARIANTS}
    if transformers.__version__ == VERSION:
        assert page(rows, {name: STATED[name] for name in VARIANTS}) == TEXT


def test_wrong_scores_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep can fail: a mask that lets one token more out of the window is found."""
    build = attention.LayerMasks.build

    def one_more(self: attention.LayerMasks, slots: torch.Tensor, live: int, dtype: torch.dtype) -> object:
        widened = {kind: window and window + 1 for kind, window in self.windows.items()}
        return build(attention.LayerMasks(widened), slots, live, dtype)

    monkeypatch.setattr(attention.LayerMasks, "build", one_more)
    monkeypatch.setattr(probe.Probe, "run", lambda self, max_context: None)
    with pytest.raises(WrongScoresError, match="mistral: logits differ"):
        try_architecture("mistral")
