"""A machine with a GPU: is what it computes right, and what does speculation gain there at the size of 8 billion?

    python examples/benchmark/gpu.py [--out FOLDER] [--minutes 7.5] [--alpha 0.8]

It needs this repository, torch, transformers (5.17 or newer) and numpy: no other package, no network and no weights.
Without a GPU, or with ``--toy``, all of it runs at toy size, in seconds and for no figures: a test of the script.

**Checks:** the distribution that rounds emit, by enumeration (where ``tests/enumeration.py`` lies beside); that no
token without mass is drawn; that fused models score as transformers' own, captured passes as launched ones, and cached
logits equal uncached ones; in float32, that texts do not depend on speculation; in bfloat16, that greedy texts part
only where two logits are as good as equal.
Leaves with status 1 where one fails.

**Timing:** a random small Llama is the draft; the target computes nearly its function with the shape of Llama 3.1 8B
(``gpu_parts/models.py``), and noise on its weights is chosen so that about ``--alpha`` of drafted tokens are accepted.
Sampling at temperature 1, at batch 1, 4 and 8: agentspec plain (with captured passes, and without), with fixed gammas
and with ``gamma="auto"``, beside transformers' ``generate`` (and, at batch 1, assisted generation) on the same weights,
interleaved, medians. With it go the floor (bytes of weights over the rate at which memory copies), the share of a round
in which no kernel runs, and the measured gain against the paper's formula at the measured alpha and c.

``--out FOLDER`` gets ``gpu.json`` (``agentspec.gpu/1``) and ``gpu.txt``. Repeats end where ``--minutes`` are over.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for _folder in (ROOT, Path(__file__).resolve().parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

try:
    import torch
    import transformers
    from gpu_parts import checks, models, timing
    from gpu_parts.page import Page, goals, row

    from agentspec import ModelDrafter
    from agentspec import SpeculativeDecoder as Decoder
    from agentspec.models.pass_cost import PassCost, measure
except ModuleNotFoundError as missing:
    sys.exit(
        f"This script needs torch, transformers>=5.17 and numpy, and the repository around it ({ROOT.name}/agentspec); "
        f"not found: {missing.name}. Put a wheel of it on PYTHONPATH (pip install --no-index --target DIR WHEEL)."
    )


@dataclass(frozen=True)
class Plan:
    """What is played: the models to check and to time, and how long."""

    checked: models.Scale
    timed: models.Scale
    gammas: tuple[int, ...]
    tokens: int
    repeats: int
    cost_seconds: float
    enumeration_seconds: float
    rounds: int
    copy_megabytes: int


TOY = Plan(models.TOY, models.TOY, (2, 4), 12, 1, 0.2, 0.5, 4, 16)
FULL = Plan(models.CHECKED, models.EIGHT_BILLION, (2, 4, 6, 8), 96, 3, 12.0, 60.0, 24, 2048)
BATCHES = (1, 4, 8)


def machine(device: str) -> dict[str, Any]:
    """What figures depend on."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": name, **versions, "python": sys.version.split()[0], "threads": torch.get_num_threads()}


def speed(plan: Plan, device: str, alpha: float, left: timing.Clock, page: Page) -> Iterator[tuple[str, Any]]:
    """All that is timed, as names and data; told as it comes, so that what was measured outlives what fails."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    small = models.random_model(plan.timed.draft, plan.timed.vocabulary, device, dtype)
    wide = models.Widened(small, plan.timed.target)
    noise, expected = models.search_noise(wide, small, alpha)
    target, draft = models.fused(wide.model), models.fused(small)
    costs = PassCost(measure(target, plan.cost_seconds)), PassCost(measure(draft, plan.cost_seconds / 2))
    rate, weights = timing.copy_rate(device, plan.copy_megabytes), models.weight_bytes(wide.model)
    floor_ms = 1000 * weights / rate
    setup = {
        "dtype": str(dtype).removeprefix("torch."),
        "target_weights": sum(p.numel() for p in wide.model.parameters()),
        "draft_weights": sum(p.numel() for p in small.parameters()),
        "noise": noise,
        "overlap_on_random_text": expected,
        "bytes_per_pass": weights,
        "copy_bytes_per_s": rate,
        "floor_ms": floor_ms,
        "pass_ms": [
            {"rows": b, "width": w, "target": 1000 * costs[0](b, w), "draft": 1000 * costs[1](b, w)}
            for b in BATCHES
            for w in (1, *(g + 1 for g in plan.gammas))
        ],
    }
    page.tell_setup(setup)
    yield "setup", setup

    drafter = ModelDrafter(draft)
    rounds = {timing.PLAIN: Decoder(target), timing.fixed_name(4): Decoder(target, drafter, gamma=4)}
    shares = [timing.outside_kernels(name, decoder, device, plan.rounds) for name, decoder in rounds.items()]
    page.tell_shares(shares)
    yield "outside_kernels", [asdict(share) for share in shares]

    timed: dict[tuple[int, str], timing.Timed] = {}
    size = timing.Size(BATCHES, plan.gammas, plan.tokens, plan.repeats)
    for found in timing.all_batches(target, draft, (wide.model, small), costs, size, left):
        timed |= {(t.batch, t.way): t for t in found}
        page.tell_batch(found)
        yield "ways", [row(t, timed[t.batch, timing.PLAIN]) for t in timed.values()]

    formulas = [
        timing.formula(timed[b, timing.fixed_name(g)], timed[b, timing.PLAIN], g, *costs)
        for b in BATCHES
        for g in plan.gammas
    ]
    page.tell_formulas([f for f in formulas if f is not None])
    yield "formula", [asdict(f) for f in formulas if f is not None]

    reached = goals(timed, floor_ms)
    page.tell_goals(reached)
    yield "goals", reached


def main(arguments: SequenceOf[str] | None = None) -> bool:
    """Check, then time, then write; whether no check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy size, on the CPU; the default without a GPU")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.txt")
    parser.add_argument("--alpha", type=float, default=0.8, help="acceptance to look for, between 0 and 1")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing is repeated")
    options = parser.parse_args(arguments)
    if not 0 < options.alpha < 1:
        parser.error(f"--alpha is an acceptance rate between 0 and 1, got {options.alpha}")
    began = time.perf_counter()
    toy = options.toy or not torch.cuda.is_available()
    plan, device = (TOY, "cpu") if toy else (FULL, "cuda")
    page = Page()
    page.tell(f"{', '.join(f'{k} {v}' for k, v in machine(device).items())}{', toy size: no figures' if toy else ''}\n")
    result: dict[str, Any] = {"schema": "agentspec.gpu/1", "toy": toy, "machine": machine(device), "plan": asdict(plan)}
    try:
        result |= {"checks": [], "speed": {}}
        for finding in checks.all_findings(plan.checked, device, ROOT / "tests", plan.enumeration_seconds):
            page.tell(str(finding))
            result["checks"].append(asdict(finding))
        left = functools.partial(seconds_left, began + 60 * options.minutes)
        for name, figures in speed(plan, device, options.alpha, left, page):
            result["speed"][name] = figures
        right = all(finding["holds"] is not False for finding in result["checks"])
        page.tell(f"\n{'all checks hold' if right else 'A CHECK FAILED'}; {time.perf_counter() - began:.0f} s in all")
    finally:
        if options.out is not None:
            result["seconds"] = time.perf_counter() - began
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
            (options.out / "gpu.txt").write_text(page.text())
    return right


def seconds_left(end: float) -> float:
    """Seconds until ``end`` on the clock of ``time.perf_counter``."""
    return end - time.perf_counter()


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
