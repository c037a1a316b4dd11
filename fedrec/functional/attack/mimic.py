"""The direction along which the Mimic attack chooses whom to copy."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.kernels._columns import inner_products, wide_blocks

__all__ = ["mimic_direction"]


def mimic_direction(
    benign: Tensor, direction: Tensor, mean: Tensor | None = None, num_seen: int = 0
) -> tuple[Tensor, Tensor]:
    r"""Do one online step towards the direction in which benign updates differ most.

    With the running mean $\mu$ and the running direction $z$ of $t$ rounds seen before,

    $$\mu \leftarrow \frac{t \mu + \bar g}{t + 1}, \qquad
    c = \sum_i (g_i - \mu)(g_i - \mu)^\top z, \qquad
    z \leftarrow \frac{t z + c / \lVert c \rVert}{\lVert t z + c / \lVert c \rVert \rVert}$$

    Args:
        benign: This round's benign updates $g_i$, shape $(b, d)$.
        direction: $z$, shape $(d,)$; any direction to start from in the first round.
        mean: $\mu$, shape $(d,)$; `None` in the first round.
        num_seen: $t$.

    Returns:
        The next $\mu$ and $z$, each of shape $(d,)$. Where the updates do not differ along $z$, it
        stays as it is.

    References:
        - Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing,
          ICLR 2022.

    Examples:
        >>> benign = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
        >>> mimic_direction(benign, torch.tensor([0.6, 0.8]))
        (tensor([1., 0.]), tensor([1., 0.]))
    """
    now = benign.mean(dim=0)
    mean = now if mean is None else (num_seen * mean + now) / (num_seen + 1)
    along = inner_products(benign, direction, mean)
    # In float64: the step grows with the square of the updates, and its norm takes another one.
    step = torch.cat([along @ block for block in wide_blocks(benign, mean)])
    norm = step.norm()
    moved = num_seen * direction + step / norm
    return mean, torch.where(norm > 0, moved / moved.norm(), direction).to(benign)
