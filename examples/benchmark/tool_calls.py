"""How many target calls a tool call takes: plain, with forced tokens alone, and with look-up besides.

Run ``python examples/benchmark/tool_calls.py TOOLS.jsonl [--rows 40]``; a line of the file is ``{"messages": [...],
"tools": [...]}`` in OpenAI's form. The embedded model must call one of the tools, greedily; all three ways must give
the same text, and every finished call must validate.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import jsonschema

from agentspec import Cascade, Drafter, LocalEngine, PromptLookupDrafter, Request, SamplingParams, SpeculativeDecoder
from agentspec import embedded as embedded_model
from agentspec.chat import AnswerParser, ChatFormat

WAYS: dict[str, Drafter | None] = {
    "plain": None,
    "forced tokens": Cascade(),
    "forced tokens and look-up": Cascade([PromptLookupDrafter()]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.tools.read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // options.rows)]

    target, tokenizer = embedded_model.load()
    chat = ChatFormat(tokenizer)
    engines = {name: LocalEngine(SpeculativeDecoder(target, drafter), tokenizer) for name, drafter in WAYS.items()}
    calls: Counter[str] = Counter()
    of_finished: Counter[str] = Counter()
    tokens = forced = finished = valid = differing = 0
    for row in rows:
        request = Request(
            chat.render(row["messages"], row["tools"]),
            SamplingParams(temperature=0, max_tokens=160),
            grammar=chat.answer_grammar(row["tools"], required=True),
        )
        texts = set()
        needed: Counter[str] = Counter()
        for name, engine in engines.items():
            [[completion]] = engine.generate([request])
            needed[name] += completion.stats.target_calls
            texts.add(completion.text)
        calls += needed
        differing += len(texts) > 1
        tokens += len(completion.tokens)
        forced += completion.stats.forced_tokens
        answer = AnswerParser(chat.form)
        answer.push(completion.text)
        _, [call] = answer.finish()
        if call.is_complete:
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
            finished += 1
            of_finished += needed
            valid += jsonschema.Draft202012Validator(schemas[call.name]).is_valid(json.loads(call.arguments))
    print(
        f"{len(rows)} rows, {tokens} tokens, {forced} of them forced; {finished} calls finished, {valid} of them valid"
    )
    print(f"rows whose texts differ: {differing}")
    for title, counts in (("all rows", calls), ("rows whose call was finished", of_finished)):
        print(f"\n{title}")
        for name, count in counts.items():
            print(f"  {name:28s} {count:6d} target calls   {count / counts['plain']:.2f} of plain")


if __name__ == "__main__":
    main()
