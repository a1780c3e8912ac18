"""The idea in a page: speculative sampling with two Markov chains, against what the paper says should come out.

Run ``python examples/markov.py [--plot markov.png]``. Target and draft are transition tables over eight symbols, so
that every law is known exactly. For each gamma it prints

- the total variation between the empirical law of a text's last two symbols and the exact one, beside the noise
  floor: the mean total variation of as many independent draws from the exact law;
- the acceptance rate beside alpha = E[sum(min(p, q))], the mean over the contexts of the texts;
- tokens per target call beside (1 - alpha^(gamma+1)) / (1 - alpha). The paper derives this for acceptances that are
  independent and alike; a chain's are not quite, and the last call of a text has less left to say.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from agentspec import Batch, ModelDrafter, SamplingParams, Sequence, SpeculativeDecoder

SYMBOLS = 8
START = 0
GAMMAS = (0, 1, 2, 3, 4, 6, 8)


class MarkovChain:
    """A language model that looks at the last symbol only.

    Args:
        transitions: ``[SYMBOLS, SYMBOLS]``, row i being the law after symbol i.
    """

    vocab_size = SYMBOLS

    def __init__(self, transitions: Tensor) -> None:
        self.transitions = transitions
        self.calls = 0

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        """``[B, max(last), SYMBOLS]``: one call judges every row and position at once, as on a GPU."""
        self.calls += 1
        width = max(last)
        ends = torch.tensor([([START] * width + context)[-width:] for context in contexts])
        logits = self.transitions.log()[ends]  # right-aligned: row b's are its last last[b] entries
        return torch.stack([row.roll(n - width, 0) for row, n in zip(logits, last, strict=True)])


@dataclass(frozen=True)
class Result:
    """What one gamma gave, measured and expected."""

    gamma: int
    total_variation: float
    noise_floor: float
    acceptance: float
    alpha: float
    tokens_per_call: float
    expected_tokens_per_call: float
    target_calls_of_one_text: int


def chains(seed: int = 0, closeness: float = 0.6) -> tuple[MarkovChain, MarkovChain]:
    """A random target, and a draft that is a mixture of it and of another chain."""
    dice = torch.Generator().manual_seed(seed)
    target, other = torch.randn(2, SYMBOLS, SYMBOLS, generator=dice, dtype=torch.float64).softmax(-1)
    return MarkovChain(target), MarkovChain(closeness * target + (1 - closeness) * other)


def decode(
    decoder: SpeculativeDecoder, texts: int, length: int, first_seed: int
) -> tuple[list[Sequence], int, int, int]:
    """Texts in one batch: the sequences, tokens judged and accepted, and rounds summed over the texts."""
    params = SamplingParams(max_tokens=length)
    sequences = [Sequence([START], params, seed=first_seed + i) for i in range(texts)]
    drafted = accepted = rounds = 0
    while unfinished := [s for s in sequences if s.finish_reason is None]:
        for row in decoder.round(Batch(unfinished)).rows:
            # A token behind the first rejected one was never judged.
            judged = min(row.accepted.get("model", 0) + 1, row.drafted.get("model", 0))
            drafted, accepted, rounds = drafted + judged, accepted + row.accepted.get("model", 0), rounds + 1
    return sequences, drafted, accepted, rounds


def total_variation(counts: Tensor, law: Tensor) -> float:
    """Half the summed difference between frequencies and a law."""
    return float((counts / counts.sum() - law).abs().sum() / 2)


def measure(gamma: int, texts: int = 5_000, length: int = 32, seed: int = 0) -> Result:
    """Decode many texts with one gamma, and compare."""
    target, draft = chains(seed)
    sequences, judged, accepted, rounds = decode(
        SpeculativeDecoder(target, ModelDrafter(draft), gamma), texts, length, first_seed=1 + gamma * texts
    )
    tokens = torch.tensor([s.tokens for s in sequences])  # [texts, length]

    state = torch.linalg.matrix_power(target.transitions, length - 1)[START]
    law = (state[:, None] * target.transitions).flatten()  # of the last two symbols
    counts = torch.bincount(tokens[:, -2] * SYMBOLS + tokens[:, -1], minlength=SYMBOLS**2).double()
    dice = torch.Generator().manual_seed(seed)
    draws = [law.multinomial(texts, replacement=True, generator=dice) for _ in range(20)]
    floors = [total_variation(draw.bincount(minlength=SYMBOLS**2), law) for draw in draws]

    overlap = torch.minimum(target.transitions, draft.transitions).sum(-1)  # acceptance after each symbol
    before = torch.cat([torch.full((texts, 1), START), tokens[:, :-1]], dim=1)
    alpha = float(overlap[before].mean())
    alone = MarkovChain(target.transitions)
    decode(SpeculativeDecoder(alone, ModelDrafter(draft), gamma), 1, length, first_seed=seed)
    return Result(
        gamma,
        total_variation(counts, law),
        sum(floors) / len(floors),
        accepted / judged if judged else float("nan"),
        alpha,
        texts * length / rounds,
        (1 - alpha ** (gamma + 1)) / (1 - alpha),
        alone.calls,
    )


def plot(results: list[Result], path: Path) -> None:
    """Tokens per target call over gamma, and the distance to the exact law beside its noise floor."""
    try:
        import matplotlib.pyplot as plt  # an extra of the project, and only needed here
    except ImportError as error:
        raise SystemExit("A plot needs matplotlib: pip install 'langchain-agentspec[examples]'.") from error
    gammas = [r.gamma for r in results]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(gammas, [r.expected_tokens_per_call for r in results], "--", color="gray", label="paper's formula")
    left.plot(gammas, [r.tokens_per_call for r in results], "o-", label="measured")
    left.set(xlabel="gamma", ylabel="tokens per target call", ylim=(0, None))
    right.plot(gammas, [r.noise_floor for r in results], "--", color="gray", label="independent exact draws")
    right.plot(gammas, [r.total_variation for r in results], "o-", label="speculative sampling")
    right.set(xlabel="gamma", ylabel="total variation from the exact law", ylim=(0, None))
    for axes in (left, right):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def main(arguments: SequenceOf[str] | None = None) -> list[Result]:
    """Print the table; the results it shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=5_000, help="texts per gamma")
    parser.add_argument("--length", type=int, default=32, help="symbols per text")
    parser.add_argument("--plot", type=Path, help="save a plot to this file")
    options = parser.parse_args(arguments)
    print(f"{options.texts} texts of {options.length} symbols per gamma\n")
    print("gamma   TV to exact  (noise)   accepted  (alpha)   tokens/call (formula)   target calls for one text")
    results = []
    for gamma in GAMMAS:
        r = measure(gamma, options.texts, options.length)
        results.append(r)
        print(
            f"{r.gamma:5d}   {r.total_variation:11.4f}  ({r.noise_floor:.4f})   {r.acceptance:8.3f}  ({r.alpha:.3f})   "
            f"{r.tokens_per_call:11.2f} ({r.expected_tokens_per_call:7.2f})   {r.target_calls_of_one_text:d}"
        )
    calls = results[0].target_calls_of_one_text
    print(f"\nWithout speculation (gamma 0) {options.length} symbols take {calls} target calls.")
    if options.plot:
        plot(results, options.plot)
        print(f"Plot saved to {options.plot}")
    return results


if __name__ == "__main__":
    main()
