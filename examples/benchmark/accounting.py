"""Can the account be trusted, and what does it cost?

Run ``python examples/benchmark/accounting.py PROMPTS.jsonl AGENTS.jsonl [--prompts 20] [--scripts 12]``; a line of the
first file is ``{"turns": [text, ...]}``, one of the second as in ``agent_scripts.py``.

(a) The gain that is estimated from a run's own passes, against the one that is measured by decoding the same prompt
plainly. (b) The worst gap between the wall time of a run, measured around it, and the parts that its record names, over
agent scripts. (c) The same call with and without ``track_latency``, and what the engine books for every round.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentspec.report import AgentRun, RunRecord
from agentspec.runtime.phase_timer import PhaseTimer
from agentspec.stats import RowStats, StepStats
from langchain_agentspec import ChatAgentSpec, track_latency

play = runpy.run_path(str(Path(__file__).with_name("agent_scripts.py")))["play"]


def timed(model: ChatAgentSpec, prompt: str, gamma: int | str) -> AgentRun:
    """The account of one call."""
    with track_latency(f"gamma {gamma}") as run:
        model.invoke(prompt, gamma=gamma)
    return run


def estimates(model: ChatAgentSpec, prompts: Sequence[str], gamma: int | str, repeats: int) -> None:
    """(a) Estimated against measured gains: medians over interleaved repeats of every prompt."""
    errors, ratios, formula, sources = [], [], [], Counter[str]()
    for prompt in prompts:
        pairs = []
        for _ in range(repeats):
            fast, plain = timed(model, prompt, gamma), timed(model, prompt, 0)
            estimated, measured = fast.gain, fast.compare_to(plain)
            if estimated is None or estimated.ratio is None or measured is None or measured.ratio is None:
                raise SystemExit(f"No gain is known of {prompt[:40]!r}: did the model say nothing?")
            pairs.append((estimated.ratio, measured.ratio))
            sources[str(estimated.plain_pass_from)] += 1
            if estimated.theory is not None:
                formula.append(measured.ratio / estimated.theory.improvement_at_v)
        estimate, truth = (statistics.median(column) for column in zip(*pairs, strict=True))
        errors.append(estimate / truth - 1)
        ratios.append(truth)
    worst, typical = max(errors, key=abs), statistics.median(map(abs, errors))
    print(f"(a) gamma {gamma}, {len(prompts)} prompts, median of {repeats} interleaved repeats each")
    print(f"    measured gain         median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"    error of the estimate median {typical:.1%}, worst {worst:+.1%}, bias {statistics.median(errors):+.1%}")
    print(f"    plain pass known from {dict(sources)}")
    if formula:
        print(f"    measured over the paper's formula at the measured v: median {statistics.median(formula):.2f}")


def gaps(record: RunRecord, wall_s: float) -> dict[str, float]:
    """How far parts are from what they should add up to, as shares of it."""
    parts = record.model_s + record.tool_s + record.framework_s
    iterations = sum(i.model_s + i.tool_s + i.framework_s for i in record.iterations)
    calls = [(sum(c.phases.model_dump().values()), c.seconds) for c in record.model_calls if c.phases is not None]
    return {
        "parts and wall time": abs(parts - wall_s) / wall_s,
        "iterations and wall time": abs(iterations - wall_s) / wall_s,
        "phases and call": max((abs(sum_s - seconds) / seconds for sum_s, seconds in calls), default=0.0),
    }


def scripts(model: ChatAgentSpec, agents: Sequence[dict[str, Any]], turns: int | None) -> None:
    """(b) The worst gaps over agent scripts."""
    worst: dict[str, float] = {}
    steps, unnamed_s, model_s = 0, 0.0, 0.0
    for script in agents:
        began = time.perf_counter()
        with track_latency(script["id"]) as run:
            play(script, model, turns)
        found = gaps(run.record, time.perf_counter() - began)
        worst = {name: max(worst.get(name, 0.0), gap) for name, gap in found.items()}
        steps += len(run.model_calls)
        model_s += run.model_s
        unnamed_s += sum(call.phases.other_s for call in run.model_calls if call.phases is not None)
    print(f"(b) {len(agents)} agent scripts, {steps} model calls")
    for name, gap in worst.items():
        print(f"    worst gap between {name}: {gap:.4%}")
    print(f"    seconds of models that no phase names: {unnamed_s / model_s:.1%}")


def cost(model: ChatAgentSpec, prompt: str, repeats: int) -> None:
    """(c) What the account costs, in shares of a round."""
    on, off, rounds = [], [], []
    for repeat in range(repeats):
        for tracked in (True, False) if repeat % 2 else (False, True):
            began = time.perf_counter()
            if tracked:
                with track_latency() as run:
                    answer = model.invoke(prompt)
                assert len(run.model_calls) == 1
            else:
                answer = model.invoke(prompt)
            (on if tracked else off).append(time.perf_counter() - began)
        rounds.append(answer.response_metadata["agentspec"]["rounds"])
    call_s, count = statistics.median(off), statistics.median(rounds)
    more_s = statistics.median(a - b for a, b in zip(on, off, strict=True))
    booked_s = booking()
    print(f"(c) {repeats} interleaved repeats of a call of {count:.0f} rounds of {call_s / count * 1e3:.1f} ms")
    print(f"    the call with track_latency takes {more_s * 1e3:+.2f} ms: {more_s / call_s:+.2%} of it")
    print(f"    what the engine books for every round: {booked_s * 1e6:.0f} us, {booked_s * count / call_s:.3%} of one")


def booking(repeats: int = 10_000) -> float:
    """Return the seconds to book a round: its phases, and the fold into the step."""
    row, stats = RowStats(Counter(lookup=4), Counter(lookup=2), 3), StepStats()
    began = time.perf_counter()
    for _ in range(repeats):
        timer = PhaseTimer()
        with timer("sample"):
            for phase in ("draft", "verify", "mask", "detokenize"):
                with timer(phase):
                    pass
        stats.add_round(row, timer.seconds, 5)
    return (time.perf_counter() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts_file", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("agents_file", type=Path, metavar="AGENTS.jsonl")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--scripts", type=int, default=12)
    parser.add_argument("--turns", type=int, default=None, help="turns of a script; all by default")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gammas", nargs="+", default=["4", "auto"])
    options = parser.parse_args()
    model = ChatAgentSpec(temperature=0, max_tokens=options.max_tokens).load()
    lines = [json.loads(line) for line in options.prompts_file.read_text().splitlines()]
    picked = lines[:: max(1, len(lines) // options.prompts)][: options.prompts]
    prompts = [line["turns"][0] for line in picked]
    timed(model, prompts[0], 0)
    for gamma in options.gammas:
        estimates(model, prompts, gamma if gamma == "auto" else int(gamma), options.repeats)
    agents = [json.loads(line) for line in options.agents_file.read_text().splitlines()][: options.scripts]
    scripts(model, agents, options.turns)
    cost(model, prompts[0], max(5, options.repeats))


if __name__ == "__main__":
    main()
