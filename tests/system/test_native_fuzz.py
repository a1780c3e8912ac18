"""The native kernels under address and undefined-behaviour sanitizers, on numbers and sizes that no model shows."""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentspec.models.backends import native as module

HERE = Path(__file__).parent
SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-g1")
LEAST = {"vectors": 25, "draws": 800, "filters": 1800, "best": 400, "products": 350, "attention": 250, "layers": 450}
"""Results that are compared in each build, by kernel."""


def builds() -> dict[str, tuple[str, ...]]:
    """The instruction sets that kernels are built for and this processor has, with their options."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {"plain": ()}
    capability = torch.backends.cpu.get_cpu_capability()
    names = [*module._INSTRUCTIONS]
    first = next((i for i, name in enumerate(names) if capability.startswith(name)), len(names))
    return {**{name: module._INSTRUCTIONS[name] for name in names[first:]}, "plain": ()}


@functools.cache
def sanitizer() -> str | None:
    """The library that must be loaded before Python's own memory functions; None where there is none."""
    compiler = module._compiler()
    if sys.platform != "linux" or compiler is None:
        return None
    found = subprocess.run([*compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else None


@pytest.mark.sweep
@pytest.mark.skipif(sanitizer() is None, reason="no C++ compiler with sanitizers")
@pytest.mark.parametrize("build", builds())
def test_native_kernels_under_sanitizers(build: str, tmp_path: Path) -> None:
    library, preloaded = tmp_path / "fuzz.so", str(sanitizer())
    command = [*(module._compiler() or ()), *module._FLAGS, *builds()[build], *SANITIZERS, "-Wno-psabi"]
    built = subprocess.run(
        [*command, "-shared", f"-I{module._SOURCES}", HERE / "native_fuzz.cpp", "-o", library],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves what it holds to the system
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    run = subprocess.run(
        [sys.executable, "-W", "error", HERE / "native_fuzz.py", library, "17"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # a loop that does not end
    )
    assert run.returncode == 0, f"{run.stdout[-500:]}\n{run.stderr[-6000:]}"
    counts = json.loads(run.stdout)
    print(f"{build}: {counts}")
    assert counts.keys() == LEAST.keys()
    assert all(counts[kernel] >= least for kernel, least in LEAST.items())
