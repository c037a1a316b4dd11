"""Min-Max and Min-Sum: the farthest malicious update that is no farther off than a benign one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedrec.exceptions import ConfigurationError, expected
from fedrec.functional.distances import pairwise_squared_distances, squared_norms
from fedrec.functional.kernels._columns import inner_products, standard_deviation

__all__ = ["PERTURBATIONS", "min_max", "min_sum", "perturbation"]

PERTURBATIONS = ("std", "unit", "sign")


def perturbation(reference: Tensor, kind: str = "std") -> Tensor:
    r"""Compute the direction in which a malicious update leaves the mean of honest ones.

    $$\nabla^p = -\mathrm{std}(g_1, \dots, g_r) \quad\text{or}\quad
    -\frac{\mu}{\lVert \mu \rVert} \quad\text{or}\quad -\mathrm{sign}(\mu)$$

    with the mean $\mu$ and the sample standard deviation of every coordinate.

    Args:
        reference: Honest updates, shape $(r, d)$.
        kind: `"std"`, `"unit"` or `"sign"`.

    Returns:
        Shape $(d,)$; zeros where there is no such direction.

    Raises:
        ConfigurationError: If `kind` is none of these.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> perturbation(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), "unit")
        tensor([-0.6000, -0.8000])
    """
    mean = reference.mean(dim=0)
    if kind == "std":
        return -standard_deviation(reference, mean, correction=1)
    if kind == "sign":
        return -mean.sign()
    if kind == "unit":
        norm = mean.norm()
        return torch.where(norm > 0, -mean / norm, torch.zeros_like(mean))
    raise ConfigurationError(expected("kind", "a perturbation", kind, known=PERTURBATIONS))


def min_max(reference: Tensor, direction: Tensor) -> Tensor:
    r"""Go from the mean as far as the largest distance to an honest update allows.

    $$\tilde g = \mu + \gamma \nabla^p, \qquad \gamma = \max \left\lbrace \gamma :
    \max_i \lVert \tilde g - g_i \rVert \le \max_{i,j} \lVert g_i - g_j \rVert \right\rbrace$$

    For each $i$ the bound is a quadratic inequality in $\gamma$ that holds at 0; the largest
    $\gamma$ is the least of their positive roots, so nothing is searched.

    Args:
        reference: Honest updates $g_1, \dots, g_r$, shape $(r, d)$.
        direction: $\nabla^p$, shape $(d,)$.

    Returns:
        Shape $(d,)$.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> min_max(torch.tensor([[0.0], [2.0]]), torch.tensor([-1.0]))
        tensor([0.])
    """
    return _shifted(
        reference,
        direction,
        lambda spread, slope, square, distances: _largest_root(
            square, slope, distances.amax() - spread
        ).amin(),
    )


def min_sum(reference: Tensor, direction: Tensor) -> Tensor:
    r"""Go from the mean as far as the largest sum of squared distances of an honest update allows.

    $$\tilde g = \mu + \gamma \nabla^p, \qquad \gamma = \max \left\lbrace \gamma :
    \sum_i \lVert \tilde g - g_i \rVert^2 \le \max_i \sum_j \lVert g_i - g_j \rVert^2 \right\rbrace$$

    One quadratic inequality in $\gamma$, solved exactly.

    Args:
        reference: Honest updates $g_1, \dots, g_r$, shape $(r, d)$.
        direction: $\nabla^p$, shape $(d,)$.

    Returns:
        Shape $(d,)$.

    References:
        - Shejwalkar and Houmansadr, Manipulating the Byzantine: Optimizing Model Poisoning Attacks
          and Defenses for Federated Learning, NDSS 2021.

    Examples:
        >>> min_sum(torch.tensor([[0.0], [2.0]]), torch.tensor([-1.0]))
        tensor([0.])
    """
    return _shifted(
        reference,
        direction,
        lambda spread, slope, square, distances: _largest_root(
            len(reference) * square, slope.sum(), distances.sum(dim=1).amax() - spread.sum()
        ),
    )


def _shifted(
    reference: Tensor,
    direction: Tensor,
    largest: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the mean, moved along the direction by what `largest` finds.

    With c_i the mean less g_i and p the direction, it gets the squared norms of the c_i and their
    inner products with p, each of shape (r,), the squared norm of p and the distances (r, r).
    """
    mean = reference.mean(dim=0)
    distances = pairwise_squared_distances(reference)
    spread = squared_norms(reference, mean)
    slope = -inner_products(reference, direction, mean)
    square = squared_norms(direction[None])[0]
    gamma = largest(spread, slope, square, distances)
    return mean + gamma.to(mean) * direction


def _largest_root(a: Tensor, b: Tensor, room: Tensor) -> Tensor:
    """Return the largest x with a x^2 + 2 b x <= room, where a, room >= 0; 0 if a = 0."""
    room = room.clamp(min=0)
    root = (b * b + a * room).sqrt()
    # Two forms of the same, of which one would cancel.
    x = torch.where(b > 0, room / (b + root), (root - b) / a)
    return torch.where((a > 0) & torch.isfinite(x), x, torch.zeros_like(x))
