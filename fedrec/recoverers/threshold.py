"""The abnormality threshold of FedRecover."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor

__all__ = ["abnormality_threshold"]


def abnormality_threshold(rounds: Iterable[Tensor], tolerance_rate: float) -> float:
    r"""Find the smallest threshold that few historical entries exceed, in any round.

    For round $t$, $\tau_t$ is the smallest number that at most $\lfloor \alpha N_t \rfloor$ of the
    $N_t$ entries of the remaining clients' historical updates exceed in magnitude, that is the
    $(\lfloor \alpha N_t \rfloor + 1)$-th largest magnitude; $\tau = \max_t \tau_t$.

    Args:
        rounds: One tensor of historical updates per round, shape $(m_t, d)$.
        tolerance_rate: $\alpha$ in [0, 1).

    Returns:
        $\tau$; 0 if there is no entry at all.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, section IV-C.

    Examples:
        >>> abnormality_threshold([torch.tensor([[1.0, -4.0], [2.0, 3.0]])], tolerance_rate=0.25)
        3.0
    """
    # From the decimal text: 0.29 * 100 is 28.999... in binary.
    rate = Fraction(str(tolerance_rate))
    threshold = 0.0
    for updates in rounds:
        magnitudes = updates.abs().flatten()
        allowed = int(rate * magnitudes.numel())
        # Only a round with more exceeding entries than allowed can raise the maximum.
        exceeding = magnitudes[magnitudes > threshold]
        if exceeding.numel() > allowed:
            threshold = float(torch.topk(exceeding, allowed + 1).values[-1])
    return threshold
