"""The number of rounds until a model has converged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fedrec._checks import check_float, check_int

__all__ = ["rounds_to_converge"]

# Rounding error of rates, which metrics compute in float32.
_ROUNDING = 1e-7


def rounds_to_converge(
    errors: Sequence[float], *, patience: int = 20, tolerance: float = 0.001
) -> int | None:
    r"""Return the number of rounds after which a model has converged.

    Let $m_k$ be the least error of the first $k$ rounds. The result is the first $k > p$ with
    $m_{k - p} - m_k \le \epsilon$: the last $p$ rounds did not lower the least error by more than
    $\epsilon$. A model that has not begun to learn ($m_1 - m_k \le \epsilon$) has not converged.

    Args:
        errors: Test error rate after each round, fractions in [0, 1].
        patience: $p$, rounds, at least 1.
        tolerance: $\epsilon$, a fraction, at least 0.

    Returns:
        $k$, or `None` if the model has not converged.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023, section on several local mini-batches.

    Examples:
        >>> rounds_to_converge([0.9, 0.9, 0.9, 0.5, 0.2, 0.2, 0.2, 0.1], patience=2)
        7
    """
    patience = check_int("patience", patience, minimum=1)
    tolerance = check_float("tolerance", tolerance, minimum=0)
    least = list(itertools.accumulate(errors, min))
    for k in range(patience + 1, len(least) + 1):
        fell = least[k - patience - 1] - least[k - 1]
        if fell <= tolerance + _ROUNDING < least[0] - least[k - 1]:
            return k
    return None
