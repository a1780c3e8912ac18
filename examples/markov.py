"""The seed of the idea: speculative sampling on eight symbols, where every number can be checked.

Target and draft are Markov chains, so all that speculation promises is known exactly: the distribution of the text
comes from powers of the target's transition matrix, the acceptance rate from both matrices. No tokenizer, no weights.

    python examples/markov.py
    python examples/markov.py --plot out/markov.png
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


class MarkovModel:
    """A language model whose next token depends on the last one alone: all that the seam asks for."""

    def __init__(self, transitions: Tensor) -> None:
        self.transitions = transitions  # [V, V], row: last token, column: next
        self.vocab_size = len(transitions)
        self.calls = 0

    def next_logits(self, contexts: SequenceOf[list[int]], last: SequenceOf[int]) -> Tensor:
        """``[B, max(last), V]``: the logits after each of the final ``last[b]`` tokens of every context."""
        self.calls += 1
        ends = [context[len(context) - n :] for context, n in zip(contexts, last, strict=True)]
        padded = [end + [0] * (max(last) - len(end)) for end in ends]
        return self.transitions.log()[torch.tensor(padded)]


def models(seed: int = 0, noise: float = 0.4) -> tuple[MarkovModel, MarkovModel]:
    """A random target, and a draft that follows it but for a share of ``noise``."""
    generator = torch.Generator().manual_seed(seed)
    of_target, of_noise = torch.randn(2, SYMBOLS, SYMBOLS, generator=generator, dtype=torch.float64).softmax(-1)
    return MarkovModel(of_target), MarkovModel((1 - noise) * of_target + noise * of_noise)


# What is true


def stationary(transitions: Tensor) -> Tensor:
    """``[V]``: the distribution that a step of the chain leaves as it is."""
    return torch.linalg.matrix_power(transitions, 1000)[0]


def pair_probs(target: MarkovModel, start: Tensor, length: int) -> Tensor:
    """``[V, V]``: the exact distribution of the last two of ``length`` symbols after a first one from ``start``."""
    before = start @ torch.linalg.matrix_power(target.transitions, length - 1)
    return before[:, None] * target.transitions


def acceptance_rate(target: MarkovModel, draft: MarkovModel) -> float:
    """The paper's alpha = E[sum_x min(p(x), q(x))] over the contexts of the target's own text."""
    overlap = torch.minimum(target.transitions, draft.transitions).sum(-1)  # [V], by context
    return float(stationary(target.transitions) @ overlap)


def paper_tokens_per_call(alpha: float, gamma: int) -> float:
    """Expected tokens of a round if every token were accepted with the same chance, independently (paper, eq. 1)."""
    return sum(alpha**k for k in range(gamma + 1))  # (1 - alpha^(gamma+1)) / (1 - alpha), alpha = 1 included


def exact_tokens_per_call(target: MarkovModel, draft: MarkovModel, gamma: int) -> float:
    """The same without that assumption: acceptance depends on the context, and contexts depend on acceptance.

    Follows a round from the distribution of its first context to that of the next round's, until both are the same.
    """
    accepted = torch.minimum(target.transitions, draft.transitions)  # [V, V]: drafted and kept
    recovered = target.transitions - accepted
    round_ = torch.eye(target.vocab_size, dtype=torch.float64)  # first context -> context of the k-th token
    to_next_round = torch.zeros_like(round_)
    expected = torch.ones(target.vocab_size, dtype=torch.float64)  # tokens of a round, by first context
    for _ in range(gamma):
        to_next_round += round_ @ recovered
        round_ = round_ @ accepted
        expected += round_.sum(-1)
    return float(stationary(to_next_round + round_ @ target.transitions) @ expected)


# What is measured


@dataclass(frozen=True)
class Measurement:
    """Speculative sampling with one gamma, beside what is true.

    Args:
        gamma: tokens drafted per round.
        total_variation: between the distribution of the last two symbols, as counted, and the exact one.
        noise_floor: the same for as many draws from the exact distribution itself: its mean over many trials.
        noise_limit: what 99 % of these trials stay below.
        accepted: share of the judged draft tokens that were accepted; None where there were none.
        tokens_per_call: tokens per sequence and target pass.
        exact: what ``tokens_per_call`` is in the long run.
        paper: what the paper's formula says of it.
    """

    gamma: int
    total_variation: float
    noise_floor: float
    noise_limit: float
    accepted: float | None
    tokens_per_call: float
    exact: float
    paper: float


def measure(
    target: MarkovModel, draft: MarkovModel, gamma: int, sequences: int = 1000, length: int = 12, seed: int = 0
) -> Measurement:
    """Decode many sequences side by side until each has ``length`` symbols, and count."""
    generator = torch.Generator().manual_seed(seed)
    start = stationary(target.transitions)
    first = torch.multinomial(start, sequences, replacement=True, generator=generator).tolist()
    # Room behind `length` keeps the last rounds as long as the others.
    params = SamplingParams(max_tokens=length + gamma + 1)
    rows = [Sequence([symbol], params, seed=seed + row) for row, symbol in enumerate(first)]
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), gamma)
    passes = judged = accepted = 0
    while live := [row for row in rows if row.length < length]:
        for stats in decoder.round(Batch(live)).rows:
            n = stats.accepted.get("model", 0)
            passes += 1
            accepted += n
            judged += min(n + 1, gamma)  # what stands behind a rejected token is never judged

    exact = pair_probs(target, start, length).flatten()
    last = torch.tensor([row.tokens[length - 2 : length] for row in rows])
    counted = (last @ torch.tensor([SYMBOLS, 1])).bincount(minlength=SYMBOLS**2) / sequences
    trials = torch.multinomial(exact.expand(1000, -1), sequences, replacement=True, generator=generator)
    noise = total_variation(torch.stack([trial.bincount(minlength=len(exact)) for trial in trials]) / sequences, exact)
    alpha = acceptance_rate(target, draft)
    return Measurement(
        gamma,
        float(total_variation(counted, exact)),
        float(noise.mean()),
        float(noise.quantile(0.99)),
        accepted / judged if judged else None,
        sum(row.length for row in rows) / passes,
        exact_tokens_per_call(target, draft, gamma),
        paper_tokens_per_call(alpha, gamma),
    )


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Half the sum of differences, over the last dimension."""
    return (a - b).abs().sum(-1) / 2


