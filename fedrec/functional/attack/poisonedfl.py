"""PoisonedFL's update, and its test of whether the attack gets through."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["consistent_update", "is_aligned"]


def consistent_update(
    aggregate: Tensor, sent: Tensor | None, signs: Tensor, factor: float
) -> Tensor:
    r"""Compute an update that pushes into the same direction in every round.

    With the last aggregate $a$, the update $p$ that attackers sent before, and signs
    $s \in \lbrace -1, 1 \rbrace^d$,

    $$\tilde g = -c \, \lVert a \rVert \, \frac{v}{\lVert v \rVert} \odot s, \qquad
    v = \left\lvert a - \frac{\lVert a \rVert}{\lVert p \rVert}\, p \right\rvert$$

    $v$ stands for what the benign clients sent; the server subtracts, so that the weights move
    along $s$.

    Args:
        aggregate: $a$, shape $(d,)$.
        sent: $p$, shape $(d,)$; `None` if nothing was sent yet.
        signs: $s$, shape $(d,)$.
        factor: $c > 0$.

    Returns:
        Shape $(d,)$; zeros if $v$ is.

    References:
        - Xie et al., Model Poisoning Attacks to Federated Learning via Multi-Round Consistency,
          CVPR 2025.

    Examples:
        >>> consistent_update(torch.tensor([3.0, 4.0]), None, torch.tensor([1.0, -1.0]), 2.0)
        tensor([-6.,  8.])
    """
    a = aggregate.to(wide_dtype(aggregate.device))
    length = torch.linalg.vector_norm(a)
    residual = a
    if sent is not None:
        p = sent.to(a)
        norm = torch.linalg.vector_norm(p)
        residual = a - torch.where(norm > 0, length / norm, 0.0) * p
    size = torch.linalg.vector_norm(residual)
    scale = torch.where(size > 0, factor * length / size, 0.0)
    return (-scale * residual.abs() * signs.to(a)).to(aggregate)


def is_aligned(movement: Tensor, signs: Tensor, significance: float = 0.01) -> bool:
    r"""Test whether weights have moved along signs more often than by chance.

    By chance, the number of coordinates with $\operatorname{sgn} \Delta_j = s_j$ is binomial with
    $d$ trials of probability $1/2$; it is significant from
    $d / 2 + z_{1 - \alpha} \sqrt{d} / 2$ on, the normal approximation.

    Args:
        movement: $\Delta$, the difference of two global weights, shape $(d,)$.
        signs: $s$, shape $(d,)$.
        significance: $\alpha$ in (0, 1).

    References:
        - Xie et al., Model Poisoning Attacks to Federated Learning via Multi-Round Consistency,
          CVPR 2025.

    Examples:
        >>> signs = torch.ones(100)
        >>> is_aligned(torch.ones(100), signs), is_aligned(-torch.ones(100), signs)
        (True, False)
    """
    d = len(movement)
    aligned = int((movement.sign() == signs).sum())
    return aligned >= d / 2 + NormalDist().inv_cdf(1 - significance) * math.sqrt(d) / 2
