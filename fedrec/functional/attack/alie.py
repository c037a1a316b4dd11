"""A little is enough: what malicious clients send."""

from __future__ import annotations

from statistics import NormalDist

from torch import Tensor

from fedrec.functional.kernels._columns import standard_deviation

__all__ = ["alie", "alie_quantile"]


def alie_quantile(num_clients: int, num_malicious: int) -> float:
    r"""Compute how many standard deviations away malicious updates still have enough supporters.

    $$z = \Phi^{-1}\!\left(\frac{n - f - s}{n - f}\right), \qquad
    s = \left\lfloor \frac n2 + 1 \right\rfloor - f$$

    with $n$ clients, $f$ of them malicious, $\Phi$ the standard normal distribution function and
    $s$ the benign clients that have to be won over for a majority. If the attackers are one
    already, $s = 1$; if there is nobody else to be farther out than they are, $z = 0$.

    Args:
        num_clients: $n$.
        num_malicious: $f$.

    Returns:
        $z$, negative where fewer than half of the benign clients would be farther out.

    References:
        - Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning,
          NeurIPS 2019.

    Examples:
        >>> round(alie_quantile(50, 24), 3)
        1.426
    """
    benign = num_clients - num_malicious
    supporters = max(1, num_clients // 2 + 1 - num_malicious)
    if supporters >= benign:
        return 0.0
    return NormalDist().inv_cdf((benign - supporters) / benign)


def alie(reference: Tensor, z: float, sign: int = -1) -> Tensor:
    r"""Compute an update that lies a little away from the mean in every coordinate.

    $$\tilde g_j = \mu_j \pm z\, \sigma_j$$

    with the mean $\mu_j$ and the (population) standard deviation $\sigma_j$ of honest updates.

    Args:
        reference: Honest updates, shape $(r, d)$.
        z: Standard deviations.
        sign: Which way, 1 or -1.

    Returns:
        Shape $(d,)$.

    References:
        - Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning,
          NeurIPS 2019.

    Examples:
        >>> import torch
        >>> alie(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), z=1.5)
        tensor([0.5000, 0.0000])
    """
    mean = reference.mean(dim=0)
    return mean + sign * z * standard_deviation(reference, mean)
