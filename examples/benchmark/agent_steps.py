"""The model steps of the demo agent: transformers' ``generate`` with the same masks, agentspec plain, and speculative.

Run ``python examples/benchmark/agent_steps.py [--repeats 5]``. The requests of one run of ``examples/agent_loop.py``
are recorded and replayed from an empty cache by each of the three in turn; all must give the same ids (greedy). Prints
the median seconds of the whole loop and the median of the ratios within a repeat.
"""

from __future__ import annotations

import argparse
import platform
import runpy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comparison.work import recorded
from generate_peer import constrained
from transformers import AutoModelForCausalLM

from agentspec import LocalEngine, Request, embedded
from agentspec.engine.registry import PairSpec, load_engine
from agentspec.grammars import compiler
from agentspec.runtime.threads import apart

Decode = Callable[[Request], list[int]]
System = Callable[[list[Request]], AbstractContextManager[Decode]]
"""Gets ready for requests, and leaves no thread that computes: those that stay slow down all others."""

DEMO = Path(__file__).resolve().parents[1] / "agent_loop.py"


def record(engine: LocalEngine) -> list[Request]:
    """The requests of one run of the demo."""
    demo = runpy.run_path(str(DEMO))
    with recorded(engine) as requests:
        demo["run"]("auto", "recorded", engine=engine)
    return requests


def by_engine(engine: LocalEngine, gamma: int | None) -> System:
    @contextmanager
    def ready(requests: list[Request]) -> Iterator[Decode]:
        alone = LocalEngine(engine.decoder, engine.tokenizer)
        for request in requests:
            alone.stream(request).close()  # type: ignore[attr-defined]  # compiles the grammar, computes nothing
        yield lambda request: list(alone.generate([replace(request, gamma=gamma)])[0][0].tokens)
        alone.close()

    return ready


def by_generate(engine: LocalEngine) -> System:
    """The model as transformers loads it, and computes with it."""
    model: Any = apart(AutoModelForCausalLM.from_pretrained)(embedded.path(), dtype=torch.float32)
    grammars = compiler(engine.tokenizer, engine.decoder.target.vocab_size)

    @apart
    def decode(request: Request) -> list[int]:
        ids = torch.tensor([request.prompt])
        options: dict[str, Any] = {}
        if request.grammar is not None:
            matcher = grammars.matcher(request.grammar)
            options = constrained(matcher, len(request.prompt), engine.tokenizer.eos_token_id)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.params.max_tokens,
            do_sample=False,
            pad_token_id=engine.tokenizer.eos_token_id,
            **options,
        )
        return [int(token) for token in out[0, ids.shape[1] :]]

    return lambda requests: nullcontext(decode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats

    engine = load_engine(PairSpec(device="cpu"))
    target: Any = engine.decoder.target
    requests = record(engine)
    engine.close()
    systems = {
        "transformers generate, same masks": by_generate(engine),
        "agentspec, speculation off": by_engine(engine, 0),
        "agentspec": by_engine(engine, None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    answers: dict[str, list[list[int]]] = {}
    for _ in range(repeats):
        for name, system in systems.items():
            target.kv.clear()
            with system(requests) as decode:
                started = time.perf_counter()
                answers[name] = [decode(request) for request in requests]
                seconds[name].append(time.perf_counter() - started)
    reference, *others = answers.values()
    tokens = sum(map(len, reference))
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{len(requests)} steps, {tokens} tokens, prompts of {[len(r.prompt) for r in requests]} tokens")
    differing = sum(ids != ours for other in others for ids, ours in zip(reference, other, strict=True))
    print(f"answers that differ from generate's: {differing}")
    slowest = seconds["transformers generate, same masks"]
    for name, measured in seconds.items():
        ratio = statistics.median(slow / fast for slow, fast in zip(slowest, measured, strict=True))
        print(f"{name:36s} {statistics.median(measured):6.2f} s   {ratio:5.2f} times faster than generate")


if __name__ == "__main__":
    main()
