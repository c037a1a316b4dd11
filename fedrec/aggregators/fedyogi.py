"""The adaptive server optimiser FedYogi."""

from __future__ import annotations

from fedrec.aggregators.fedadam import FedAdam

__all__ = ["FedYogi"]


class FedYogi(FedAdam):
    r"""The server's Yogi on what a rule returns, as in the paper.

    $$m \leftarrow \beta_1 m + (1 - \beta_1) A, \qquad
    v \leftarrow v - (1 - \beta_2) A^2 \operatorname{sign}(v - A^2), \qquad
    w \leftarrow w - \eta \frac{m}{\sqrt v + \tau}$$

    It differs from `FedAdam` in $v$, which shrinks by no more than $A^2$ allows, so that a few
    small gradients do not make the next steps large. `FedAdam` says what is remembered.

    Args:
        rule: The rule whose result is the pseudo-gradient.
        beta1: Decay $\beta_1$ of the momentum, in [0, 1).
        beta2: Decay $\beta_2$ of the variance, in [0, 1).
        tau: Degree of adaptivity $\tau > 0$, in the unit of the updates, see `FedAdam`.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If an argument is out of range or `rule` is not an `Aggregator`.

    References:
        - Reddi et al., Adaptive Federated Optimization, ICLR 2021.

    Examples:
        >>> import torch
        >>> from fedrec.aggregators import FedAvg
        >>> rule = FedYogi(FedAvg(), beta1=0.5, beta2=0.0, tau=1.0)
        >>> rule(torch.tensor([[3.0], [3.0]]))
        tensor([0.3604])
    """

    _yogi = True
