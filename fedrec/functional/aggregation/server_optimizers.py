"""Steps of server optimisers."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import wide_dtype

__all__ = ["adaptive_server_step"]


def adaptive_server_step(
    aggregate: Tensor,
    momentum: Tensor,
    variance: Tensor,
    *,
    beta1: float,
    beta2: float,
    tau: float,
    yogi: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Do a step of FedAdam, or of FedYogi. Neither corrects for a bias.

    $$m \leftarrow \beta_1 m + (1 - \beta_1) A, \qquad \text{step} = \frac{m}{\sqrt v + \tau}$$

    with $v \leftarrow \beta_2 v + (1 - \beta_2) A^2$ (Adam), or
    $v \leftarrow v - (1 - \beta_2) A^2 \operatorname{sign}(v - A^2)$ (Yogi).

    All is computed in float64, where squares of float32 values neither overflow nor vanish.

    Args:
        aggregate: Pseudo-gradient $A$ of the server, shape $(d,)$.
        momentum: $m$ of the round before, shape $(d,)$.
        variance: $v$ of the round before, shape $(d,)$, at least $\tau^2$ in the first.
        beta1: Decay $\beta_1$ of the momentum.
        beta2: Decay $\beta_2$ of the variance.
        tau: Degree of adaptivity $\tau$.
        yogi: Whether the variance is Yogi's.

    Returns:
        The step, in the dtype of `aggregate`, and the momentum and the variance, float64 (float32
        on a device without); shape $(d,)$ each, all new tensors.

    References:
        - Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Examples:
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> step, m, v = adaptive_server_step(one, zero, zero, beta1=0.5, beta2=0.75, tau=0.5)
        >>> step, m.item(), v.item()
        (tensor([0.5000]), 0.5, 0.25)
    """
    wide = aggregate.to(wide_dtype(aggregate.device))
    square = wide.square()
    momentum, variance = momentum.to(wide), variance.to(wide)
    momentum = beta1 * momentum + (1 - beta1) * wide
    if yogi:
        variance = variance - (1 - beta2) * square * torch.sign(variance - square)
    else:
        variance = beta2 * variance + (1 - beta2) * square
    return (momentum / (variance.sqrt() + tau)).to(aggregate), momentum, variance
