"""``agentspec bench``: time speculation on against off, on a few short tasks, interleaved."""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from agentspec.cli.engines import TASKS, Task, add_model, at_least_one, make_engine
from agentspec.engine.local import LocalEngine
from agentspec.engine.request import Completion, Request
from agentspec.report.compare import ratio_interval
from agentspec.runtime.visible import visible
from agentspec.sampling import SamplingParams


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--repeats", type=at_least_one, default=5, help="of every task, on and off")
    parser.add_argument("--tokens", type=at_least_one, default=64, help="most tokens of a text")


def run(arguments: argparse.Namespace) -> int:
    """Print medians and ratios; return 1 if speculation changed a text."""
    engine = make_engine(arguments)
    try:
        print(f"{visible(arguments.model)}, draft {visible(arguments.draft or 'by look-up')}, greedy, prompts cached")
        print(f"{'':<9}{'tokens':>7}{'calls':>7}{'off, s':>9}{'on, s':>9}{'off / on':>10}  95% interval")
        same = [_measure(engine, task, arguments.repeats, arguments.tokens) for task in TASKS]
    finally:
        engine.close()
    print(f"\nThe same texts on and off: {'yes' if all(same) else 'NO'}")
    return 0 if all(same) else 1


def _measure(engine: LocalEngine, task: Task, repeats: int, tokens: int) -> bool:
    """Print the line of a task; return whether its texts are the same on and off."""
    request = task.request(engine, SamplingParams(temperature=0, max_tokens=tokens))
    texts = {_decode(engine, request, on).tokens for on in (False, True)}  # not timed: these fill the caches
    pairs = []
    for repeat in range(repeats):
        order = (False, True) if repeat % 2 == 0 else (True, False)
        found = {on: _decode(engine, request, on) for on in order}
        texts |= {completion.tokens for completion in found.values()}
        pairs.append((found[False].stats.total_s, found[True].stats.total_s))
    last = found[True]
    off, on = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [plain / speculative for plain, speculative in pairs]
    ends = ratio_interval(ratios)
    interval = "-" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
    counts = f"{len(last.tokens):>7}{last.stats.target_calls:>7}"
    ratio = statistics.geometric_mean(ratios)
    print(f"{task.name:<9}{counts}{off:>9.3f}{on:>9.3f}{ratio:>10.2f}  {interval}", flush=True)
    return len(texts) == 1


def _decode(engine: LocalEngine, request: Request, is_on: bool) -> Completion:
    [[completion]] = engine.generate([dataclasses.replace(request, gamma=None if is_on else 0)])
    return completion
