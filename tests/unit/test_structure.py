"""The house stays as it was drawn: imports run downward, rooms stay small, the public names are the public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import agentspec

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted([*(ROOT / "agentspec").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])

# From the ground up; a module may import from its own storey and from those below.
STOREYS = [
    {
        "agentspec.errors",
        "agentspec.detokenizer",
        "agentspec.stops",
        "agentspec.values",
        "agentspec.visible",
        "agentspec.tokens",
        "agentspec.spelling",
        "agentspec.ecma",
        "agentspec.formats",
        "agentspec.stats",
        "agentspec.folders",
        "agentspec.digests",
        "agentspec.cache",
        "agentspec.thread_budget",
        "agentspec.threads",
        "agentspec.device",
        "agentspec.kernels",
        "agentspec.schema_tools",
        "agentspec.params",
    },
    {"agentspec.openers"},
    {"agentspec.calls", "agentspec.from_types", "agentspec.harmony", "agentspec.theory", "agentspec.metrics"},
    {"agentspec.grammar", "agentspec.masks"},
    {"agentspec.sampling", "agentspec.dice"},
    {"agentspec.sequence", "agentspec.models"},
    {"agentspec.constraints"},
    {"agentspec.drafters"},
    {"agentspec.draft_length"},
    {"agentspec.speculative"},
    {"agentspec.job"},
    {"agentspec.rounds", "agentspec.worker_status"},
    {"agentspec.scheduler"},
    {"agentspec.request", "agentspec.waiting"},
    {"agentspec.admission"},
    {"agentspec.validation"},
    {"agentspec.engine"},
    {"agentspec.chat", "agentspec.report", "agentspec.embedded", "agentspec.consistency"},
    {"agentspec.pairs"},
    {"agentspec"},
    {"langchain_agentspec"},
    {"agentspec.commands"},
    {"agentspec.cli"},
    {"agentspec.__main__"},
]
OWNERS = {
    "langchain_core": r"langchain_agentspec",
    "langchain": r"langchain_agentspec",
    "transformers": r"agentspec\.(models|chat|embedded|pairs)",
    "llguidance": r"agentspec\.constraints\.llguidance",
    "outlines": r"agentspec\.constraints\.outlines",
    "outlines_core": r"agentspec\.constraints\.outlines",
    "diskcache": r"agentspec\.cache",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("__init__", "integrations"))


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def storey(module: str) -> int:
    for height, rooms in enumerate(STOREYS):
        if any(module == room or (room not in ("agentspec",) and module.startswith(room + ".")) for room in rooms):
            return height
    raise AssertionError(f"{module} stands in no storey: give it one")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    module = name_of(path)
    for imported in imports_of(path):
        if imported.split(".")[0] in ("agentspec", "langchain_agentspec"):
            assert storey(imported) <= storey(module), f"{module} imports {imported} from above"
        owner = OWNERS.get(imported.split(".")[0])
        if owner is not None:
            assert re.match(owner, module), f"{module} imports {imported}, which belongs to {owner}"


def test_siblings_in_a_folder_of_implementations_do_not_import_each_other() -> None:
    for folder in ("drafters", "constraints"):
        for path in (ROOT / "agentspec" / folder).glob("[!_]*.py"):
            siblings = {i for i in imports_of(path) if i.startswith(f"agentspec.{folder}.")}
            assert not siblings, f"{name_of(path)} imports its siblings {siblings}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350


def test_the_public_names_are_all_there() -> None:
    assert agentspec.__all__ == sorted(agentspec.__all__)
    for name in agentspec.__all__:
        assert getattr(agentspec, name).__doc__, f"{name} needs a docstring"


def test_every_public_thing_says_what_it_is() -> None:
    for path in MODULES:
        tree = ast.parse(path.read_text())
        for node in [tree, *ast.walk(tree)]:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = getattr(node, "name", "")
                public = not name.startswith("_") and not isinstance(node, ast.FunctionDef)
                if public and path.read_text().strip():
                    assert ast.get_docstring(node), f"{name_of(path)}.{name} has no docstring"


TESTS = ROOT / "tests"
LAYERS = {  # what tests of a layer do without
    "unit": ("from tiny import", "import tiny", "embedded_model", "mark.embedded"),
    "models": ("embedded_model", "mark.embedded"),
    "agents": ("embedded_model", "mark.embedded"),
    "system": (),
}


def test_every_test_stands_in_a_layer() -> None:
    assert {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} == set(LAYERS)
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names)), "files of tests are told apart by their names alone"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_does_without_what_belongs_above(layer: str) -> None:
    for path in (TESTS / layer).glob("test_*.py"):
        if path.name != Path(__file__).name:
            found = [mark for mark in LAYERS[layer] if mark in path.read_text()]
            assert not found, f"{path.name} has {found}, so it belongs above {layer}"


def test_nothing_is_read_beside_the_project() -> None:
    """Tests stand alone in a clone."""
    for path in TESTS.rglob("*.py"):
        depth = len(path.relative_to(ROOT).parts) - 1  # parents[depth] is what the clone lies in
        above = [int(n) for n in re.findall(r"parents\[(\d+)\]", path.read_text())]
        assert not [n for n in above if n > depth], f"{path.name} reads above the project"
