"""``agentspec doctor``: show what this installation can do, and what to do about the rest. It never fails."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from agentspec import embedded
from agentspec.errors import CacheError
from agentspec.models.backends.native import KernelsMissingError, kernels
from agentspec.runtime.paths import CACHE_VARIABLE, check_own, check_private, root
from agentspec.runtime.visible import visible

DISTRIBUTION = "langchain-agentspec"
PACKAGES = ("torch", "transformers", "langchain-core", "llguidance", "outlines-core")
EXTRAS = {
    "langchain": "agents, and `agentspec demo`: pip install 'langchain-agentspec[examples]'",
    "opentelemetry-api": "run.to_otel: pip install 'langchain-agentspec[otel]'",
    "prometheus-client": "agentspec.engine.prometheus: pip install 'langchain-agentspec[prometheus]'",
    "matplotlib": "plots of the examples: pip install 'langchain-agentspec[examples]'",
}
NEEDED_BYTES = 750 * 2**20
"""Disk space that the installation of the embedded model needs."""

Finding = tuple[str, str]


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--no-load", action="store_true", help="do not load the embedded model")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 0."""
    checks: list[Callable[[], Iterator[Finding]]] = [_versions, _device, _cache, _kernels, _model, _extras]
    if not arguments.no_load:
        checks.append(_memory)
    for check in checks:
        for name, text in _findings(check):
            print(f"{name:<18}{visible(text, lines=True)}")
    return 0


def _findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; its own failure is a finding too."""
    try:
        yield from check()
    except Exception as error:  # a broken part must not end the other checks
        yield check.__name__.strip("_"), f"failed: {error!r}"


def _versions() -> Iterator[Finding]:
    yield "agentspec", f"{_version(DISTRIBUTION) or 'not installed as a package'}, as {DISTRIBUTION}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    for package in PACKAGES:
        yield package, _version(package) or f"missing: pip install {DISTRIBUTION} again"


def _device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        yield "device", f"cuda, {torch.cuda.get_device_name()}"
    else:
        yield "device", "cpu; with a GPU, install a torch build for CUDA"
    cores = os.cpu_count() or 1
    threads = torch.get_num_threads()
    advice = "" if threads <= cores else f"; more than the {cores} cores: set OMP_NUM_THREADS={cores}"
    yield "torch threads", f"{threads} of {cores} cores{advice}"


def _kernels() -> Iterator[Finding]:
    try:
        yield "kernels", f"compiled for {torch.backends.cpu.get_cpu_capability()}, version {kernels().version[:8]}"
    except KernelsMissingError as error:
        yield "kernels", f"none: {error}"
        yield "", "with them, models on a CPU are several times faster: install a C++ compiler (g++)"


def _cache() -> Iterator[Finding]:
    folder = root()
    if not folder.exists():
        yield "cache", f"{folder}, will be made; {CACHE_VARIABLE} names another"
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    yield "cache", f"{folder}, mode {mode:04o}; {CACHE_VARIABLE} names another"
    for part, check in (("", check_own), ("kernels", check_own), ("entries", check_private)):
        if (folder / part).exists():
            yield from _refusals(folder / part, check)
    if not os.access(folder, os.W_OK):
        yield "", f"it cannot be written: change its mode, or set {CACHE_VARIABLE}"
    free = shutil.disk_usage(folder).free
    advice = "" if free > NEEDED_BYTES else f"; the embedded model needs about {NEEDED_BYTES // 2**20} MiB"
    yield "disk", f"{free / 2**30:.1f} GiB free{advice}"


def _refusals(folder: Path, check: Callable[[Path], None]) -> Iterator[Finding]:
    try:
        check(folder)
    except CacheError as error:
        yield "", f"it will be refused: {error}"


def _model() -> Iterator[Finding]:
    state = "damaged" if (root() / embedded.folder_name()).exists() else "missing"
    missing = f"{state}; `python -m agentspec.models.embedded` fetches it (93 MB, once)"
    yield "embedded model", "present" if embedded.is_present() else missing


def _extras() -> Iterator[Finding]:
    for package, use in EXTRAS.items():
        found = _version(package)
        yield package, found if found else f"missing, and needed for {use}"


def _memory() -> Iterator[Finding]:
    """Report the bound of the KV cache of the embedded model, if it is present: it is not fetched here."""
    if not embedded.is_present():
        return
    model, _ = embedded.load()
    model.next_logits([[1, 2]], [1])
    yield "loads", f"yes, {model.dtype} on {model.device}; cached logits equal uncached ones"
    yield "KV cache", str(model.kv.memory)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
