"""The formulas of the paper (Leviathan, Kalman, Matias 2022, arXiv 2211.17192): what a draft should be worth.

- ``alpha``: the expected share of drafted tokens that the target accepts, each given that those before it were. It is
  taken to be independent of the position.
- ``gamma``: the tokens drafted per round; a mean, so not necessarily a whole number.
- ``c``: the time of one pass of the draft over one of the target.
"""

from __future__ import annotations

from agentspec.errors import InvalidRequestError


def expected_tokens(alpha: float, gamma: float) -> float:
    """Return the tokens that a round emits, equation (1): ``(1 - alpha^(gamma+1)) / (1 - alpha)``, or ``gamma + 1``.

    Raises:
        InvalidRequestError: for an alpha outside 0 to 1, or a negative gamma.
    """
    _check(alpha, gamma)
    return gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def walltime_improvement(alpha: float, gamma: float, c: float, v: float = 1.0) -> float:
    """Return the speed-up over plain decoding, theorem 3.8: equation (1) over ``gamma c + 1``.

    Args:
        alpha: acceptance.
        gamma: tokens drafted per round.
        c: cost of a drafted token, in passes of the target.
        v: cost of the pass that verifies a block, in passes over one token. The paper takes it to be 1, which holds
            where passes are bound by memory traffic.

    Raises:
        InvalidRequestError: for an alpha outside 0 to 1, or a negative gamma, c or v.
    """
    if c < 0 or v <= 0:
        raise InvalidRequestError(f"Costs are positive multiples of a target pass, got c={c} and v={v}.")
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def operations_factor(alpha: float, gamma: float, c_hat: float) -> float:
    """Return the arithmetic operations over those of plain decoding, theorem 3.11.

    ``(1 - alpha)(gamma c_hat + gamma + 1) / (1 - alpha^(gamma+1))``, with ``c_hat`` the operations of the draft per
    token over the target's.

    Raises:
        InvalidRequestError: for an alpha outside 0 to 1, or a negative gamma or c_hat.
    """
    if c_hat < 0:
        raise InvalidRequestError(f"c_hat is a ratio of operations, 0 or more; got {c_hat}.")
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, limit: int = 64) -> int:
    """Return the gamma up to ``limit`` that makes decoding fastest by theorem 3.8 (section 3.5); 0 where none pays.

    By corollary 3.9 a draft pays exactly where ``alpha > c``.

    Raises:
        InvalidRequestError: for an alpha outside 0 to 1, or a negative c or limit.
    """
    if limit < 0:
        raise InvalidRequestError(f"limit is the largest gamma to consider, 0 or more; got {limit}.")
    return max(range(limit + 1), key=lambda gamma: walltime_improvement(alpha, gamma, c))


def _check(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise InvalidRequestError(f"alpha is a share, from 0 to 1; got {alpha}.")
    if not gamma >= 0:
        raise InvalidRequestError(f"gamma is the number of tokens to draft, 0 or more; got {gamma}.")
