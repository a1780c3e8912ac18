"""What happened and how long it took: plain values, folded upward. No torch, no listeners.

``RoundStats`` is what a round returns, ``StepStats`` the fold of the rounds of one request (one model step of an
agent), ``AgentRun`` (in ``agentspec.report``) the fold of an agent's steps and tools.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

FORCED = "forced"
"""Name under which tokens that a grammar left no choice about are counted; they say nothing about acceptance."""


@dataclass(frozen=True)
class RowStats:
    """One row of one round.

    Args:
        drafted: tokens that each drafter proposed.
        accepted: those of them that the target accepted.
        committed: number of tokens that were committed.
        constrained: number of these at whose positions a grammar applied.
    """

    drafted: Mapping[str, int]
    accepted: Mapping[str, int]
    committed: int
    constrained: int = 0


@dataclass(frozen=True)
class RoundStats:
    """One round.

    Args:
        rows: in the order of the batch.
        seconds: of every one of ``ROUND_PHASES``.
        width: tokens per row of the target's pass.
    """

    rows: tuple[RowStats, ...]
    seconds: Mapping[str, float]
    width: int = 1


ROUND_PHASES = ("draft_s", "mask_s", "verify_s", "sample_s", "detokenize_s")
"""What a round is made of; the rest of a step is the same without speculation, but for the draft's prefill."""

PHASES = ("queue_s", "template_s", "prefill_s", "draft_prefill_s", *ROUND_PHASES, "other_s")


def add_counts(counts: Counter[str], more: Mapping[str, int]) -> None:
    """``counts.update(more)``, which takes many times as long for a few."""
    for name, count in more.items():
        counts[name] += count


@dataclass
class WidthCost:
    """Target passes over blocks of one width: how many, their seconds, and those of the fastest."""

    rounds: int = 0
    seconds: float = 0.0
    least_s: float = math.inf

    def add(self, seconds: float) -> None:
        """One more pass."""
        self.rounds += 1
        self.seconds += seconds
        self.least_s = min(self.least_s, seconds)


@dataclass
class StepStats:
    """One model step, from the request's arrival to its last token. The phases add up to ``total_s``.

    ``ended_at`` is the time of day (seconds since 1970): an answer that ended before it was asked for was cached.

    Rounds that were shared with other requests count in full for each of them: these are seconds waited, not
    seconds of the machine.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    target_calls: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    committed_in_rounds: int = 0
    rejections: int = 0
    constrained_tokens: int = 0
    accepted_lengths: Counter[int] = field(default_factory=Counter)
    verify_costs: defaultdict[int, WidthCost] = field(default_factory=lambda: defaultdict(WidthCost))
    draft_cached_tokens: int | None = None
    plain_pass_s: float | None = None
    remarks: tuple[str, ...] = ()
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ttft_s: float = 0.0
    total_s: float = 0.0
    ended_at: float = 0.0

    def add_round(self, row: RowStats, seconds: Mapping[str, float], width: int | None = None) -> None:
        """Fold one round in.

        Args:
            row: what became of this request in it.
            seconds: of its phases.
            width: of the target's block, in tokens per row; None for that of this row's own draft.
        """
        drafted, accepted = sum(row.drafted.values()), sum(row.accepted.values())
        self.rounds += 1
        self.target_calls += 1
        add_counts(self.drafted, row.drafted)
        add_counts(self.accepted, row.accepted)
        self.committed_in_rounds += row.committed
        self.rejections += accepted < drafted and row.committed == accepted + 1  # otherwise the sequence ended there
        self.constrained_tokens += row.constrained
        self.accepted_lengths[row.committed] += 1
        if "verify_s" in seconds:
            self.verify_costs[1 + drafted if width is None else width].add(seconds["verify_s"])
        for phase, spent in seconds.items():
            self.seconds[phase] += spent

    def after(self, template_s: float) -> StepStats:
        """Return the same step, begun ``template_s`` seconds earlier with the making of its prompt."""
        seconds = self.seconds.copy()
        seconds["template_s"] += template_s
        ttft_s, total_s = self.ttft_s + template_s, self.total_s + template_s
        return replace(self, seconds=seconds, ttft_s=ttft_s, total_s=total_s)

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted where the target had a choice."""
        return sum(n for name, n in self.drafted.items() if name != FORCED)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that the target accepted where it had a choice."""
        return sum(n for name, n in self.accepted.items() if name != FORCED)

    @property
    def forced_tokens(self) -> int:
        """Tokens that a grammar left no choice about, drafted for free and accepted."""
        return self.accepted[FORCED]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted. Forced tokens are left out."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens emitted per target call, as vLLM counts it (recovered or bonus token included)."""
        return self.committed_in_rounds / self.rounds if self.rounds else None

    def to_dict(self) -> dict[str, Any]:
        """Return the step as JSON values under stable names: fields, derived values, and phases."""
        phases = {name: self.seconds[name] for name in PHASES if name != "other_s"}
        return {
            **{one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_AS_THEY_ARE},
            **{name: getattr(self, name) for name in _DERIVED},
            "drafters": {
                name: {"drafted": self.drafted[name], "accepted": self.accepted[name]} for name in sorted(self.drafted)
            },
            "accepted_lengths": {str(length): n for length, n in sorted(self.accepted_lengths.items())},
            "verify_costs": {str(width): asdict(cost) for width, cost in sorted(self.verify_costs.items())},
            "remarks": list(self.remarks),
            **phases,
            "other_s": self.total_s - sum(phases.values()),
        }


_DERIVED = ("drafted_tokens", "accepted_tokens", "forced_tokens", "mean_accepted_length", "acceptance_rate")
_NOT_AS_THEY_ARE = {"drafted", "accepted", "committed_in_rounds", "seconds"}
