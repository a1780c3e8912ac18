"""Was it worth it? Calls saved, drafts wasted, and the gain against plain decoding, from what the steps counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from agentspec.report.schema import DrafterCounts, Gain, PassSource, RunRecord, Step, Theory, VerifyCost
from agentspec.stats import ROUND_PHASES
from agentspec.theory import expected_tokens, walltime_improvement

_ENOUGH_ROUNDS = 8  # of width 1, to trust their mean more than a table of costs


def call_gain(steps: Sequence[Step]) -> Gain | None:
    """Return the gain of one call, estimated; None without steps."""
    return _gain([_Rounds(steps)]) if steps else None


def run_gain(run: RunRecord) -> Gain | None:
    """Return the gain of all calls of a run, estimated; None where no step is known."""
    rounds = _rounds(run)
    return _gain(rounds) if rounds else None


def measured_gain(run: RunRecord, baseline: RunRecord) -> Gain | None:
    """Return a run's gain over the same run without speculation; None where either reports no step.

    Seconds per emitted token are compared, so that runs that say other things can be.
    """
    estimate, plain = run_gain(run), run_gain(baseline)
    if estimate is None or plain is None or not plain.tokens:
        return None
    plain_s = plain.decode_s / plain.tokens * estimate.tokens
    return estimate.model_copy(
        update={
            "estimated": False,
            "plain_decode_s": plain_s,
            "ratio": _over(plain_s, estimate.decode_s),
            "saved_s": plain_s - estimate.decode_s - sum(step.draft_prefill_s for step in _steps(run)),
            "baseline": baseline.name,
            "same_tokens": plain.tokens == estimate.tokens,
        }
    )


class _Rounds:
    """The rounds of some steps of one model."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = list(steps)
        self.lengths: Counter[int] = Counter()
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        for step in self.steps:
            self.lengths.update(step.accepted_lengths)
            self.drafted.update({name: counts.drafted for name, counts in step.drafters.items()})
            self.accepted.update({name: counts.accepted for name, counts in step.drafters.items()})

    def seconds(self, *phases: str) -> float:
        return sum((float(getattr(step, phase)) for step in self.steps for phase in phases), 0.0)

    def count(self, name: str) -> int:
        return sum(int(getattr(step, name)) for step in self.steps)

    @property
    def tokens(self) -> int:
        return sum(length * rounds for length, rounds in self.lengths.items())

    @cached_property
    def plain_pass(self) -> _Pass | None:
        costs: defaultdict[int, list[VerifyCost]] = defaultdict(list)
        for step in self.steps:
            for width, cost in step.verify_costs.items():
                costs[width].append(cost)
        reported = [(step.plain_pass_s, step.rounds) for step in self.steps if step.plain_pass_s is not None]
        return plain_pass(
            {w: (sum(c.rounds for c in of), sum(c.seconds for c in of)) for w, of in costs.items()}, reported
        )

    @property
    def plain_s(self) -> float | None:
        """What the tokens would have taken one by one: a plain pass each, and a position's share of the round's rest.

        Masks and laws are made per position of a block, so that their seconds are divided by positions.
        """
        if self.plain_pass is None:
            return None
        positions = self.count("rounds") + self.drafted.total()
        rest = self.seconds("mask_s", "sample_s", "detokenize_s")
        return self.tokens * (self.plain_pass.seconds + rest / positions)


@dataclass(frozen=True)
class _Pass:
    seconds: float
    source: PassSource


def plain_pass(costs: Mapping[int, tuple[int, float]], reported: Sequence[tuple[float, int]] = ()) -> _Pass | None:
    """Return the seconds of a target pass over one token.

    The mean of the rounds of width 1, where there are enough of them; what the engine says; the mean of fewer. Without
    either, a line through the mean seconds of the other widths, weighted by rounds, at 1; or, where that is no sensible
    time (a wider block may cost less than a narrower one), the least mean, which is more than a plain pass takes.

    Args:
        costs: ``{width: (rounds, seconds of all of them)}``.
        reported: seconds of a plain pass by the engine's table of costs, and the rounds that this is known from.
    """
    known = {width: (rounds, seconds) for width, (rounds, seconds) in costs.items() if rounds}
    rounds, seconds = known.get(1, (0, 0.0))
    if reported and rounds < _ENOUGH_ROUNDS:
        return _Pass(sum(s * n for s, n in reported) / sum(n for _, n in reported), "engine")
    if rounds:
        return _Pass(seconds / rounds, "measured")
    if not known:
        return None
    bound = min(seconds / rounds for rounds, seconds in known.values())
    line = _at_one(known)
    return _Pass(bound, "bound") if line is None or not 0 < line <= bound else _Pass(line, "extrapolated")


