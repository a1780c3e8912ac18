"""400 real JSON Schemas (or any in the same form) against a grammar engine and the embedded model.

Run ``python examples/benchmark/schemas.py SCHEMAS.jsonl [--engine llguidance outlines auto] [--outputs 100] [--json
results.json]``; a line of the file is ``{"id", "source", "schema", "valid": [...], "invalid": [...]}``. With several
engines it also prints how many schemas each serves that another does not; ``--outputs 0`` compiles only. Per engine and
source it prints how many schemas compile, which
keywords the others are refused for, how many of the valid instances the grammar accepts (written as ``json.dumps``
writes them, properties in the order of the schema where that is needed) and of the invalid ones it rejects, and how
many outputs of the embedded model at temperature 1 finish and validate with ``jsonschema``: all that finish must.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema

from agentspec import Grammar, GrammarError, LocalEngine, Request, SamplingParams
from agentspec.chat import ChatFormat
from agentspec.engine.registry import PairSpec, load_engine
from agentspec.grammars import GRAMMAR_ENGINES, GrammarCompiler, GrammarEngine, compiler
from agentspec.grammars.grammar import to_json
from agentspec.runtime.paths import CACHE_VARIABLE


def in_schema_order(value: Any, schema: Any) -> Any:
    """An instance with its properties in the order of the schema, as a grammar that fixes the order writes it."""
    if isinstance(value, dict):
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        names = [name for name in properties if name in value] + [name for name in value if name not in properties]
        return {name: in_schema_order(value[name], properties.get(name, {})) for name in names}
    if isinstance(value, list):
        items = schema.get("items", {}) if isinstance(schema, dict) else {}
        return [in_schema_order(item, items) for item in value]
    return value


def accepts(grammars: GrammarCompiler, grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Whether a text is a sentence of the grammar."""
    matcher = grammars.matcher(grammar)
    return all(map(matcher.accept_token, tokenizer.encode(text, add_special_tokens=False))) and matcher.is_accepting()


