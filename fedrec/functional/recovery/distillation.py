"""Knowledge distillation."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["distillation_loss"]


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    r"""Return how far the student's softened predictions are from the teacher's.

    $$\frac{\tau^2}{B} \sum_{b=1}^B \mathrm{KL}\bigl(
      \mathrm{softmax}(z^{\mathrm{teacher}}_b / \tau) \,\Vert\,
      \mathrm{softmax}(z^{\mathrm{student}}_b / \tau)\bigr)$$

    The factor $\tau^2$ keeps the size of its gradient at any temperature $\tau$. The teacher gets
    no gradient.

    Args:
        student: Logits of the student, shape $(B, L)$.
        teacher: Logits of the teacher, shape $(B, L)$.
        temperature: $\tau$, above 0.

    Returns:
        A scalar of at least 0.

    References:
        - Hinton et al., Distilling the Knowledge in a Neural Network, arXiv 1503.02531, 2015.

    Examples:
        >>> teacher = torch.tensor([[3.0, 1.0]]).log()  # probabilities 3/4 and 1/4
        >>> loss = distillation_loss(torch.zeros(1, 2), teacher, temperature=1.0)
        >>> round(float(loss), 4)  # 3/4 log(3/2) + 1/4 log(1/2)
        0.1308
    """
    soft = torch.log_softmax(teacher.detach() / temperature, dim=1)
    found = torch.log_softmax(student / temperature, dim=1)
    divergence = (soft.exp() * (soft - found)).sum(dim=1)
    return temperature**2 * divergence.mean()
