"""What the answers show besides seconds: equal texts, the gain that theory promises, overhead, and prefix reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentspec.models.pass_cost import PassCost
from agentspec.runtime.threads import apart
from agentspec.stats import PHASES, StepStats
from agentspec.theory import walltime_improvement
from comparison.systems import Answer
from comparison.timing import Played
from comparison.work import Workload

BEFORE_ROUNDS = ("queue_s", "template_s", "prefill_s", "draft_prefill_s")
"""Phases that come before the first round."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part.

    Args:
        system: whose text it is.
        row: of the workload.
        item: of the row.
        position: of the first token that differs.
        gap: by how much transformers scores the reference's token there above the other, in logits: a near tie may be
            decided by the last bits of a sum. None where one of the texts ends there.
    """

    system: str
    row: str
    item: int
    position: int
    gap: float | None


def reference(played: Mapping[str, Played], same_weights: Mapping[str, bool]) -> str | None:
    """The first system whose ids are the standard for the others; None where none took part."""
    for name, of in played.items():
        if same_weights[name] and of.answers and all(answer.is_exact for answer in of.all_answers()):
            return name
    return None


def differences(workload: Workload, played: Mapping[str, Played], standard: str, tokenizer: Any) -> list[Difference]:
    """Where the greedy texts of the other systems part from the standard's; each repeat that says something new."""
    found: dict[Difference, None] = {}
    for name, of in played.items():
        for row, repeats, told in zip(workload.rows, of.answers, played[standard].answers, strict=False):
            for answers in repeats:
                for item, (answer, expected) in enumerate(zip(answers, told[0], strict=True)):
                    ours, theirs = _comparable(answer, expected, tokenizer)
                    if ours != theirs:
                        position = _first_difference(ours, theirs)
                        found[Difference(name, row.name, item, position, None)] = None
    return list(found)


@apart
def with_gap(
    difference: Difference, workload: Workload, played: Mapping[str, Played], standard: str, model: Any
) -> Any:
    """The same difference with its gap, which takes a forward pass of ``model``; masks are left out."""
    row = next(index for index, row in enumerate(workload.rows) if row.name == difference.row)
    expected = played[standard].answers[row][0][difference.item].samples[0]
    others = [repeat[difference.item].samples[0] for repeat in played[difference.system].answers[row]]
    at = difference.position
    other = next((ids for ids in others if ids[:at] == expected[:at] and ids[at : at + 1] != expected[at : at + 1]), ())
    if at >= min(len(other), len(expected)):
        return difference
    prompt = workload.rows[row].items[difference.item].request.prompt
    with torch.inference_mode():
        scores = model(torch.tensor([[*prompt, *expected[:at]]]), logits_to_keep=1).logits[0, -1]
    gap = float(scores[expected[at]] - scores[other[at]])
    return Difference(difference.system, difference.row, difference.item, at, gap)


def _comparable(answer: Answer, expected: Answer, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Both first samples; by the ids of their text, where only text is known."""
    ours, theirs = list(answer.samples[0]), list(expected.samples[0])
    if not answer.is_exact:
        theirs = tokenizer.encode(tokenizer.decode(theirs, skip_special_tokens=True), add_special_tokens=False)
    return ours, theirs


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def steps_of(played: Played) -> list[StepStats]:
    """Return agentspec's account of all answers; of single samples only, for others share their rounds."""
    return [answer.step for answer in played.all_answers() if answer.step is not None]


def theory(on: Sequence[StepStats], off: Sequence[StepStats], cost: PassCost | None) -> dict[str, float] | None:
    """The measured gain of speculation in the rounds, beside what the formulas promise; None without rounds of both.

    ``alpha`` counts forced tokens as accepted drafts, which they are. ``paper`` is theorem 3.8, where a block costs
    what a token costs; ``paper_at_v`` has the measured cost ``v`` of a block; ``by_cost`` takes the tokens per round as
    they were, and the costs of blocks from the engine's own table, where there is one.
    """
    if not all(sum(step.rounds for step in steps) and _decode_s(steps) for steps in (on, off)):
        return None
    rounds, plain_pass_s = _sum(on, "rounds"), _phase(off, "verify_s") / _sum(off, "rounds")
    drafted = sum(step.drafted.total() for step in on)
    accepted = sum(step.accepted.total() for step in on)
    examined = accepted + _sum(on, "rejections")
    tokens_per_round = _sum(on, "committed_in_rounds") / rounds
    alpha, gamma = accepted / examined if examined else 0.0, drafted / rounds
    c = _phase(on, "draft_s") / (drafted * plain_pass_s) if drafted else 0.0
    v = _phase(on, "verify_s") / rounds / plain_pass_s
    measured = (_decode_s(off) / _sum(off, "committed_in_rounds")) / (_decode_s(on) / _sum(on, "committed_in_rounds"))
    promised = {
        "paper": walltime_improvement(alpha, gamma, c),
        "paper_at_v": walltime_improvement(alpha, gamma, c, v),
    }
    if cost is not None:
        promised["by_cost"] = tokens_per_round * cost(1, 1) / _mean_cost(on, cost)
    return {
        "alpha": alpha,
        "gamma": gamma,
        "c": c,
        "v": v,
        "tokens_per_round": tokens_per_round,
        "measured": measured,
        **promised,
        **{f"measured_over_{name}": measured / gain for name, gain in promised.items()},
    }


def overhead(steps: Sequence[StepStats]) -> dict[str, float] | None:
    """Share of the rounds' seconds outside the target's forward pass, and each phase's; None without rounds."""
    decode_s = _decode_s(steps)
    if not decode_s:
        return None
    named = {name: _phase(steps, name) for name in PHASES if name not in (*BEFORE_ROUNDS, "other_s")}
    named["other_s"] = decode_s - sum(named.values())
    shares = {name.removesuffix("_s"): seconds / decode_s for name, seconds in named.items()}
    return {"outside_target": 1 - shares["verify"], **shares}


def prefix_reuse(steps: Sequence[StepStats]) -> dict[str, float]:
    """Prompt tokens that were asked, found in the cache, and computed."""
    prompt, cached = _sum(steps, "prompt_tokens"), _sum(steps, "cached_tokens")
    return {
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "computed_tokens": prompt - cached,
        "computed_share": (prompt - cached) / prompt if prompt else 0.0,
    }


def _mean_cost(steps: Iterable[StepStats], cost: PassCost) -> float:
    """Seconds of a round by a cost table, over the widths of all rounds."""
    widths: Counter[int] = Counter()
    for step in steps:
        widths.update({width: of.rounds for width, of in step.verify_costs.items()})
    return sum(rounds * cost(1, width) for width, rounds in widths.items()) / widths.total()


def _decode_s(steps: Iterable[StepStats]) -> float:
    return sum(step.total_s - sum(step.seconds[name] for name in BEFORE_ROUNDS) for step in steps)


def _phase(steps: Iterable[StepStats], name: str) -> float:
    return sum(step.seconds[name] for step in steps)


def _sum(steps: Iterable[StepStats], name: str) -> int:
    return sum(int(getattr(step, name)) for step in steps)
