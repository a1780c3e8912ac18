"""What LangChain's layer costs beside the engine, and how soon a cancelled call frees its place.

Run ``python examples/benchmark/langchain_overhead.py [--calls 20]``: the embedded model, greedy, 16 tokens, prompt
cache warm. The overhead is the wall time of ``invoke`` less what the engine says its step took; a cancelled call's
place is free when a call that waited for it begins.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from agentspec import LocalEngine
from agentspec.engine.registry import PairSpec, load_engine
from langchain_agentspec import ChatAgentSpec


def get_weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


def overhead(model: Any, calls: int) -> tuple[float, float]:
    """Median milliseconds of a call outside the engine, and their share of the call."""
    outside, shares = [], []
    for _ in range(calls):
        started = time.perf_counter()
        answer = model.invoke("What is the weather in Paris?")
        wall = time.perf_counter() - started
        engine = answer.response_metadata["agentspec"]["total_s"]
        outside.append(1000 * (wall - engine))
        shares.append((wall - engine) / wall)
    return statistics.median(outside), statistics.median(shares)


async def cancel_latency(model: ChatAgentSpec) -> float:
    """Milliseconds from the cancelling of a long call to the beginning of one that waits for its place."""
    long = asyncio.create_task(model.ainvoke("Tell me a long story.", max_tokens=2000))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(model.ainvoke("Hi", max_tokens=1))
    await asyncio.sleep(0.2)
    cancelled = time.time()
    long.cancel()
    step = (await waiting).response_metadata["agentspec"]
    begun = step["ended_at"] - step["total_s"] + step["queue_s"]
    return 1000 * (begun - cancelled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    engine = load_engine(PairSpec())
    model = ChatAgentSpec(engine=engine, max_tokens=16)
    for name, asked in (("free text", model), ("a tool call", model.bind_tools([get_weather], tool_choice="any"))):
        overhead(asked, 2)
        milliseconds, share = overhead(asked, options.calls)
        print(f"{name:12s} {milliseconds:.1f} ms a call outside the engine, {share:.1%} of the call")
    engine.close()
    alone = ChatAgentSpec(engine=LocalEngine(engine.decoder, engine.tokenizer, max_running=1))
    alone.invoke("Hi", max_tokens=1)
    times = [asyncio.run(cancel_latency(alone)) for _ in range(5)]
    print(f"cancelling   {statistics.median(times):.0f} ms until the place is free (median of {len(times)})")


if __name__ == "__main__":
    main()
