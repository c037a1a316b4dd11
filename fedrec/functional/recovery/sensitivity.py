"""How far clients have moved the global weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["certified_sensitivity", "removal_effect"]


def removal_effect(updates: Tensor, client_weights: Tensor, removed: Tensor) -> float:
    r"""Return how far the weighted mean of a round moves when clients are left out.

    $$ \lVert \textstyle\sum_i p_i g_i - \sum_{i \notin S} p_i g_i / \sum_{i \notin S} p_i \rVert $$

    for client weights $p$ that sum to 1 and removed clients $S$. If everybody is removed, what is
    left is 0.

    Args:
        updates: $g$, shape $(m, d)$.
        client_weights: Shape $(m,)$, non-negative, with a positive sum.
        removed: $S$, shape $(m,)$, bool.

    References:
        - Fraboni et al., SIFU: Sequential Informed Federated Unlearning for Efficient and Provable
          Client Unlearning in Federated Optimization, AISTATS 2024.

    Examples:
        >>> updates = torch.tensor([[0.0, 0.0], [6.0, 8.0]])
        >>> removal_effect(updates, torch.tensor([1.0, 1.0]), torch.tensor([False, True]))
        5.0
    """
    if not bool(removed.any()):
        return 0.0
    weights = client_weights.double()
    kept = weights * ~removed
    left = float(kept.sum())
    # One row for all: the difference is taken before it is multiplied, so nothing cancels.
    coefficients = weights / weights.sum() - (kept / left if left > 0 else 0.0)
    return float(torch.linalg.vector_norm(coefficients.to(updates) @ updates))


def certified_sensitivity(noise_std: float, epsilon: float, delta: float) -> float:
    r"""Return the sensitivity up to which Gaussian noise hides that clients took part.

    $$ \Psi^* = \frac{\varepsilon \sigma}{\sqrt{2 \ln (1.25 / \delta)}} $$

    Args:
        noise_std: $\sigma$, at least 0.
        epsilon: $\varepsilon > 0$.
        delta: $\delta$ in (0, 1).

    References:
        - Fraboni et al., SIFU, AISTATS 2024, which applies the Gaussian mechanism.

    Examples:
        >>> round(certified_sensitivity(noise_std=0.05, epsilon=10, delta=0.1), 4)
        0.2225
    """
    return epsilon * noise_std / math.sqrt(2 * math.log(1.25 / delta))
