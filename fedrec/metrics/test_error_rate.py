"""Test error rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from fedrec.metrics._labels import predicted_labels

__all__ = ["TestErrorRate"]


class TestErrorRate(Metric):
    r"""TER: the fraction of test inputs whose label is predicted wrongly.

    $$ \mathrm{TER} = \frac{1}{N} \sum_{i=1}^{N} [\hat y_i \ne y_i] $$

    A row of logits with a NaN counts as wrong. Without any input the result is NaN.

    Shape:
        - `preds`: logits $(B, C)$, or predicted labels $(B,)$.
        - `target`: true labels $(B,)$.
        - Output of `compute`: a scalar in [0, 1].

    Raises:
        ShapeError: If the shapes do not fit.

    Examples:
        >>> ter = TestErrorRate()
        >>> ter.update(torch.tensor([1, 2, 0, 1]), torch.tensor([1, 2, 2, 1]))
        >>> ter.compute()
        tensor(0.2500)
    """

    __test__ = False  # not a test class, whatever its name
    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    wrong: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wrong", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count the wrong predictions of a batch."""
        labels = predicted_labels(preds, target)
        self.wrong += (labels != target).sum()
        self.total += target.numel()

    def compute(self) -> Tensor:
        """Return the fraction over all batches."""
        return self.wrong / self.total
