"""Rows are played by the systems in turn, so that a busy second meets all of them alike."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from comparison.systems import Answer, System
from comparison.work import Item, Row, Workload


@dataclass
class Played:
    """What a system did in a workload.

    Args:
        refusal: why it took no part, or why it stopped; None where it played all of it.
        failed: whether it stopped.
        answers: ``[row][repeat][item]``.
    """

    refusal: str | None = None
    failed: bool = False
    answers: list[list[list[Answer]]] = field(default_factory=list)

    @property
    def seconds(self) -> list[list[float]]:
        """Of each row and repeat, from the first request to the last token."""
        return [[sum(answer.seconds for answer in played) for played in row] for row in self.answers]

    @property
    def decode_s(self) -> list[list[float]] | None:
        """The same without the reading of prompts; None where the system does not tell."""
        if any(answer.prompt_s is None for answer in self.all_answers()):
            return None
        return [
            [sum(answer.seconds - (answer.prompt_s or 0.0) for answer in played) for played in row]
            for row in self.answers
        ]

    @property
    def tokens(self) -> list[list[int]]:
        """Emitted, of each row and repeat."""
        return [[sum(answer.tokens for answer in played) for played in row] for row in self.answers]

    def all_answers(self) -> list[Answer]:
        """In one list."""
        return [answer for row in self.answers for played in row for answer in played]


def warm_up(system: System, items: Sequence[Item]) -> None:
    """Let a system load and compile what it does at its first requests. The first it must be able to answer."""
    system.begin()
    system.answer(items[0], seed=0)
    for item in items[1:]:
        with suppress(Exception):  # what it cannot do is found and reported where it is asked for
            system.answer(item, seed=0)
    system.end()


def play(workload: Workload, systems: Mapping[str, System], repeats: int) -> dict[str, Played]:
    """Every row ``repeats`` times by every system that can, in an order that changes from repeat to repeat.

    A system that fails is out of this workload from there on; what it said before is dropped.
    """
    played = {name: Played(system.refusal(workload)) for name, system in systems.items()}
    for of in played.values():
        of.answers = [[] for _ in workload.rows] if of.refusal is None else []
    for repeat in range(repeats):
        for index, row in enumerate(workload.rows):
            for name in _rotated(list(systems), repeat + index):
                if played[name].refusal is None:
                    _turn(systems[name], row, played[name], index, seed=1000 * (repeat + 1))
    return played


def _turn(system: System, row: Row, played: Played, index: int, seed: int) -> None:
    try:
        system.begin()
        gc.collect()  # what was left by others, and by loading: it shall not be collected in a system's time
        try:
            played.answers[index].append([system.answer(item, seed) for item in row.items])
        finally:
            system.end()
    except Exception as error:  # whatever ends a system must not end the others
        played.refusal, played.failed, played.answers = f"{type(error).__name__}: {error}", True, []


def _rotated(names: Sequence[str], by: int) -> list[str]:
    by %= len(names)
    return [*names[by:], *names[:by]]
