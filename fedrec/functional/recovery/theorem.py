"""The distance to train-from-scratch that FedRecover is guaranteed to keep."""

from __future__ import annotations

import math

__all__ = ["recovery_bound"]


def recovery_bound(t: int, error: float, server_lr: float, strong_convexity: float) -> float:
    r"""Return the bound of Theorem 1 on $\lVert \hat w_t - w_t \rVert$ for equal initial weights.

    $$ \frac{1 - q^t}{1 - q} \, \eta M, \qquad q = \sqrt{1 - \eta \mu} $$

    It holds for FedAvg, losses that are $\mu$-strongly convex and $L$-smooth,
    $\eta \le \min(1/\mu, 1/L)$, no abnormality fixing, and if all malicious clients are excluded.

    Args:
        t: Rounds done.
        error: $M$, the largest distance of a used estimate from its exact update.
        server_lr: $\eta > 0$.
        strong_convexity: $\mu$ in $(0, 1/\eta]$.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, Theorem 1.

    Examples:
        >>> recovery_bound(2, error=1.0, server_lr=0.5, strong_convexity=1.5)
        0.75
    """
    q = math.sqrt(1 - server_lr * strong_convexity)
    # A geometric series, summed up: its closed form is 0/0 for small learning rates.
    return server_lr * error * math.fsum(q**k for k in range(t))
