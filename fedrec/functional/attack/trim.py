"""The Trim attack's crafted updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import standard_deviation

__all__ = ["trim_attack", "trim_attack_partial"]


def trim_attack(updates: Tensor, malicious: Tensor, draws: Tensor, b_max: float = 2.0) -> Tensor:
    r"""Replace malicious updates by values just beyond the benign extreme, on the wrong side.

    With $s_j = \mathrm{sign}(\sum_i g_{ij})$ the direction in which coordinate $j$ would go, and
    $e_j = \min_i g_{ij}$ if $s_j > 0$, $\max_i g_{ij}$ if $s_j < 0$, a malicious client sends

    $$\tilde g_{ij} = \begin{cases} e_j / b_{ij} & \text{if } e_j s_j > 0 \\
    e_j \, b_{ij} & \text{otherwise,} \end{cases} \qquad b_{ij} = 1 + (b_{\max} - 1)\, u_{ij}$$

    and 0 where $s_j = 0$. Sums and extremes are over all clients' honest updates, the attackers'
    own included (full knowledge).

    Args:
        updates: Honest updates, shape $(m, d)$; not changed.
        malicious: Which rows to replace, shape $(m,)$, bool, $f$ of them true.
        draws: $u_{ij}$ in $[0, 1)$, shape $(f, d)$.
        b_max: Largest factor beyond the extreme, at least 1.

    Returns:
        Shape $(m, d)$.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> honest = torch.tensor([[1.0, -2.0], [2.0, -1.0], [3.0, 4.0]])
        >>> trim_attack(honest, torch.tensor([False, False, True]), torch.ones(1, 2))
        tensor([[ 1.0000, -2.0000],
                [ 2.0000, -1.0000],
                [ 0.5000, -4.0000]])
    """
    direction = updates.sum(dim=0).sign()
    extreme = torch.where(direction > 0, updates.amin(dim=0), updates.amax(dim=0)) * direction.abs()
    factors = 1 + (b_max - 1) * draws.to(updates)
    crafted = updates.clone()
    crafted[malicious] = torch.where(extreme * direction > 0, extreme / factors, extreme * factors)
    return crafted


def trim_attack_partial(own: Tensor, draws: Tensor) -> Tensor:
    r"""Compute values beyond the extremes that attackers expect from their own honest updates.

    With mean $\mu_j$ and (population) standard deviation $\sigma_j$ of the attackers' own honest
    updates, which stand in for everybody's, a malicious client sends

    $$\tilde g_{ij} = \mu_j - \mathrm{sign}(\mu_j)\,(3 + u_{ij})\,\sigma_j$$

    that is, a value between 3 and 4 standard deviations away against the direction.

    Args:
        own: The attackers' honest updates, shape $(f, d)$.
        draws: $u_{ij}$ in $[0, 1)$, shape $(f, d)$.

    Returns:
        Shape $(f, d)$.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> own = torch.tensor([[1.0, -2.0], [3.0, -2.0]])
        >>> trim_attack_partial(own, torch.tensor([[0.0, 0.0], [0.5, 0.5]]))
        tensor([[-1.0000, -2.0000],
                [-1.5000, -2.0000]])
    """
    mean = own.mean(dim=0)
    std = standard_deviation(own, mean)
    return mean - mean.sign() * (3 + draws.to(own)) * std
