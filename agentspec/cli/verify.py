"""``agentspec verify``: check that speculative decoding is exact on this model, on this machine.

Greedy ids must be those of plain decoding. Texts drawn with coupled noise must be those of plain decoding for the same
seed. Cached logits must be those of transformers' own forward over the whole context.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from agentspec.cli.engines import TASKS, Task, add_model, at_least_one, make_engine
from agentspec.engine.local import LocalEngine
from agentspec.engine.request import Request
from agentspec.sampling import SamplingParams

GAMMA = 4
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits that rounding explains, as a share of the largest logit."""

CHECKED = 8
"""Positions at the end of a text whose logits are compared."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--seeds", type=at_least_one, default=5, help="drawn texts per task")
    parser.add_argument("--tokens", type=at_least_one, default=48, help="most tokens of a text")


def run(arguments: argparse.Namespace) -> int:
    """Print every check; return 1 if one fails."""
    engine = make_engine(arguments)
    try:
        wrong = 0
        for task in TASKS:
            for name, difference in _checks(engine, task, arguments.seeds, arguments.tokens):
                wrong += difference is not None
                print(f"{task.name:<9}{name:<52}{difference or 'same'}", flush=True)
            name, is_rounding = _check_logits(engine, task, arguments.tokens)
            wrong += not is_rounding
            print(f"{task.name:<9}{name}", flush=True)
    finally:
        engine.close()
    print(f"\n{'Exact.' if not wrong else f'NOT exact: {wrong} checks differ.'}")
    return 1 if wrong else 0


def _checks(engine: LocalEngine, task: Task, seeds: int, tokens: int) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each check of texts, and what differs."""
    greedy = task.request(engine, SamplingParams(temperature=0, max_tokens=tokens))
    plain = _ids(engine, greedy, gamma=0)
    for name, gamma in ((f"gamma {GAMMA}", GAMMA), ("measured gamma", None)):
        found = _ids(engine, greedy, gamma=gamma)
        yield f"greedy, {name}: {len(plain)} tokens", _difference(engine, greedy, plain, found)
    differing = []
    for seed in range(1, seeds + 1):
        params = SamplingParams(temperature=1, max_tokens=tokens, seed=seed)
        drawn = dataclasses.replace(task.request(engine, params), acceptance="coupled")
        plain, found = _ids(engine, drawn, gamma=0), _ids(engine, drawn, gamma=GAMMA)
        if plain != found:
            differing.append(f"seed {seed}: {_difference(engine, drawn, plain, found)}")
    yield f"drawn at temperature 1, coupled: {seeds} seeds", "; ".join(differing) or None


def _ids(engine: LocalEngine, request: Request, gamma: int | None) -> list[int]:
    [[completion]] = engine.generate([dataclasses.replace(request, gamma=gamma)])
    return list(completion.tokens)


def _difference(engine: LocalEngine, request: Request, plain: Sequence[int], found: Sequence[int]) -> str | None:
    """Return where two texts part, and the difference of the two tokens' logits there; None for equal texts."""
    if plain == found:
        return None
    pairs = enumerate(zip(plain, found, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(plain), len(found)))
    if place >= min(len(plain), len(found)):
        return f"DIFFERS: {len(plain)} tokens plainly, {len(found)} speculatively"
    context = [*request.prompt, *plain[:place]]
    logits = engine.decoder.target.next_logits([context], [1]).values[0, 0]
    gap = float(logits[plain[place]] - logits[found[place]])
    words = [engine.tokenizer.decode([ids[place]]) for ids in (plain, found)]
    return f"DIFFERS at token {place}: {words[0]!r} plainly, {words[1]!r} speculatively; their logits by {gap:.2g}"


def _check_logits(engine: LocalEngine, task: Task, tokens: int) -> tuple[str, bool]:
    """Describe the largest difference between cached and uncached logits; return whether it is rounding."""
    target: Any = engine.decoder.target
    request = task.request(engine, SamplingParams(temperature=0, max_tokens=tokens))
    context = [*request.prompt, *_ids(engine, request, gamma=None)]
    last = min(CHECKED, len(context))
    cached = target.next_logits([context], [last]).values[0]
    with torch.inference_mode():
        whole = target.model(torch.tensor([context], device=target.device)).logits[0, -last:]
    uncached = whole[:, : target.vocab_size].float()
    difference, largest = float((cached - uncached).abs().max()), float(uncached.abs().max())
    is_rounding = difference <= TOLERANCE[target.dtype] * largest
    verdict = "rounding" if is_rounding else "DIFFERS: more than rounding"
    name = f"logits, {len(context)} tokens cached against uncached"
    return f"{name:<52}{difference:.2g} at most, of {largest:.3g}; {verdict}", is_rounding
