"""Many at once: samples and agents that share one engine against the same calls one after the other; votes on maths.

Run ``python examples/benchmark/self_consistency.py [GSM8K.jsonl] [--questions 10]``; a line of the file is
``{"question", "answer"}``. The embedded model, float32; ratios of tokens per second, interleaved, medians. A model of
this size solves next to no maths question: what the vote changes is shown, not that it is right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

sys.path.append(str(Path(__file__).resolve().parents[1]))
from agent_loop import PRICES, RATES, convert_dollars, get_price, keep_course, list_items

from agentspec.rng import sample_seed
from langchain_agentspec import ChatAgentSpec, SelfConsistency

K = 8
PROMPT = "Write a short story about a lamp."


def last_number(message: Any) -> str | None:
    """The answer to a maths question: the last number in the text."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", message.text)
    return found[-1].replace(",", "").rstrip(".") if found else None


def tokens_of(answers: list[Any]) -> int:
    return sum(answer.usage_metadata["output_tokens"] for answer in answers)


def samples(model: ChatAgentSpec, together: bool) -> tuple[int, float]:
    """Tokens and seconds of ``K`` samples of one prompt."""
    started = time.perf_counter()
    if together:
        [generations] = model.generate([[HumanMessage(PROMPT)]], n=K, seed=1, acceptance="coupled").generations
        answers = [generation.message for generation in generations]  # type: ignore[union-attr]
    else:
        answers = [model.invoke(PROMPT, seed=sample_seed(1, i), acceptance="coupled") for i in range(K)]
    return tokens_of(answers), time.perf_counter() - started


def conversations(model: ChatAgentSpec, together: bool) -> tuple[int, float]:
    """Tokens and seconds of ``K`` conversations with other questions."""
    questions = [f"Write a short story about lamp number {i}." for i in range(K)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(model.ainvoke(question, seed=i) for i, question in enumerate(questions)))

    started = time.perf_counter()
    answers = asyncio.run(ask()) if together else [model.invoke(q, seed=i) for i, q in enumerate(questions)]
    return tokens_of(answers), time.perf_counter() - started


def tool_loops(model: ChatAgentSpec, together: bool) -> tuple[int, float]:
    """Tokens and seconds of ``K`` agents with tools: two calls each, and an answer."""
    questions = [f"What does the {item} cost in {currency}?" for item in PRICES for currency in RATES][:K]
    inputs = [{"messages": [("user", question)]} for question in questions]
    agent: Any = create_agent(model, tools=[get_price, convert_dollars, list_items], middleware=[keep_course])
    started = time.perf_counter()
    runs = agent.batch(inputs, {"max_concurrency": K}) if together else [agent.invoke(asked) for asked in inputs]
    return tokens_of([m for run in runs for m in run["messages"] if m.type == "ai"]), time.perf_counter() - started


def throughput(model: ChatAgentSpec, repeats: int) -> None:
    """Print how many times faster the engine is with everything at once."""
    workloads = {
        f"{K} samples of one prompt": samples,
        f"{K} conversations": conversations,
        f"{K} agents with tools": tool_loops,
    }
    for name, play in workloads.items():
        play(model, True)
        ratios, rates = [], []
        for _ in range(repeats):
            alone, shared = play(model, False), play(model, True)
            rates.append((alone[0] / alone[1], shared[0] / shared[1]))
            ratios.append(rates[-1][1] / rates[-1][0])
        one, many = (statistics.median(column) for column in zip(*rates, strict=True))
        print(
            f"{name}: {one:.1f} tokens/s one after the other, {many:.1f} at once, ratio {statistics.median(ratios):.2f}"
        )


def votes(model: ChatAgentSpec, rows: list[dict[str, Any]], alone: int) -> None:
    """Print accuracy of single samples and of votes, and what early stopping saves.

    Of the first ``alone`` questions the samples are drawn by single calls besides, for the time that this takes.
    """
    single = majority = early_right = same = saved = drawn = stopped = 0
    wall = alone_wall = 0.0
    for number, row in enumerate(rows):
        question = row["question"] + " Think step by step and end with the number."
        whole = SelfConsistency(model, K, extract=last_number, seed=1, return_all=True).invoke(question)
        early = SelfConsistency(model, K, extract=last_number, seed=1, stop="adaptive", return_all=True).invoke(
            question
        )
        single += whole.samples[0].answer == row["answer"]
        majority += whole.answer == row["answer"]
        early_right += early.answer == row["answer"]
        stopped += early.stopped_early
        same += early.answer == whole.answer
        drawn, saved = drawn + len(early.samples), saved + early.tokens_saved
        if number >= alone:
            continue
        started = time.perf_counter()
        for i in range(K):
            model.invoke(question, seed=sample_seed(1, i), acceptance="coupled")
        alone_wall += time.perf_counter() - started
        wall += whole.latency_s
    n = len(rows)
    print(f"{n} questions, k = {K}, temperature {model.temperature}")
    print(f"  right: first sample {single}, majority {majority}, with adaptive stopping {early_right}")
    print(
        f"  adaptive: {stopped} votes stopped early, {same} of {n} answers as without, "
        f"{n * K - drawn} of {n * K} samples and {saved} tokens saved"
    )
    if wall:
        print(f"  wall time of a vote against {K} calls one after the other: {alone_wall / wall:.2f} times faster")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions_file", type=Path, nargs="?")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument(
        "--alone", type=int, default=5, help="questions whose samples are drawn by single calls besides"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, help="tokens to draft per round; 0 for none")
    options = parser.parse_args()
    gamma = "auto" if options.gamma is None else options.gamma
    model = ChatAgentSpec(temperature=0.7, max_tokens=options.max_tokens, gamma=gamma).load()
    if options.repeats:
        throughput(model, options.repeats)
    if options.questions_file:
        rows = [json.loads(line) for line in options.questions_file.read_text().splitlines()][: options.questions]
        votes(model.model_copy(update={"max_tokens": 2 * options.max_tokens}), rows, options.alone)


if __name__ == "__main__":
    main()
