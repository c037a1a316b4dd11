"""The test error rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from fedrec.metrics._labels import decisions

__all__ = ["TestErrorRate"]


class TestErrorRate(Metric):
    r"""TER: the fraction of test inputs whose label is predicted wrongly.

    $$ \mathrm{TER} = \frac{1}{N} \sum_{i=1}^{N} [\hat y_i \ne y_i] $$

    A row of logits with a NaN counts as wrong. Without any input the result is NaN.

    The shapes decide how a label is predicted. With logits of $C$ classes, the class of the largest
    logit is predicted, at each position if a sample has several; positions with the label -100 are
    left out, as in torch's `cross_entropy`. With one logit for each label, 1 is predicted if the
    logit is above 0. With several such labels a sample (multi-label), the rate is the fraction of
    all labels that are wrong, not of samples with a wrong label.

    Shape:
        - `preds`: logits $(B, C)$ or $(B, C, ...)$; one logit for each label, $(B,)$, $(B, 1)$ or
          $(B, L)$; or predicted labels, integers in the shape of `target`.
        - `target`: true labels, integers $(B,)$ or $(B, ...)$; with one logit for each, 0 or 1 of
          any type, $(B,)$, $(B, 1)$ or $(B, L)$.
        - Output of `compute`: a scalar in [0, 1].

    Raises:
        ShapeError: If the shapes do not fit, or labels are beyond the outputs.
        ConfigurationError: If targets are numbers (regression).

    Examples:
        >>> ter = TestErrorRate()
        >>> ter.update(torch.tensor([1, 2, 0, 1]), torch.tensor([1, 2, 2, 1]))
        >>> ter.compute()
        tensor(0.2500)
        >>> ter.reset()
        >>> ter.update(torch.tensor([[-0.5], [2.0]]), torch.tensor([0.0, 0.0]))  # one logit each
        >>> ter.compute()
        tensor(0.5000)
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
        labels, truth = decisions(preds, target)
        self.wrong += (labels != truth).sum()
        self.total += truth.numel()

    def compute(self) -> Tensor:
        """Return the fraction over all batches."""
        return self.wrong / self.total