def _at_one(costs: Mapping[int, tuple[int, float]]) -> float | None:
    """Return the least-squares line through mean seconds by width, at width 1; None through a single point."""
    total = sum(rounds for rounds, _ in costs.values())
    mean_width = sum(width * rounds for width, (rounds, _) in costs.items()) / total
    mean_s = sum(seconds for _, seconds in costs.values()) / total
    spread = sum(rounds * (width - mean_width) ** 2 for width, (rounds, _) in costs.items())
    if not spread:
        return None
    slope = sum(s * (width - mean_width) for width, (_, s) in costs.items()) / spread
    return mean_s + slope * (1 - mean_width)


def _gain(groups: Sequence[_Rounds]) -> Gain:
    """One gain of the rounds of each model."""
    whole = _Rounds(step for group in groups for step in group.steps)
    drafted, accepted = whole.count("drafted_tokens"), whole.count("accepted_tokens")
    decode_s, draft_s = whole.seconds(*ROUND_PHASES), whole.seconds("draft_s")
    plain = [group.plain_s for group in groups]
    plain_s = None if None in plain else sum(seconds for seconds in plain if seconds is not None)
    cost = groups[0].plain_pass if len(groups) == 1 else None  # of several models there is no one cost
    c = _over(draft_s, drafted * cost.seconds) if cost and drafted else None
    return Gain(
        estimated=True,
        tokens=whole.tokens,
        remarks=tuple(dict.fromkeys(remark for step in whole.steps for remark in step.remarks)),
        target_calls=whole.count("target_calls"),
        target_calls_saved=whole.tokens - whole.count("target_calls"),
        drafters={
            name: DrafterCounts(drafted=whole.drafted[name], accepted=whole.accepted[name])
            for name in sorted(whole.drafted)
        },
        acceptance_rate=_over(accepted, drafted),
        mean_accepted_length=_over(whole.tokens, whole.count("rounds")),
        accepted_lengths=dict(sorted(whole.lengths.items())),
        draft_s=draft_s,
        wasted_draft_s=draft_s * (1 - accepted / drafted) if drafted else 0.0,
        c=c,
        plain_pass_s=cost.seconds if cost else None,
        plain_pass_from=cost.source if cost else None,
        decode_s=decode_s,
        plain_decode_s=plain_s,
        ratio=None if plain_s is None else _over(plain_s, decode_s),
        saved_s=None if plain_s is None else plain_s - decode_s - whole.seconds("draft_prefill_s"),
        theory=_theory(whole, c, cost.seconds) if c is not None and cost else None,
    )


def _theory(rounds: _Rounds, c: float, plain_pass_s: float) -> Theory | None:
    accepted, examined = rounds.count("accepted_tokens"), rounds.count("accepted_tokens") + rounds.count("rejections")
    if not examined:
        return None
    alpha, gamma = accepted / examined, rounds.count("drafted_tokens") / rounds.count("rounds")
    v = rounds.seconds("verify_s") / rounds.count("rounds") / plain_pass_s
    return Theory(
        alpha=alpha,
        gamma=gamma,
        c=c,
        v=v,
        tokens_per_round=expected_tokens(alpha, gamma),
        improvement=walltime_improvement(alpha, gamma, c),
        improvement_at_v=walltime_improvement(alpha, gamma, c, v),
    )


def _rounds(run: RunRecord) -> list[_Rounds]:
    """Return the rounds of a run, by the name of the model."""
    steps: defaultdict[str, list[Step]] = defaultdict(list)
    for call in run.model_calls:
        steps[call.name] += call.steps
    return [_Rounds(of_model) for of_model in steps.values() if of_model]


def _steps(run: RunRecord) -> list[Step]:
    return [step for call in run.model_calls for step in call.steps]


def _over(value: float, by: float) -> float | None:
    return value / by if by else None