def is_valid(value: Any, schema: Any) -> bool:
    """Whether ``jsonschema`` takes the value, in the dialect that the schema declares."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    return bool(kind(schema).is_valid(value))


def keyword(error: GrammarError) -> str:
    """What a schema was refused for: the keywords named in the error, or its first words."""
    named = re.findall(r"[Uu]nimplemented keys?: (\[.*?\])", str(error))
    reason = str(error).split("does not build ")[-1].split(" (at #")[0]
    return named[0] if named else re.sub(r"\d+|'.*'|\{.*", "...", reason.split("cannot be compiled: ")[-1])[:60]


@dataclass
class Tally:
    """What one engine did with the schemas."""

    totals: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refused: Counter[str] = field(default_factory=Counter)
    first_mask: list[float] = field(default_factory=list)
    compiled: list[tuple[dict[str, Any], Grammar]] = field(default_factory=list)
    too_strict: set[str] = field(default_factory=set)

    @property
    def served(self) -> set[str]:
        """The ids of the schemas that compile."""
        return {row["id"] for row, _ in self.compiled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--engine", nargs="+", default=["llguidance"], choices=GRAMMAR_ENGINES)
    parser.add_argument("--outputs", type=int, default=60, help="schemas to decode an instance of")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.schemas.read_text().splitlines()]
    engine = load_engine(PairSpec(device="cpu"))
    figures, tallies = {}, {}
    for name in options.engine:
        print(f"\n{name}")
        with TemporaryDirectory() as empty, patched_environment(CACHE_VARIABLE, empty):
            tally = compile_all(compiler(engine.tokenizer, engine.decoder.target.vocab_size, name), engine, rows)
        step = max(1, len(tally.compiled) // max(1, options.outputs))
        outputs(engine, name, tally.compiled[::step] if options.outputs else [], options.max_tokens, tally.totals)
        figures[name] = show(tally)
        tallies[name] = tally
    show_served_alone(tallies, len(rows))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


@contextmanager
def patched_environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment, for a while: here so that no compiled grammar lies in the disk cache yet."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def compile_all(grammars: GrammarCompiler, engine: LocalEngine, rows: list[dict[str, Any]]) -> Tally:
    """Compile every schema, and try its instances."""
    tally = Tally()
    for row in rows:
        count = tally.totals[row["source"]]
        count["schemas"] += 1
        grammar = Grammar.json_schema(row["schema"])
        started = time.perf_counter()
        try:
            grammars.matcher(grammar).token_mask()
        except GrammarError as error:
            tally.refused[keyword(error)] += 1
            continue
        tally.first_mask.append(time.perf_counter() - started)
        tally.compiled.append((row, grammar))
        count["compiled"] += 1
        for kind, expected in (("valid", True), ("invalid", False)):
            for instance in row[kind]:
                texts = {to_json(instance), to_json(in_schema_order(instance, row["schema"]))}
                accepted = any(accepts(grammars, grammar, engine.tokenizer, text) for text in texts)
                count[kind] += 1
                count[f"{kind} right"] += accepted == expected
                if expected and not accepted:
                    tally.too_strict.add(row["id"])
                if accepted and not expected:
                    print(f"INVALID INSTANCE ACCEPTED of {row['id']}: {to_json(instance)}")
    return tally


def outputs(
    engine: LocalEngine,
    name: GrammarEngine,
    compiled: list[tuple[dict[str, Any], Grammar]],
    max_tokens: int,
    totals: dict[str, Counter[str]],
) -> None:
    """Decode an instance of each schema at temperature 1, and validate what finishes."""
    chat = ChatFormat(engine.tokenizer)
    prompt = chat.render([{"role": "user", "content": "Write a short JSON document about a small shop."}])
    requests = [
        Request(prompt, SamplingParams(seed=seed, max_tokens=max_tokens), grammar=grammar, grammar_engine=name)
        for seed, (_, grammar) in enumerate(compiled)
    ]
    for (row, _), [completion] in zip(compiled, engine.generate(requests), strict=True):
        count = totals[row["source"]]
        count["outputs"] += 1
        count["target calls"] += completion.stats.target_calls
        count["tokens"] += len(completion.tokens)
        count["mask ms"] += round(1000 * completion.stats.seconds["mask_s"])
        count["verify ms"] += round(1000 * completion.stats.seconds["verify_s"])
        if completion.finish_reason == "stop":
            count["finished"] += 1
            valid = is_valid(json.loads(completion.text), row["schema"])
            count["finished valid"] += valid
            if not valid:
                print(f"INVALID OUTPUT of {row['id']}: {completion.text}")


def show(tally: Tally) -> dict[str, Any]:
    """Print the table of one engine; its figures."""
    columns = ("schemas", "compiled", "valid", "valid right", "invalid", "invalid right", "outputs", "finished")
    whole: Counter[str] = sum(tally.totals.values(), Counter())
    print(f"{'source':18s}" + "".join(f"{name:>15s}" for name in (*columns, "finished valid")))
    for source, count in [*sorted(tally.totals.items()), ("all", whole)]:
        print(f"{source:18s}" + "".join(f"{count[name]:15d}" for name in (*columns, "finished valid")))
    print("\nrefused for: " + ", ".join(f"{name} ({count})" for name, count in tally.refused.most_common()))
    times = [1000 * seconds for seconds in sorted(tally.first_mask)]
    p50, p99 = statistics.median(times), times[int(0.99 * len(times))]
    print(f"time to first mask: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    if whole["verify ms"]:
        print(f"masks take {whole['mask ms'] / whole['verify ms']:.1%} of the target passes' time")
        print(f"{whole['tokens'] / whole['target calls']:.2f} tokens per target call")
    return {"sources": tally.totals, "all": whole, "refused": tally.refused, "first mask ms": {"p50": p50, "p99": p99}}


def show_served_alone(tallies: dict[str, Tally], schemas: int) -> None:
    """Print how many schemas each engine compiles that another refuses, or gives up on by size or time."""
    for name, other in permutations(tallies, 2):
        alone = tallies[name].served - tallies[other].served
        whole = len(alone - tallies[name].too_strict)
        print(f"\n{name} serves {len(alone)} of {schemas} ({len(alone) / schemas:.1%}) that {other} does not serve;")
        print(f"of these, {whole} accept every valid instance: {', '.join(sorted(alone))}")


if __name__ == "__main__":
    main()
