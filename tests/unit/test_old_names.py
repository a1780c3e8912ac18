"""Old names and paths work for one release, with a warning."""

from __future__ import annotations

import importlib
import runpy
import sys

import pytest

import agentspec
from agentspec import _moved


@pytest.mark.parametrize("old", _moved.MOVED)
def test_an_old_path_finds_the_module_itself(old: str) -> None:
    new = importlib.import_module(f"agentspec.{_moved.MOVED[old]}")
    spec = new.__spec__
    sys.modules.pop(f"agentspec.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"agentspec\.{old} is agentspec\.{_moved.MOVED[old]} now"):
        found = importlib.import_module(f"agentspec.{old}")
    assert found is new
    assert new.__spec__ is spec


@pytest.mark.parametrize("old", agentspec._RENAMED)
def test_an_old_name_finds_the_thing_itself(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"agentspec\.{old} is agentspec\.{agentspec._RENAMED[old]} now"):
        assert getattr(agentspec, old) is getattr(agentspec, agentspec._RENAMED[old])


def test_a_name_that_never_was_is_none() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Walks'"):
        agentspec.Walks  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("agentspec.walks")


def test_a_module_runs_as_a_command_by_its_old_path() -> None:
    sys.modules.pop("agentspec.tokens", None)
    found = runpy.run_module("agentspec.tokens", run_name="command")
    assert (found["__name__"], "NO_TOKEN" in found) == ("command", True)