def target_calls(target: MarkovModel, draft: MarkovModel, gamma: int, tokens: int) -> int:
    """Target passes that one text of ``tokens`` tokens takes."""
    before = target.calls
    sequence = Sequence([0], SamplingParams(max_tokens=tokens), seed=0)
    decoder = SpeculativeDecoder(target, ModelDrafter(draft), gamma)
    while sequence.finish_reason is None:
        decoder.round(Batch([sequence]))
    return target.calls - before


# What is shown


def report(target: MarkovModel, draft: MarkovModel, found: SequenceOf[Measurement], sequences: int) -> str:
    """The table, and how to read it."""
    alpha = acceptance_rate(target, draft)
    lines = [
        f"Two Markov chains of {SYMBOLS} symbols; exact acceptance rate alpha = {alpha:.3f}; {sequences} texts each.",
        "",
        "         last two symbols                 accepted            tokens per target call",
        "gamma    TV to exact   (pure noise)    measured  alpha     measured   exact   i.i.d. formula",
    ]
    for row in found:
        accepted = "-" if row.accepted is None else f"{row.accepted:.3f}"
        lines.append(
            f"{row.gamma:5d}    {row.total_variation:11.4f}   {row.noise_floor:12.4f}    {accepted:>8}  {alpha:.3f}"
            f"     {row.tokens_per_call:8.3f}  {row.exact:6.3f}   {row.paper:14.3f}"
        )
    lines += [
        "",
        "TV is the total variation between what was counted and the distribution from matrix powers; pure noise is the",
        "mean TV of as many draws from that distribution itself. The formula (1 - alpha^(gamma+1)) / (1 - alpha) takes",
        "every token to be accepted with the same chance, independently. In a chain the chance depends on the last",
        "symbol, so the exact figure, from the matrices of a round, differs a little.",
    ]
    tokens = 40
    lines += ["", f"Target passes for one text of {tokens} tokens:"]
    lines += [f"  gamma {gamma}: {target_calls(target, draft, gamma, tokens)}" for gamma in (0, 2, 4, 8)]
    return "\n".join(lines)


def plot(found: SequenceOf[Measurement], alpha: float, path: Path) -> None:
    """Distribution, acceptance and speed by gamma, as an image."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'langchain-agentspec[examples]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    gammas = [row.gamma for row in found]
    figure, (variation, acceptance, speed) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    variation.plot(gammas, [row.total_variation for row in found], "o", label="speculative sampling")
    variation.plot(gammas, [row.noise_floor for row in found], "k--", label="pure noise, mean")
    variation.plot(gammas, [row.noise_limit for row in found], "k:", label="pure noise, 99 % below")
    variation.set(title="Total variation to the exact distribution", ylim=(0, None))
    judged = [row for row in found if row.accepted is not None]
    acceptance.plot([row.gamma for row in judged], [row.accepted for row in judged], "o", label="measured")
    acceptance.axhline(alpha, color="k", linestyle="--", label="alpha = E[sum min(p, q)]")
    acceptance.set(title="Share of judged tokens accepted", ylim=(0, 1))
    speed.plot(gammas, [row.tokens_per_call for row in found], "o", label="measured")
    speed.plot(gammas, [row.exact for row in found], "k-", label="exact")
    speed.plot(gammas, [row.paper for row in found], "k--", label="i.i.d. formula")
    speed.set(title="Tokens per target call", ylim=(0, None))
    for axes in (variation, acceptance, speed):
        axes.set_xlabel("gamma")
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: SequenceOf[str] | None = None) -> list[Measurement]:
    """Measure every gamma, print the table, draw the plot if asked; the measurements."""
    parser = argparse.ArgumentParser(description="Speculative sampling on two Markov chains, checked number by number.")
    parser.add_argument("--sequences", type=int, default=1000, help="per gamma (default: %(default)s)")
    parser.add_argument("--length", type=int, default=12, help="symbols per sequence, 2 or more (default: %(default)s)")
    parser.add_argument("--largest-gamma", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of models and draws (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a plot, for example out/markov.png")
    options = parser.parse_args(arguments)
    if options.length < 2:
        parser.error(
            f"--length must be 2 or more, for the distribution is that of the last two symbols; got {options.length}"
        )
    target, draft = models(options.seed)
    found = [
        measure(target, draft, gamma, options.sequences, options.length, seed=options.seed + gamma * options.sequences)
        for gamma in range(options.largest_gamma + 1)
    ]
    print(report(target, draft, found, options.sequences))
    if options.plot:
        plot(found, acceptance_rate(target, draft), options.plot)
        print(f"\nPlot: {options.plot}")
    return found


if __name__ == "__main__":
    main()
