"""Look-up against suffix drafts, without a model at the time: recorded texts are played against the drafters.

Record some texts once, greedily, with the embedded model::

    python examples/benchmark/drafters.py record TEXTS.jsonl --agents A.jsonl --tools T.jsonl --prompts P.jsonl

and compare as often as you like: tokens per target call (the target is the recorded text), how often each class of
evidence was right, and seconds per proposal in contexts of some lengths::

    python examples/benchmark/drafters.py compare TEXTS.jsonl [--gamma 8]

A line of TEXTS is ``{"source", "prompt": [ids], "output": [ids]}``. Grammars play no part here: a token that they would
force counts as a draft like any other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from agent_scripts import play

from agentspec import (
    Batch,
    Cascade,
    Delta,
    Drafter,
    LocalEngine,
    PromptLookupDrafter,
    Request,
    SamplingParams,
    Sequence,
    SpeculativeDecoder,
    SuffixDrafter,
    embedded,
)
from agentspec.chat import ChatFormat
from agentspec.drafters import DraftBudget
from agentspec.grammars import GrammarCursor
from agentspec.runtime.tokens import common_prefix
from langchain_agentspec import ChatAgentSpec

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lookup": PromptLookupDrafter,
    "lookup from 1 token": lambda: PromptLookupDrafter(min_ngram=1),
    "suffix from 2 tokens": lambda: SuffixDrafter(min_match=2),
    "suffix": SuffixDrafter,
    "suffix, engine": lambda: SuffixDrafter(scope="engine"),
}
PROSE = ("summarization", "rag", "qa", "coding")
VOCABULARY = 50_000  # more than any id of the embedded model


class Recorder(LocalEngine):
    """An engine that writes down what it was asked and what it said."""

    source = ""
    path: Path

    def stream(self, request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        """The engine's deltas; a line is written behind the last."""
        output: list[int] = []
        for delta in super().stream(request, every_s):
            output += delta.tokens
            yield delta
        with self.path.open("a") as file:
            file.write(json.dumps({"source": self.source, "prompt": list(request.prompt), "output": output}) + "\n")


def record(options: argparse.Namespace) -> None:
    """Tool calls, prose and agent scripts, greedily."""
    target, tokenizer = embedded.load()
    engine = Recorder(SpeculativeDecoder(target, Cascade([PromptLookupDrafter()])), tokenizer)
    engine.path = options.texts
    engine.path.write_text("")
    chat = ChatFormat(tokenizer)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)

    def ask(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        engine.source = source
        grammar = chat.answer_grammar(tools, required=True) if tools else None
        list(engine.stream(Request(chat.render(messages, tools), params, grammar)))

    for row in read(options.tools)[:: options.every]:
        ask("tool calls", row["messages"], row["tools"])
    for row in [row for row in read(options.prompts) if row["category"] in PROSE][:: options.every]:
        ask("prose", [{"role": "user", "content": row["turns"][0]}], [])
    for script in read(options.agents)[: options.scripts]:
        engine.source = "agents"
        play(script, ChatAgentSpec(engine=engine, temperature=0, max_tokens=options.max_tokens))
    engine.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay(
    drafter: Drafter, prompt: list[int], output: list[int], gamma: int
) -> Iterator[tuple[list[int], int, list[int]]]:
    """Yield per target call the drafted tokens, how many of them the text agrees with, and their support."""
    sequence = Sequence(prompt, SamplingParams(max_tokens=len(output)), seed=0)
    while sequence.finish_reason is None:
        batch = Batch([sequence])
        budget = DraftBudget([min(gamma, sequence.remaining - 1)])
        [row] = drafter.propose(batch, budget, GrammarCursor(batch.sequences, VOCABULARY)).rows
        rest = output[sequence.length :]
        agree = common_prefix(row.tokens, rest)
        yield row.tokens, agree, row.support
        sequence.extend(rest[: agree + 1])


def compare(options: argparse.Namespace) -> None:
    """Print the figures."""
    texts = [text for text in read(options.texts) if text["output"]]
    by_source = defaultdict(list)
    for text in texts:
        by_source[text["source"]].append(text)
    print(f"gamma {options.gamma}; tokens per target call, and accepted of drafted tokens")
    evidences: dict[str, tuple[Counter[int], Counter[int]]] = {}
    for source, those in by_source.items():
        print(f"  {source}: {len(those)} texts, {sum(len(text['output']) for text in those)} tokens")
        for name, make in DRAFTERS.items():
            drafter, calls, tokens, drafted, accepted = make(), 0, 0, 0, 0
            right, asked = evidences.setdefault(name, (Counter(), Counter()))
            for text in those:
                for span, agree, evidence in replay(drafter, text["prompt"], text["output"], options.gamma):
                    calls, drafted, accepted = calls + 1, drafted + len(span), accepted + agree
                    right.update(evidence[:agree])
                    asked.update(evidence[: agree + 1])
                tokens += len(text["output"])
            share = accepted / max(1, drafted)
            print(f"    {name:24s} {tokens / calls:5.2f}   {accepted:5d} of {drafted:5d}, {share:4.0%}")
    print("\naccepted where all before was accepted, by class of evidence")
    for name, (right, asked) in evidences.items():
        if any(asked):
            shares = (f"{kind}: {right[kind] / asked[kind]:.2f} ({asked[kind]})" for kind in sorted(asked))
            print(f"  {name:24s} {'  '.join(shares)}")
    print("\nproposal time; median and 99th percentile in microseconds; first proposal in milliseconds")
    for length in options.lengths:
        for name, make in DRAFTERS.items():
            first, times = proposal_times(make(), texts, length, options.gamma)
            times.sort()
            print(
                f"  {length:7d} tokens  {name:24s} {statistics.median(times) * 1e6:6.0f} "
                f"{times[len(times) * 99 // 100] * 1e6:6.0f}   {first * 1e3:6.1f}"
            )


def proposal_times(
    drafter: Drafter, texts: list[dict[str, Any]], length: int, gamma: int, proposals: int = 400
) -> tuple[float, list[float]]:
    """Seconds of the first proposal in a context of recorded pieces, and of the others while it grows by tokens."""
    chosen = random.Random(length)
    ids: list[int] = []
    while len(ids) < length + proposals:
        text = chosen.choice(texts)
        whole = text["prompt"] + text["output"]
        start = chosen.randrange(len(whole))
        ids += whole[start : start + 200]
    sequence = Sequence(ids[:length], SamplingParams(max_tokens=proposals + 1), seed=0)
    times = []
    for token in ids[length : length + proposals]:
        batch = Batch([sequence])
        walk = GrammarCursor(batch.sequences, VOCABULARY)
        started = time.perf_counter()
        drafter.propose(batch, DraftBudget([gamma]), walk)
        times.append(time.perf_counter() - started)
        sequence.extend([token])
    return times[0], times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ways = parser.add_subparsers(required=True)
    recording = ways.add_parser("record")
    recording.set_defaults(run=record)
    recording.add_argument("texts", type=Path)
    for name in ("agents", "tools", "prompts"):
        recording.add_argument(f"--{name}", type=Path, required=True)
    recording.add_argument("--scripts", type=int, default=5)
    recording.add_argument("--every", type=int, default=5, help="take each n-th line of tools and prompts")
    recording.add_argument("--max-tokens", type=int, default=120)
    comparing = ways.add_parser("compare")
    comparing.set_defaults(run=compare)
    comparing.add_argument("texts", type=Path)
    comparing.add_argument("--gamma", type=int, default=8)
    comparing.add_argument("--lengths", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run(options)


if __name__ == "__main__":
    main()
