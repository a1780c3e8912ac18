"""Votes over samples (self-consistency, Wang et al. 2022, arXiv 2203.11171), and when a vote is decided."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Stop = Literal["none", "unanimous_window", "adaptive"]


@dataclass(frozen=True)
class Ballot:
    """The vote of one sample.

    Args:
        index: of the sample.
        key: the canonical form of its answer; None where it has none, which is no vote.
        weight: of the vote.
        logprob: mean log-probability of the sample's tokens; None where that is not known.
    """

    index: int
    key: str | None
    weight: float = 1.0
    logprob: float | None = None


def canonical(value: Any) -> str:
    """Return a form in which equal answers are equal.

    Key order, white space at the ends and ``1.0`` for ``1`` do not matter.

    Raises:
        TypeError: for what is no JSON value.
    """
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def tally(ballots: Sequence[Ballot], *, weighted: bool = False) -> dict[str, float]:
    """Return votes, or weights, per answer; the answers in the order in which they were first given."""
    votes: dict[str, float] = {}
    for ballot in sorted(ballots, key=lambda ballot: ballot.index):
        if ballot.key is not None:
            votes[ballot.key] = votes.get(ballot.key, 0.0) + (ballot.weight if weighted else 1.0)
    return votes


def winner(
    ballots: Sequence[Ballot], *, weighted: bool = False, tie: Literal["first", "logprob"] = "first"
) -> str | None:
    """Return the answer with the most votes; None without any.

    Args:
        ballots: of all samples.
        weighted: whether weights count, not heads.
        tie: among equals, the answer of the earliest sample, or of the sample with the highest log-probability.
    """
    votes = tally(ballots, weighted=weighted)
    if not votes:
        return None
    most = max(votes.values())
    equals = [key for key, count in votes.items() if math.isclose(count, most)]
    if tie == "first":
        return equals[0]
    best = max(
        (ballot for ballot in ballots if ballot.key in equals),
        key=lambda ballot: (-math.inf if ballot.logprob is None else ballot.logprob, -ballot.index),
    )
    return best.key


def is_decided(
    ballots: Sequence[Ballot], samples: int, *, stop: Stop, threshold: float = 0.95, min_samples: int = 3
) -> bool:
    """Whether the samples that are not finished may be left out.

    Args:
        ballots: of the finished samples.
        samples: how many there will be in all.
        stop: ``"none"``: never. ``"unanimous_window"``: once ``min_samples`` samples agree without a dissent.
            ``"adaptive"``: once the leader is the majority answer with a probability of ``threshold`` (Aggarwal et al.
            2023, arXiv 2305.11860). Except with ``"none"``, also once nothing can change the majority.
        threshold: of ``"adaptive"``.
        min_samples: fewest samples.
    """
    if stop == "none":
        return False
    counts = sorted(tally(ballots).values(), reverse=True)
    leader, second = [*counts, 0.0, 0.0][:2]
    if leader - second > samples - len(ballots):
        return True
    if len(ballots) < min_samples:
        return False
    if stop == "unanimous_window":
        return leader == len(ballots)
    return leads(int(leader), int(second)) >= threshold


def leads(leader: int, second: int) -> float:
    """Return the probability that the leader is the more frequent of two answers, after these counts of each.

    The posterior of its share is Beta(leader + 1, second + 1) under a flat prior; this is its mass above a half.
    """
    trials = leader + second + 1
    return float(sum(math.comb(trials, heads) for heads in range(second + 1, trials + 1)) / 2**trials)
