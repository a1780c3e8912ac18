"""``agentspec verify``: is speculative decoding exact on this model, on this machine? For those who doubt it.

Greedy ids must be those of plain decoding, texts drawn with coupled noise those of plain decoding for the same seed,
and cached scores those of transformers' own forward over the whole context.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from agentspec.cli.engines import TASKS, Task, add_model, at_least_one, engine_of
from agentspec.engine.local import LocalEngine
from agentspec.engine.request import Request
from agentspec.sampling import SamplingParams

GAMMA = 4
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest difference of scores that rounding explains, as a share of the largest score."""

CHECKED = 8
"""Positions at the end of a text whose scores are compared."""


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_model(parser)
    parser.add_argument("--seeds", type=at_least_one, default=5, help="drawn texts per task")
    parser.add_argument("--tokens", type=at_least_one, default=48, help="most tokens of a text")


def run(arguments: argparse.Namespace) -> int:
    """Print every check; 1 where something differs."""
    engine = engine_of(arguments)
    try:
        wrong = 0
        for task in TASKS:
            for name, difference in _checks(engine, task, arguments.seeds, arguments.tokens):
                wrong += difference is not None
                print(f"{task.name:<9}{name:<52}{difference or 'same'}", flush=True)
            name, is_rounding = _scores(engine, task, arguments.tokens)
            wrong += not is_rounding
            print(f"{task.name:<9}{name}", flush=True)
    finally:
        engine.close()
    print(f"\n{'Exact.' if not wrong else f'NOT exact: {wrong} checks differ.'}")
    return 1 if wrong else 0


def _checks(engine: LocalEngine, task: Task, seeds: int, tokens: int) -> Iterator[tuple[str, str | None]]:
    """Names of checks, and what differs in them."""
    greedy = task.request(engine, SamplingParams(temperature=0, max_tokens=tokens))
    plain = _ids(engine, greedy, gamma=0)
    for told, gamma in ((f"gamma {GAMMA}", GAMMA), ("measured gamma", None)):
        found = _ids(engine, greedy, gamma=gamma)
        yield f"greedy, {told}: {len(plain)} tokens", _difference(engine, greedy, plain, found)
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
    """Where two texts part, and how near the two tokens' scores are there; None where they do not."""
    if plain == found:
        return None
    pairs = enumerate(zip(plain, found, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), min(len(plain), len(found)))
    if place >= min(len(plain), len(found)):
        return f"DIFFERS: {len(plain)} tokens plainly, {len(found)} speculatively"
    context = [*request.prompt, *plain[:place]]
    scores = engine.decoder.target.next_logits([context], [1])[0, 0]
    gap = float(scores[plain[place]] - scores[found[place]])
    words = [engine.tokenizer.decode([ids[place]]) for ids in (plain, found)]
    return f"DIFFERS at token {place}: {words[0]!r} plainly, {words[1]!r} speculatively; their scores by {gap:.2g}"


def _scores(engine: LocalEngine, task: Task, tokens: int) -> tuple[str, bool]:
    """The largest difference between cached and uncached scores, and whether that is rounding."""
    target: Any = engine.decoder.target
    request = task.request(engine, SamplingParams(temperature=0, max_tokens=tokens))
    context = [*request.prompt, *_ids(engine, request, gamma=None)]
    last = min(CHECKED, len(context))
    cached = target.next_logits([context], [last])[0]
    with torch.inference_mode():
        whole = target.model(torch.tensor([context], device=target.device)).logits[0, -last:]
    uncached = whole[:, : target.vocab_size].float()
    difference, largest = float((cached - uncached).abs().max()), float(uncached.abs().max())
    is_rounding = difference <= TOLERANCE[target.dtype] * largest
    verdict = "rounding" if is_rounding else "DIFFERS: more than rounding"
    name = f"scores, {len(context)} tokens cached against uncached"
    return f"{name:<52}{difference:.2g} at most, of {largest:.3g}; {verdict}", is_rounding
