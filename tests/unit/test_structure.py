"""The house stays as it was drawn: imports run downward, rooms stay small, the public names are the public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentspec

ROOT = Path(__file__).resolve().parents[2]
MOVED = ROOT / "agentspec" / "_moved.py"  # finds what is asked for by an old path: it depends on none of it
MODULES = sorted([*(ROOT / "agentspec").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])

# From the ground up. A file stands on the floor of the longest name here that it begins with; it may import from its
# own floor and from those below.
FLOORS = [
    {"agentspec.errors"},
    {"agentspec.runtime", "agentspec.params", "agentspec.stats", "agentspec.theory", "agentspec.voting"},
    {"agentspec.models", "agentspec.report"},
    {"agentspec.grammars"},
    {"agentspec.sampling", "agentspec.rng"},
    {"agentspec.sequence"},
    {"agentspec.batch", "agentspec.acceptance_rates"},
    {"agentspec.drafters", "agentspec.chat"},
    {"agentspec.draft_length", "agentspec.acceptance"},
    {"agentspec.speculative"},
    {"agentspec.engine"},
    {"agentspec", "agentspec._moved"},
    {"langchain_agentspec"},
    {"agentspec.cli", "agentspec.__main__"},
]
ROOMS = {"drafters", "grammars", "chat", "models", "engine", "report", "runtime", "cli"}
OWNERS = {
    "langchain_core": r"langchain_agentspec",
    "langchain": r"langchain_agentspec",
    "transformers": r"agentspec\.(models|chat|engine\.registry)",
    "llguidance": r"agentspec\.grammars\.llguidance",
    "outlines": r"agentspec\.grammars\.outlines",
    "outlines_core": r"agentspec\.grammars\.outlines",
    "diskcache": r"agentspec\.runtime\.cache",
    "prometheus_client": r"agentspec\.engine\.prometheus",
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part not in ("__init__", "integrations"))


NAMES = {name_of(path): path for path in MODULES}


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, at its top, in functions, for types alone, or by a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & NAMES.keys()) or {node.module}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and path != MOVED:
            found |= _by_string(name_of(path), node.args[0])
    return found


def _by_string(module: str, argument: ast.expr) -> set[str]:
    """Return the modules that ``importlib.import_module`` may find by this argument."""
    if isinstance(argument, ast.Constant):
        return {str(argument.value)}
    assert isinstance(argument, ast.JoinedStr), f"{module} imports what cannot be seen: {ast.unparse(argument)}"
    return {name for name in NAMES if re.fullmatch("".join(_patterns(module, argument)), name)}


def _patterns(module: str, argument: ast.JoinedStr) -> Iterator[str]:
    for part in argument.values:
        if isinstance(part, ast.FormattedValue):
            yield re.escape(module) if ast.unparse(part.value) == "__name__" else r"[^.]+"
        elif isinstance(part, ast.Constant):
            yield re.escape(str(part.value))


def floor(module: str) -> int:
    """Return the height on which a module stands."""
    fitting = [
        (len(name), height)
        for height, names in enumerate(FLOORS)
        for name in names
        if module == name or (name != "agentspec" and module.startswith(name + "."))
    ]
    assert fitting, f"{module} stands on no floor: give it one"
    return max(fitting)[1]


def ours(path: Path) -> set[str]:
    """Return the modules of the project that a file imports."""
    return {name for name in imports_of(path) if name.split(".")[0] in ("agentspec", "langchain_agentspec")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return a way along each import that leads back to where it began."""
    done: set[str] = set()
    found = []

    def visit(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, [*way, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    module = name_of(path)
    for imported in imports_of(path):
        if imported.split(".")[0] in ("agentspec", "langchain_agentspec"):
            assert imported in NAMES, f"{module} imports {imported}, which is no file of the project"
            assert floor(imported) <= floor(module), f"{module} imports {imported} from above"
        owner = OWNERS.get(imported.split(".")[0])
        if owner is not None:
            assert re.match(owner, module), f"{module} imports {imported}, which belongs to {owner}"


def test_no_imports_form_a_circle() -> None:
    files = {name: ours(path) - {name} for name, path in NAMES.items()}
    assert circles(files) == []
    rooms: dict[str, set[str]] = {}
    for name, imported in files.items():
        rooms.setdefault(room(name), set()).update(set(map(room, imported)) - {room(name)})
    assert circles(rooms) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [["a", "b", "c", "a"]]


def room(module: str) -> str:
    """Return the folder of agentspec that a module is in, or the module where it stands beside the folders."""
    first, *rest = module.split(".")
    return first if not rest or first != "agentspec" else rest[0]


def test_imports_by_string_are_seen() -> None:
    by_string = {
        name: _by_string(name, ast.parse(text, mode="eval").body)
        for name, text in (
            ("agentspec.grammars", "f'{__name__}.{engine}'"),
            ("agentspec", "'agentspec.models.embedded'"),
        )
    }
    assert {"agentspec.grammars.llguidance", "agentspec.grammars.outlines"} <= by_string["agentspec.grammars"]
    assert by_string["agentspec"] == {"agentspec.models.embedded"}


def test_siblings_in_a_folder_of_implementations_do_not_import_each_other() -> None:
    """Drafters and grammar engines are told apart by their folders' ``__init__``; what they share stands in nouns."""
    shared = {"agentspec.drafters.draft"}
    for path in (ROOT / "agentspec" / "drafters").glob("[!_]*.py"):
        siblings = {i for i in ours(path) if i.startswith("agentspec.drafters.")} - shared
        assert not siblings, f"{name_of(path)} imports its siblings {siblings}"
    for engine, other in (("llguidance", "outlines"), ("outlines", "llguidance")):
        for path in (ROOT / "agentspec" / "grammars" / engine).rglob("*.py"):
            assert not [i for i in ours(path) if i.startswith(f"agentspec.grammars.{other}")], name_of(path)


def test_the_rooms_are_those_of_the_drawing() -> None:
    house = ROOT / "agentspec"
    folders = {path.name for path in house.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == ROOMS
    assert len(list(house.glob("*.py"))) <= 17


SOURCES = [path for path in sorted((ROOT / "agentspec").rglob("*")) if path.suffix in (".h", ".cpp", ".css", ".jinja")]


@pytest.mark.parametrize("path", [*MODULES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path: Path) -> None:
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
