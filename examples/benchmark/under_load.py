"""Short requests while other processes keep the cores busy, against the same requests on a quiet machine.

Run ``python examples/benchmark/under_load.py [--busy 2] [--json FILE]`` on a machine that does nothing else. The
embedded model, float32, one request after the other; quiet and busy runs take turns, and medians are compared. The busy
processes are children of this one, which end by themselves where it does not end them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentspec import LocalEngine, Request, SamplingParams
from agentspec.engine.registry import PairSpec, load_engine

_SPIN = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"
_MOST_RATIO = 4.0
_SETTLE_S = 0.5  # for which processes run before a run begins


@dataclass(frozen=True)
class Run:
    """One run over all requests.

    Args:
        busy: other processes.
        seconds: of the wall.
        cpu_seconds: of this process, threads that spin included.
        threads: that the engine's worker computed with at the end.
    """

    busy: int
    seconds: float
    cpu_seconds: float
    threads: int


@contextmanager
def busy_processes(count: int, limit_s: float) -> Iterator[None]:
    """Keep ``count`` cores busy for a while, ``limit_s`` seconds at most."""
    children = [subprocess.Popen([sys.executable, "-c", _SPIN, str(limit_s)]) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def requests(engine: LocalEngine, count: int, tokens: int) -> list[Request]:
    """Short questions, each answered by the same number of tokens."""
    params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
    return [Request(engine.tokenizer.encode(f"What is known of the number {i}?"), params) for i in range(count)]


def timed(engine: LocalEngine, asked: list[Request], busy: int, limit_s: float) -> Run:
    """Ask one after the other, beside busy processes; what is not asked within ``limit_s`` is extrapolated."""
    with busy_processes(busy, 2 * limit_s + 10 * _SETTLE_S):
        began, own = time.perf_counter(), time.process_time()
        done = 0
        for request in asked:
            engine.generate([request])
            done += 1
            if time.perf_counter() - began > limit_s:
                break
        share = len(asked) / done
        seconds, used = time.perf_counter() - began, time.process_time() - own
    return Run(busy, seconds * share, used * share, engine.metrics().threads)


def measure(engine: LocalEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Quiet and busy runs in turns: their medians and ratio, and each run."""
    asked = requests(engine, options.requests, options.tokens)
    timed(engine, asked[: max(1, len(asked) // 6)], 0, options.limit)
    runs = [timed(engine, asked, busy, options.limit) for _ in range(options.repeats) for busy in (0, options.busy)]
    quiet, loaded = (statistics.median(r.seconds for r in runs if r.busy == busy) for busy in (0, options.busy))
    return {
        "quiet_s": quiet,
        "busy_s": loaded,
        "ratio": loaded / quiet,
        "most_ratio": _MOST_RATIO,
        "busy": options.busy,
        "requests": options.requests,
        "tokens": options.tokens,
        "load_average_before": options.load,
        "runs": [asdict(run) for run in runs],
    }


def main(arguments: list[str] | None = None, engine: LocalEngine | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="busy processes (default: one a core)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=60, help="requests of a run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=20, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120.0, help="most seconds of a run (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    options.load = os.getloadavg()[0]
    made = engine or load_engine(PairSpec(device="cpu"))
    try:
        found = measure(made, options)
    finally:
        if engine is None:
            made.close()
    for run in found["runs"]:
        print(
            f"{run['busy']} busy: {run['seconds']:6.2f} s, {run['cpu_seconds']:6.2f} s of processors, "
            f"{run['threads']} thread(s)"
        )
    print(
        f"{options.requests} requests of {options.tokens} tokens: {found['quiet_s']:.2f} s quiet, "
        f"{found['busy_s']:.2f} s beside {options.busy} busy processes: {found['ratio']:.1f} times "
        f"(wanted: at most {_MOST_RATIO:.0f}); load average before: {options.load:.1f}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
