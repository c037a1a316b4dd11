"""Calibrated updates: an old length in a new direction."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["calibrate"]


def calibrate(historical: Tensor, new: Tensor) -> Tensor:
    r"""Give every new update the length of the historical one.

    $$ \tilde u_i = \lVert \bar g_i \rVert \, \frac{g_i}{\lVert g_i \rVert} $$

    for $\bar g_i$ the historical and $g_i$ the new update; 0 where the new update is 0.

    Args:
        historical: $\bar g$, shape $(m, d)$.
        new: $g$, shape $(m, d)$.

    Returns:
        Shape $(m, d)$.

    References:
        - Liu et al., FedEraser: Enabling Efficient Client-Level Data Removal from Federated
          Learning Models, IWQoS 2021, equation 3.

    Examples:
        >>> calibrate(torch.tensor([[0.0, 10.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([[6., 8.]])
    """
    old, length = (torch.linalg.vector_norm(rows, dim=1) for rows in (historical, new))
    return new * torch.where(length > 0, old / length, 0.0)[:, None]
