"""A machine with a GPU: is what it computes right, and what does speculation gain there?

Run ``python examples/benchmark/gpu.py [--device cuda] [--layers 24] [--hidden 1024]``. It needs no download: target and
draft are random Llamas made here, the draft being the target's first layers with the target's own head. Checks, in
float32: cached logits against uncached ones, greedy ids and coupled ids with speculation on against off. Then times a
plain and a speculative step in bfloat16 (float32 on the CPU), interleaved, and prints medians. Leaves with status 1
where a check fails. ``--layers 2 --hidden 64 --device cpu`` tries it in seconds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence as SequenceOf

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentspec import CausalLM, LocalEngine, ModelDrafter, PromptLookupDrafter, Request, SamplingParams
from agentspec import SpeculativeDecoder as Decoder

VOCABULARY = 4096


def pair(layers: int, hidden: int, device: str, dtype: torch.dtype) -> tuple[CausalLM, CausalLM]:
    """A random target, and a draft of a quarter of its layers: near it, for later layers are made to change little."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    target = LlamaForCausalLM(config)
    kept = max(1, layers // 4)
    for layer in target.model.layers[kept:]:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.data *= 0.1
    draft = copy.deepcopy(target)
    draft.model.layers = draft.model.layers[:kept]
    draft.config.num_hidden_layers = kept
    # torch.nn.Module.to, for transformers' own declares other types.
    return tuple(CausalLM(torch.nn.Module.to(m, device=device, dtype=dtype)) for m in (target, draft))  # type: ignore[return-value]


def check(name: str, holds: bool, detail: str = "") -> bool:
    """Print a verdict."""
    print(f"{'ok    ' if holds else 'FAILED'} {name} {detail}")
    return holds


def correctness(layers: int, hidden: int, device: str) -> bool:
    """The three checks, in float32."""
    target, draft = pair(layers, hidden, device, torch.float32)
    dice = torch.Generator().manual_seed(1)
    contexts = torch.randint(VOCABULARY, (4, 90), generator=dice).tolist()
    target.next_logits([context[:60] for context in contexts], [0] * 4)
    target.next_logits([[*context[:70], 1, 2, 3] for context in contexts], [4] * 4)  # a draft to be rejected
    cached = target.next_logits(contexts, [5] * 4)
    with torch.inference_mode():
        plain = target.model(input_ids=torch.tensor(contexts, device=target.device), use_cache=False).logits[:, -5:]
    off = float((cached - plain).abs().max() / plain.abs().max())
    right = check("cached logits equal uncached ones", off < 1e-4, f"(largest difference {off:.1e} of the largest)")

    engine = LocalEngine(Decoder(target, ModelDrafter(draft), gamma=4, acceptance="coupled"))
    for name, temperature in (("greedy", 0.0), ("coupled", 1.0)):
        params = [SamplingParams(temperature=temperature, seed=i, max_tokens=48) for i in range(4)]
        ids = {
            gamma: [
                samples[0].tokens
                for samples in engine.generate(
                    [Request(context, p, gamma=gamma) for context, p in zip(contexts, params, strict=True)]
                )
            ]
            for gamma in (0, 1, 4, 8)
        }
        same = sum(ids[gamma] == ids[0] for gamma in (1, 4, 8))
        right &= check(f"{name} ids do not depend on speculation", same == 3, f"({same} of 3 gammas, 4 texts)")
    engine.close()
    return right


def speed(layers: int, hidden: int, device: str, repeats: int) -> None:
    """Time per token, plain and speculative, at batch 1 and 4."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    target, draft = pair(layers, hidden, device, dtype)
    drafters = {"plain": None, "model draft": ModelDrafter(draft), "look-up": PromptLookupDrafter()}
    engines = {name: LocalEngine(Decoder(target, drafter, gamma=4)) for name, drafter in drafters.items()}
    prompt = torch.randint(VOCABULARY, (64,), generator=torch.Generator().manual_seed(2)).tolist()
    for batch in (1, 4):
        milliseconds: dict[str, list[float]] = {name: [] for name in engines}
        rates: dict[str, float] = {}
        for repeat in range(repeats + 1):  # the first warms up
            for name, engine in engines.items():
                requests = [Request(prompt, SamplingParams(seed=i, max_tokens=64)) for i in range(batch)]
                started = time.perf_counter()
                completions = [samples[0] for samples in engine.generate(requests)]
                spent = time.perf_counter() - started
                if repeat:
                    milliseconds[name].append(1000 * spent / 64)
                drafted = sum(c.stats.drafted_tokens for c in completions)
                rates[name] = sum(c.stats.accepted_tokens for c in completions) / drafted if drafted else 0.0
        plain = milliseconds["plain"]
        for name, measured in milliseconds.items():
            ratio = statistics.median(slow / fast for slow, fast in zip(plain, measured, strict=True))
            print(
                f"batch {batch}  {name:12s} {statistics.median(measured):8.2f} ms per step of {batch} tokens   "
                f"{ratio:5.2f} times plain   accepted {rates[name]:.0%}"
            )
    for engine in engines.values():
        engine.close()


def main(arguments: SequenceOf[str] | None = None) -> bool:
    """Check, then time; whether all checks held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    print(f"{name}, torch {torch.__version__}, {options.layers} layers of {options.hidden}")
    right = correctness(options.layers, options.hidden, options.device)
    speed(options.layers, options.hidden, options.device, options.repeats)
    return right


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
