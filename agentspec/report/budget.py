"""A run that took longer than it should: a warning, or an error."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

from agentspec.errors import BudgetExceededError, InvalidRequestError
from agentspec.report.run import AgentRun

OnOverBudget = Literal["warn", "raise"]


class BudgetWarning(UserWarning):
    """A run took longer than its budget."""


def check_budget_settings(budget_s: float | None, on_over_budget: str) -> None:
    """Raise for settings that make no sense.

    Raises:
        InvalidRequestError: for a budget that is no number of seconds, or an unknown ``on_over_budget``.
    """
    if budget_s is not None and not budget_s >= 0:
        raise InvalidRequestError(f"budget_s is a number of seconds, 0 or more, or None; got {budget_s!r}.")
    if on_over_budget not in get_args(OnOverBudget):
        raise InvalidRequestError(f"on_over_budget must be 'warn' or 'raise', got {on_over_budget!r}.")


def check_budget(run: AgentRun, on_over_budget: OnOverBudget) -> None:
    """Warn or raise where the run took longer than its budget.

    Raises:
        BudgetExceededError: with "raise".
    """
    record = run.record
    if not record.over_budget_s:
        return
    message = (
        f"{record.name or 'The run'} took {record.total_s:.3f} s, {record.over_budget_s:.3f} s more than its budget of "
        f"{record.budget_s:g} s: model {record.model_s:.3f} s, tools {record.tool_s:.3f} s, framework "
        f"{record.framework_s:.3f} s."
    )
    if on_over_budget == "raise":
        raise BudgetExceededError(message)
    warnings.warn(message, BudgetWarning, stacklevel=3)
