"""The workloads: what is asked of every system, made of the data files and of one prompt that is built in."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from agent_scripts import play

from agentspec import Delta, Grammar, GrammarError, LocalEngine, Request, SamplingParams
from agentspec.chat import ChatFormat
from langchain_agentspec import ChatAgentSpec

PROSE = ("writing", "roleplay", "humanities", "reasoning", "stem", "qa")
COPYING = ("summarization", "rag", "extraction")
OTHER = ("coding", "math", "math_reasoning", "translation")
SAMPLES = 8
TEMPERATURE = 0.7
LONGEST_SCHEMA = 2000  # characters
TEXT = (
    "The lighthouse keeper climbed the ninety-two steps every evening before sunset. He carried a tin of oil, a clean "
    "cloth and the small brass key that opened the lamp room. From the gallery he could see the harbour, the three "
    "fishing boats that belonged to the Marlow family, and the long grey line of the breakwater."
)


@dataclass(frozen=True)
class Item:
    """One thing that is asked; ``messages`` where it is a chat without tools or grammar."""

    request: Request
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class Row:
    """Items that are asked one after the other: what a system keeps between them may help it; between rows nothing."""

    name: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Workload:
    """Rows of one kind.

    Args:
        name: short.
        title: for people.
        rows: what is asked.
    """

    name: str
    title: str
    rows: tuple[Row, ...]

    @property
    def constrained(self) -> bool:
        """Whether a system needs masks to take part."""
        return any(item.request.grammar is not None for row in self.rows for item in row.items)

    @property
    def samples(self) -> int:
        """Samples per request."""
        return max(item.request.n for row in self.rows for item in row.items)

    @property
    def is_greedy(self) -> bool:
        """Whether there is one right text."""
        return all(item.request.params.temperature == 0 for row in self.rows for item in row.items)


@dataclass(frozen=True)
class Size:
    """How much is asked.

    Args:
        rows: of the workload.
        max_tokens: per answer.
        steps: most steps of an agent script; None for all.
    """

    rows: int
    max_tokens: int
    steps: int | None = None


@dataclass(frozen=True)
class Maker:
    """How a workload is made: from which file (None for none), and by what."""

    title: str
    file: str | None
    rows: Callable[[LocalEngine, list[dict[str, Any]], Size], Iterator[Row]]


def make(name: str, engine: LocalEngine, data: Path, size: Size) -> Workload:
    """A workload.

    Raises:
        FileNotFoundError: without its file.
        ValueError: where nothing of the file can be asked.
    """
    maker = MAKERS[name]
    if maker.file is not None and not (data / maker.file).is_file():
        raise FileNotFoundError(f"{maker.file} is not in the folder {data}, which --data names.")
    lines = [] if maker.file is None else (data / maker.file).read_text().splitlines()
    rows = tuple(maker.rows(engine, [json.loads(line) for line in lines], size))
    if not rows:
        raise ValueError(f"Nothing to ask in {maker.file}; expected at least one row for the workload {name}.")
    return Workload(name, maker.title, rows)


def round_robin(rows: Sequence[dict[str, Any]], key: str, count: int) -> list[dict[str, Any]]:
    """Up to ``count`` rows, of each kind in turn."""
    kinds = defaultdict(list)
    for row in rows:
        kinds[row[key]].append(row)
    return [row for row in chain(*zip_longest(*kinds.values())) if row is not None][:count]


def agents(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
    """The requests of agent scripts, as agentspec asks them when it plays the scripts once, greedily."""
    model = ChatAgentSpec(engine=engine, temperature=0, max_tokens=size.max_tokens)
    for script in rows[: size.rows]:
        with recorded(engine) as requests:
            play(script, model, turns=None if size.steps is None else 1 + size.steps // 2)
        yield Row(script["id"], tuple(Item(request) for request in requests[: size.steps]))


@contextmanager
def recorded(engine: LocalEngine) -> Iterator[list[Request]]:
    """The requests that are made of an engine meanwhile, without time limits and relations."""
    requests: list[Request] = []
    stream = engine.stream

    def recording(request: Request, every_s: float = 0.0) -> Iterator[Delta]:
        requests.append(replace(request, group=None, timeout_s=None))
        return stream(request, every_s)

    engine.stream = recording  # type: ignore[method-assign]
    try:
        yield requests
    finally:
        del engine.stream  # type: ignore[method-assign]


def tools(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
    """One call, demanded."""
    chat = ChatFormat(engine.tokenizer)
    for row in round_robin(rows, "category", size.rows):
        grammar = chat.answer_grammar(row["tools"], required=True)
        prompt = chat.render(row["messages"], row["tools"])
        yield Row(row["id"], (Item(Request(prompt, _greedy(size), grammar)),))


def prompts(categories: Sequence[str]) -> Callable[[LocalEngine, list[dict[str, Any]], Size], Iterator[Row]]:
    """The first turns of prompts of some categories."""

    def rows_of(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
        known = sorted((row for row in rows if row["category"] in categories), key=_order(categories))
        for row in round_robin(known, "category", size.rows):
            yield Row(f"{row['category']} {row['id']}", (_asked(engine, row["turns"][0], _greedy(size)),))

    return rows_of


def repetition(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
    """A text to say again."""
    yield Row("text", (_asked(engine, f"Repeat this text exactly:\n\n{TEXT}", _greedy(size)),))


def consistency(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
    """Several samples of the answer to a maths question."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=size.max_tokens)
    for row in rows[: size.rows]:
        question = row["question"] + " Think step by step and end with the number."
        yield Row(row["id"], (_asked(engine, question, params, SAMPLES),))


