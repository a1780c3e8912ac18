"""Old paths of modules, which find the new ones for one release.

Remove this file, ``RENAMED`` and their test in the release after 0.2.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

MOVED = {
    "admission": "engine.admission",
    "cache": "runtime.cache",
    "calls": "grammars.tool_calls",
    "chat.answers": "chat.answer_parser",
    "chat.checked": "chat.call_checks",
    "chat.foreign": "chat.control_tokens",
    "chat.pieces": "chat.parser",
    "chat.spelled": "chat.call_spellings",
    "constraints": "grammars",
    "consistency": "voting",
    "device": "runtime.device",
    "dice": "rng",
    "drafters.lookup": "drafters.ngram",
    "embedded": "models.embedded",
    "folders": "runtime.paths",
    "grammar": "grammars.grammar",
    "job": "engine.state",
    "kernels": "models.backends.native",
    "masks": "grammars.token_mask",
    "metrics": "engine.metrics",
    "models.cost": "models.pass_cost",
    "models.translated": "models.cross_vocab.model",
    "models.translation": "models.cross_vocab.mapping",
    "pairs": "engine.registry",
    "report.html": "report.views.html",
    "report.prometheus": "engine.prometheus",
    "report.terminal": "report.views.terminal",
    "report.trace": "report.views.trace",
    "request": "engine.request",
    "scheduler": "engine.scheduler",
    "schema_tools": "grammars.schema_tools",
    "threads": "runtime.threads",
    "tokens": "runtime.tokens",
    "validation": "engine.validation",
}
"""New paths by old ones, below ``agentspec``."""


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds a module by its old path, with a ``DeprecationWarning``: the very module that has the new path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for an old path; None for any other."""
        if name.removeprefix("agentspec.") not in MOVED or not name.startswith("agentspec."):
            return None
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the module at the new path."""
        new = MOVED[spec.name.removeprefix("agentspec.")]
        warnings.warn(f"{spec.name} is agentspec.{new} now.", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(f"agentspec.{new}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it has been executed."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module at the new path, for ``python -m``."""
        found = importlib.util.find_spec(f"agentspec.{MOVED[fullname.removeprefix('agentspec.')]}")
        assert found is not None
        loader = found.loader
        return loader.get_code(found.name) if isinstance(loader, importlib.abc.InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        """Return no source: it stands at the new path."""
        return None


def install() -> None:
    """Find modules by their old paths from now on."""
    sys.meta_path.append(MovedModules())
