"""What Crab selects rounds by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["loss_windows", "softmax_divergence"]


def loss_windows(losses: Sequence[float], drop: float) -> list[range]:
    """Cut rounds into windows, one for each time that the loss has dropped by a fraction.

    A window ends before the first round whose loss is below `1 - drop` times that of the window's
    own first round, where the next one begins.

    Args:
        losses: Loss of the global model at the start of every round.
        drop: Fraction in (0, 1).

    Returns:
        Places in `losses`, all of them, in order.

    References:
        - Jiang et al., Towards Efficient and Certified Recovery from Poisoning Attacks in
          Federated Learning, IEEE TIFS 2025, selective storage.

    Examples:
        >>> loss_windows([2.0, 1.9, 1.7, 1.6, 1.0], drop=0.1)
        [range(0, 2), range(2, 4), range(4, 5)]
    """
    windows, first = [], 0
    for t, loss in enumerate(losses):
        if loss < losses[first] * (1 - drop):
            windows.append(range(first, t))
            first = t
    return [*windows, range(first, len(losses))]


def softmax_divergence(before: Iterable[Tensor], after: Iterable[Tensor]) -> float:
    r"""Return the Kullback-Leibler divergence between the parameters of two models.

    The last dimension of every parameter is made a distribution by a softmax; the divergences
    $\mathrm{KL}(\text{before} \,\|\, \text{after})$ of all of them are added.

    Args:
        before: Parameters of one model, each of any shape but a scalar's.
        after: Those of the other, in the same order.

    References:
        - Jiang et al., Towards Efficient and Certified Recovery from Poisoning Attacks in
          Federated Learning, IEEE TIFS 2025, selection of rounds.

    Examples:
        >>> weights = torch.tensor([0.0, 1.0])
        >>> softmax_divergence([weights], [weights + 5])  # a softmax does not see a shift
        0.0
    """
    total = 0.0
    for one, other in zip(before, after, strict=True):
        p, q = (torch.log_softmax(torch.atleast_1d(x).double(), dim=-1) for x in (one, other))
        total += float((p.exp() * (p - q)).sum())
    return total
