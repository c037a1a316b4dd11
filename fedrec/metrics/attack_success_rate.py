"""Attack success rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from fedrec._checks import check_int
from fedrec.metrics._labels import predicted_labels

__all__ = ["AttackSuccessRate"]


class AttackSuccessRate(Metric):
    r"""ASR: the fraction of triggered test inputs that are predicted as the target label.

    Inputs whose true label is the target label are dropped: they say nothing about the attack.

    $$ \mathrm{ASR} = \frac{\sum_i [y_i \ne c]\,[\hat y_i = c]}{\sum_i [y_i \ne c]} $$

    where $\hat y_i$ is the prediction for input $i$ with the trigger, $y_i$ its true label and $c$
    the target label. A row of logits with a NaN is no success. With no input left, the result is
    NaN.

    Args:
        target_label: The label $c$ that the attacker wants.

    Shape:
        - `preds`: logits $(B, C)$ of inputs with the trigger, or predicted labels $(B,)$.
        - `target`: true labels $(B,)$.
        - Output of `compute`: a scalar in [0, 1].

    Raises:
        ConfigurationError: If `target_label` is negative.
        ShapeError: If the shapes do not fit.

    Examples:
        >>> asr = AttackSuccessRate(target_label=0)
        >>> asr.update(torch.tensor([0, 0, 0, 3]), torch.tensor([0, 1, 2, 3]))
        >>> asr.compute()
        tensor(0.6667)
    """

    is_differentiable = False
    higher_is_better = False  # seen from the defender
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    hits: Tensor
    total: Tensor

    def __init__(self, target_label: int) -> None:
        super().__init__()
        self.target_label = check_int("target_label", target_label, minimum=0)
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count the hits among a batch of triggered inputs."""
        labels = predicted_labels(preds, target)
        others = target != self.target_label
        self.hits += (others & (labels == self.target_label)).sum()
        self.total += others.sum()

    def compute(self) -> Tensor:
        """Return the fraction over all batches."""
        return self.hits / self.total