def schemas(engine: LocalEngine, rows: list[dict[str, Any]], size: Size) -> Iterator[Row]:
    """Structured output: an instance of a schema that can be expressed, and that stands in the prompt."""
    found = 0
    for row in round_robin(rows, "source", len(rows)):
        written = json.dumps(row["schema"])
        if found == size.rows:
            return
        if len(written) > LONGEST_SCHEMA or not isinstance(row["schema"], dict):
            continue
        asked = _asked(engine, f"Write a JSON document that fits this JSON Schema:\n{written}", _greedy(size))
        request = replace(asked.request, grammar=Grammar.json_schema(row["schema"]), grammar_engine="llguidance")
        try:
            engine.stream(request).close()  # type: ignore[attr-defined]  # compiles the grammar, computes nothing
        except GrammarError:
            continue
        found += 1
        yield Row(row["id"], (Item(request),))


def warm_ups(engine: LocalEngine) -> Iterator[Item]:
    """Something short of every kind: a text that look-up can copy, several samples, a grammar."""
    text = "Repeat this text exactly: The lamp room, the harbour, the lamp room, the harbour."
    asked = _asked(engine, text, SamplingParams(temperature=0, max_tokens=8))
    yield asked
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=3)
    yield replace(asked, request=replace(asked.request, n=2, params=params))
    schema = {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 4}
    yield Item(replace(asked.request, grammar=Grammar.json_schema(schema)))


def _asked(engine: LocalEngine, text: str, params: SamplingParams, n: int = 1) -> Item:
    messages = ({"role": "user", "content": text},)
    # A seed would make agentspec draw so that the text does not depend on gamma, which is not its default.
    acceptance = "rejection" if params.temperature else None
    return Item(Request(ChatFormat(engine.tokenizer).render(messages), params, n=n, acceptance=acceptance), messages)


def _greedy(size: Size) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=size.max_tokens)


def _order(categories: Sequence[str]) -> Callable[[dict[str, Any]], int]:
    return lambda row: categories.index(row["category"])


MAKERS: dict[str, Maker] = {
    "agents": Maker("agent scripts", "agents.jsonl", agents),
    "tools": Maker("tool calls", "tools.jsonl", tools),
    "prose": Maker("prose", "prompts.jsonl", prompts(PROSE)),
    "copying": Maker("summaries, retrieval", "prompts.jsonl", prompts(COPYING)),
    "other": Maker("code, maths, translation", "prompts.jsonl", prompts(OTHER)),
    "repeat": Maker("repeat a text", None, repetition),
    "consistency": Maker(f"{SAMPLES} samples", "gsm8k.jsonl", consistency),
    "schemas": Maker("structured output", "schemas.jsonl", schemas),
}
"""By name, in the order in which they are run."""
