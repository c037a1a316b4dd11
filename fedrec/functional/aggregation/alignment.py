"""How far a client's largest entries have the signs of the majority."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.aggregation.signs import sign_votes
from fedrec.functional.aggregation.sparsification import size_of_last

__all__ = ["principal_sign_alignment"]


def principal_sign_alignment(updates: Tensor, count: int) -> Tensor:
    r"""Compute the share of every client's largest entries that have the principal sign.

    $$\rho_i = \frac1k \left\lvert \left\{ j \in \operatorname{top}_k(\lvert g_i \rvert) :
    \operatorname{sgn} g_{ij} = p_j \right\} \right\rvert, \qquad
    p_j = \operatorname{sgn} \sum_i \operatorname{sgn} g_{ij}$$

    Entries that are as large as the last of the $k$ count, too.

    Args:
        updates: Finite values, shape $(m, d)$.
        count: $k$, from 1 to $d$.

    Returns:
        Shape $(m,)$, float64, on the CPU, in [0, 1]. Zero is a sign of its own.

    References:
        - Xu et al., Detecting Backdoor Attacks in Federated Learning via Direction Alignment
          Inspection, CVPR 2025.

    Examples:
        >>> updates = torch.tensor([[5.0, 1.0], [4.0, -1.0], [-9.0, -3.0]])
        >>> principal_sign_alignment(updates, 1)
        tensor([1., 1., 0.], dtype=torch.float64)
        >>> principal_sign_alignment(updates, 2)
        tensor([0.5000, 1.0000, 0.5000], dtype=torch.float64)
    """
    principal = sign_votes(updates).sign()
    shares = []
    for row in updates:  # one at a time: nothing of the size of all updates is allocated
        among = row.abs() >= size_of_last(row, count)
        agrees = (row.sign() == principal) & among
        shares.append(agrees.sum().double() / among.sum())
    return torch.stack(shares).cpu()
