"""What it brings to mask the draft's q as the target's p is masked: acceptance with and without, under tool calls.

Run ``python examples/benchmark/masked_drafts.py TOOLS.jsonl [--rows 40]``; a line of the file is ``{"messages": [...],
"tools": [...]}`` in OpenAI's form. The target is the embedded model, the draft the same model without some of its
layers; a call is demanded and drawn at temperature 1. The distribution of the text is the same either way, which
``make test ARGS="-k exactness"`` shows by enumeration.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import nn

from agentspec import Cascade, CausalLM, LocalEngine, ModelDrafter, Request, SamplingParams, SpeculativeDecoder
from agentspec import embedded as embedded_model
from agentspec.chat import ChatFormat


def thinned(layers_left_out: range) -> CausalLM:
    """The embedded model without some of its layers."""
    model: Any = embedded_model.load()[0].model
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in layers_left_out]
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index
    return CausalLM(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tools", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--left-out", type=int, nargs=2, default=(24, 26), help="layers that the draft lacks: from, to")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.tools.read_text().splitlines()]
    rows = rows[:: max(1, len(rows) // options.rows)]
    target, tokenizer = embedded_model.load()
    chat, draft = ChatFormat(tokenizer), thinned(range(*options.left_out))
    print(f"{len(rows)} rows, gamma 4, temperature 1, forced tokens drafted apart")
    for name, masked in (("masked q", True), ("free q", False)):
        drafter = Cascade([ModelDrafter(draft, masked=masked)])
        engine = LocalEngine(SpeculativeDecoder(target, drafter, gamma=4), tokenizer)
        drafted = accepted = calls = tokens = 0
        for seed, row in enumerate(rows):
            params = SamplingParams(temperature=1, seed=seed, max_tokens=100)
            grammar = chat.answer_grammar(row["tools"], required=True)
            [[done]] = engine.generate([Request(chat.render(row["messages"], row["tools"]), params, grammar)])
            drafted, accepted = drafted + done.stats.drafted_tokens, accepted + done.stats.accepted_tokens
            calls, tokens = calls + done.stats.target_calls, tokens + len(done.tokens)
        engine.close()
        print(
            f"{name:10s} {accepted:5d} of {drafted:5d} drafted tokens accepted ({accepted / drafted:.1%}), "
            f"{tokens} tokens in {calls} target calls ({tokens / calls:.2f} per call)"
        )


if __name__ == "__main__":
    main()
