"""What a pass of the embedded model takes, by tokens in its block: as transformers computes it, and as agentspec does.

Run ``python examples/benchmark/passes.py [--context 256] [--repeats 30] [--compiled]``. All read the same blocks
behind the same context, in turn; told are medians in milliseconds. ``--compiled`` adds torch.compile of every decoder
layer of transformers (Inductor with freezing, dynamic shapes), which takes minutes to compile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from agentspec import CausalLM, embedded
from agentspec.models.loading import forward_keywords
from agentspec.runtime.threads import apart

WIDTHS = (1, 2, 3, 4, 5, 8, 16)

Pass = Callable[[list[int]], None]
"""Reads a block behind the context."""


def plain_transformers(context: list[int]) -> Pass:
    """Return transformers' own forward, with its own cache, cut back after every block."""
    model = apart(AutoModelForCausalLM.from_pretrained)(embedded.path(), dtype=torch.float32).eval()
    keyword, _ = forward_keywords(model)
    cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def read(block: list[int]) -> None:
        model(input_ids=torch.tensor([block]), use_cache=True, **{keyword: cache})
        cache.crop(-len(block))

    with torch.inference_mode():
        apart(lambda: model(input_ids=torch.tensor([context]), use_cache=True, **{keyword: cache}))()
    return read


def ours(context: list[int], *, torch_compile: bool = False, **options: Any) -> Pass:
    """Return agentspec's forward, of a model that is loaded with ``options``."""
    model = CausalLM.from_pretrained(embedded.path(), device="cpu", **options)
    if torch_compile:
        import torch._inductor.config

        torch._inductor.config.freezing = True
        layers: Sequence[torch.nn.Module] = model.model.model.layers
        for layer in layers:
            layer.compile(dynamic=True)  # type: ignore[no-untyped-call]
    apart(model.next_logits)([context], [0])
    return lambda block: void(model.next_logits([context + block], [len(block)]).values)


def void(_: object) -> None:
    """Nothing of it."""


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[int, float]]:
    """Measure and print; milliseconds by way and width."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", type=int, default=256, help="tokens before the blocks")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="also with torch.compile, which takes minutes")
    options = parser.parse_args(arguments)
    rng = torch.Generator().manual_seed(0)
    context = torch.randint(100, 40_000, (options.context,), generator=rng).tolist()
    ways: dict[str, Pass] = {
        "transformers": plain_transformers(context),
        "neither fused nor packed": ours(context, fuse=False, pack=False),
        "without a compiler": ours(context, native_kernels=False),
        "agentspec": ours(context),
    }
    if options.compiled:
        ways["torch.compile, frozen"] = ours(context, fuse=False, pack=False, torch_compile=True)
    return race(ways, rng, options.repeats)


@apart
def race(ways: dict[str, Pass], rng: torch.Generator, repeats: int) -> dict[str, dict[int, float]]:
    """All ways over the same blocks, in turn, in one thread; prints a line for each."""
    medians: dict[str, dict[int, float]] = {name: {} for name in ways}
    for width in WIDTHS:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(repeats + 2):
            block = torch.randint(100, 40_000, (width,), generator=rng).tolist()
            for name, read in ways.items():
                started = time.perf_counter()
                read(block)
                if repeat >= 2:  # the first choose kernels
                    seconds[name].append(time.perf_counter() - started)
        for name, taken in seconds.items():
            medians[name][width] = 1000 * statistics.median(taken)
    print(f"{'tokens in the block':30s}" + "".join(f"{width:7d}" for width in WIDTHS))
    for name, by_width in medians.items():
        print(f"{name + ', ms':30s}" + "".join(f"{by_width[width]:7.1f}" for width in WIDTHS))
    return medians


if __name__ == "__main__":
    main()
