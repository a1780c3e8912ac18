"""What is kept between processes: damaged, untrusted, or made by two at once, it costs time and never a process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.errors import CacheError
from agentspec.models.backends import native as module
from agentspec.models.backends.native import compiles
from agentspec.runtime.digests import is_intact
from agentspec.runtime.paths import CACHE_VARIABLE

pytestmark = pytest.mark.sweep  # each case compiles in processes of its own
needs_compiler = pytest.mark.skipif(not compiles("auto"), reason="there is no C++ compiler")
PRODUCT = """
import torch
from agentspec.models.backends.native import kernels
probs = torch.tensor([[0.0, 1.0, 0.0]])
assert kernels().draw(probs, torch.tensor([0.5], dtype=torch.float64)).tolist() == [1]
"""


COMPILER = """#!/bin/sh
# Compiles once, however often it is asked to.
for last; do :; done
case " $* " in
*" -c "*)
    [ -f {kept} ] && exec cp {kept} "$last"
    {compiler} "$@" && cp "$last" {kept}.$$ && mv {kept}.$$ {kept} ;;
*) exec {compiler} "$@" ;;
esac
"""


def start(cache: Path, before: str = "") -> subprocess.Popen[str]:
    """A process that loads the kernels and uses them."""
    environment = {**os.environ, CACHE_VARIABLE: str(cache), "CXX": str(cache.with_name("compiler"))}
    command = [sys.executable, "-W", "ignore", "-c", before + PRODUCT]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def draw(cache: Path, before: str = "") -> None:
    process = start(cache, before)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with kernels, which two processes made at once."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    compiler = folder.with_name("compiler")
    compiler.write_text(COMPILER.format(kept=folder.with_name("object"), compiler=shlex.join(module._compiler() or ())))
    compiler.chmod(0o755)
    for process in [start(folder), start(folder)]:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    return folder


def library(cache: Path) -> Path:
    [found] = (cache / "kernels").glob("*.so")
    return found


NOT_BUILT = "from agentspec import kernels as module\nmodule._build = None\n"


@needs_compiler
def test_two_processes_that_compile_at_once_leave_one_whole_library(cache: Path) -> None:
    kept = library(cache)
    assert sorted(path.name for path in kept.parent.iterdir()) == [f"{kept.stem}.digests.json", kept.name]
    draw(cache, NOT_BUILT)


@needs_compiler
@pytest.mark.parametrize("change", ["cut off", "one bit", "no digests", "a link"])
def test_a_damaged_library_is_compiled_anew(change: str, cache: Path, tmp_path: Path) -> None:
    kept = library(cache)
    whole = kept.read_bytes()
    if change == "cut off":
        os.truncate(kept, 20_000)
    elif change == "one bit":
        with kept.open("r+b") as stream:
            stream.seek(len(whole) // 2)
            stream.write(bytes([whole[len(whole) // 2] ^ 1]))
    elif change == "no digests":
        kept.with_suffix(".digests.json").unlink()
    else:
        (tmp_path / "elsewhere.so").write_bytes(whole[:20_000])
        kept.unlink()
        kept.symlink_to(tmp_path / "elsewhere.so")
    draw(cache)
    assert len(kept.read_bytes()) == len(whole)
    assert not kept.is_symlink()
    assert is_intact(kept.with_suffix(".digests.json"), kept.name)


@needs_compiler
@pytest.mark.parametrize("part", ["", "kernels"])
def test_kernels_in_a_folder_of_others_are_not_loaded(part: str, cache: Path) -> None:
    kept = library(cache)
    before = kept.stat()
    os.truncate(kept, 20_000)  # nobody looks
    (cache / part).chmod(0o777)
    try:
        draw(cache)
    finally:
        (cache / part).chmod(0o700)
    assert kept.stat().st_size == 20_000
    kept.unlink()
    draw(cache)
    assert kept.stat().st_size == before.st_size


@needs_compiler
def test_a_full_disk_makes_kernels_for_the_process(cache: Path) -> None:
    """Kept ones are used; where there are none, they are compiled elsewhere."""
    full = (
        "import tempfile\n"
        "from pathlib import Path\n"
        "make = tempfile.mkdtemp\n"
        "def full(suffix=None, prefix=None, dir=None):\n"
        "    if dir is not None and 'kernels' in str(dir): raise OSError(28, 'No space left on device')\n"
        "    return make(suffix, prefix, dir)\n"
        "tempfile.mkdtemp = full\n"
    )
    draw(cache, full + NOT_BUILT)
    draw(cache.with_name("empty"), full)
    assert list((cache.with_name("empty") / "kernels").iterdir()) == []


def test_a_cache_folder_of_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec import embedded
    from agentspec.runtime.cache import DiskCache
    from langchain_agentspec.cache import AgentSpecCache

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache").chmod(0o777)
    for use in (embedded.path, DiskCache, AgentSpecCache):
        with pytest.raises(CacheError, match="must belong to you, and only you may write to it"):
            use()
    assert list((tmp_path / "cache").iterdir()) == []
