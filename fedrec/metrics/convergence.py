"""When a model has converged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fedrec._checks import check_float, check_int

__all__ = ["rounds_to_converge"]


def rounds_to_converge(
    errors: Sequence[float], *, patience: int = 20, tolerance: float = 0.001
) -> int | None:
    r"""Return after how many rounds a model has converged.

    With $m_k$ the least error of the first $k$ rounds, these are the fewest rounds $k$ from which
    on $m_{k - p} - m_k \le \epsilon$, for all later $k$, too: no $p$ rounds lower the least error
    by more than $\epsilon$ any more. (The paper asks for that once; a model that has not begun to
    learn would have converged then.)

    Args:
        errors: Test error rate after each round, fractions in [0, 1].
        patience: $p$, rounds, at least 1.
        tolerance: $\epsilon$, a fraction, at least 0.

    Returns:
        More than `patience`; `None` if the error still falls at the end, or there are not
        that many rounds.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023, section on several local mini-batches.

    Examples:
        >>> rounds_to_converge([0.9, 0.9, 0.9, 0.5, 0.2, 0.2, 0.2, 0.2], patience=2)
        7
    """
    check_int("patience", patience, minimum=1)
    check_float("tolerance", tolerance, minimum=0)
    least = list(itertools.accumulate(errors, min))
    converged = None
    for k in range(len(least), patience, -1):
        if least[k - patience - 1] - least[k - 1] > tolerance:
            break
        converged = k
    return converged
