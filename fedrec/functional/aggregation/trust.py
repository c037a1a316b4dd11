"""Trust in client updates that point where the server's own does."""

from __future__ import annotations

from torch import Tensor

from fedrec.functional.consistency import row_cosines

__all__ = ["trust_scores"]


def trust_scores(updates: Tensor, server_update: Tensor) -> Tensor:
    r"""Compute the cosines with the server's update, those below zero set to zero.

    $$\max\left(0, \frac{g_i^\top g_0}{\lVert g_i \rVert \lVert g_0 \rVert}\right)$$

    Args:
        updates: $g_i$, finite, shape $(m, d)$.
        server_update: $g_0$, finite, shape $(d,)$.

    Returns:
        Shape $(m,)$, float64 (float32 on a device without); 0 where a norm is 0.

    References:
        - Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS
          2021.

    Examples:
        >>> import torch
        >>> updates = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]])
        >>> trust_scores(updates, torch.tensor([1.0, 0.0]))
        tensor([0.6000, 0.0000, 0.0000], dtype=torch.float64)
    """
    return row_cosines(updates, server_update).clamp_(min=0)
