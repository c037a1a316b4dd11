"""Neurotoxin's projection."""

from __future__ import annotations

from torch import Tensor

__all__ = ["outside_top"]


def outside_top(updates: Tensor, aggregate: Tensor, count: int) -> Tensor:
    r"""Set to zero the coordinates in which an aggregate is largest.

    $$\tilde g_j = \begin{cases} 0 & \text{if } j \in \mathrm{top}_k(|a|) \\
    g_j & \text{otherwise} \end{cases}$$

    Args:
        updates: Shape $(f, d)$; not changed.
        aggregate: $a$, shape $(d,)$.
        count: $k$, between 0 and $d$.

    Returns:
        Shape $(f, d)$.

    References:
        - Zhang et al., Neurotoxin: Durable Backdoors in Federated Learning, ICML 2022.

    Examples:
        >>> import torch
        >>> outside_top(torch.ones(1, 3), torch.tensor([0.1, -5.0, 2.0]), 1)
        tensor([[1., 0., 1.]])
    """
    return updates.index_fill(1, aggregate.abs().topk(count).indices, 0.0)
