"""Angles between client updates."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.functional.distances import gram_matrix

__all__ = ["cosine_similarities", "cosines_of"]


def cosine_similarities(updates: Tensor) -> Tensor:
    r"""Compute the cosine of the angle between every two clients' updates.

    Args:
        updates: Finite values, shape $(m, d)$.

    Returns:
        Shape $(m, m)$, float64, symmetric, in [-1, 1], with ones on the diagonal. An update of
        norm 0 has the cosine 0 with every other.

    Examples:
        >>> cosine_similarities(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]))
        tensor([[1., 1., 0.],
                [1., 1., 0.],
                [0., 0., 1.]], dtype=torch.float64)
    """
    return cosines_of(gram_matrix(updates))


def cosines_of(gram: Tensor) -> Tensor:
    """Compute the cosines of the angles between vectors, given their inner products.

    Args:
        gram: Shape $(m, m)$, symmetric, see `gram_matrix`.

    Returns:
        As in `cosine_similarities`.
    """
    norms = gram.diagonal().sqrt()
    norms = torch.where(norms > 0, norms, 1.0)  # then the products are 0, too
    return (gram / norms / norms[:, None]).clamp_(-1, 1).fill_diagonal_(1)
