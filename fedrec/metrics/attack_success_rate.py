"""The attack success rate."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from fedrec._checks import check_int
from fedrec.exceptions import ConfigurationError, ShapeError, expected
from fedrec.metrics._labels import decisions, num_classes

__all__ = ["AttackSuccessRate"]


class AttackSuccessRate(Metric):
    r"""ASR: the fraction of triggered test inputs that are predicted as the target label.

    Inputs whose true label is the target label are left out: for them, that prediction is right.

    $$ \mathrm{ASR} = \frac{\sum_i [y_i \ne c]\,[\hat y_i = c]}{\sum_i [y_i \ne c]} $$

    where $\hat y_i$ is the prediction for input $i$ with the trigger, $y_i$ its true label and $c$
    the target label. A row of logits with a NaN is no success. If all inputs are left out, the
    result is NaN.

    Args:
        target_label: The label $c$ that the attacker wants.

    Shape:
        - `preds`: of inputs with the trigger, logits $(B, C)$, one logit for each of two classes
          ($(B,)$ or $(B, 1)$, 1 where it is above 0), or predicted labels $(B,)$.
        - `target`: true labels $(B,)$ or $(B, 1)$.
        - Output of `compute`: a scalar in [0, 1].

    Raises:
        ConfigurationError: If `target_label` is negative, or the model cannot predict it.
        ShapeError: If the shapes do not fit, or there is more than one label an input.

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

    def __init__(self, *, target_label: int) -> None:
        super().__init__()
        self.target_label = check_int("target_label", target_label, minimum=0)
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Count the successes in a batch of triggered inputs."""
        labels, truth = decisions(preds, target)
        if target.numel() != len(target):
            raise ShapeError(
                "The attack success rate is undefined where an input has several labels: "
                f"`target` has shape {tuple(target.shape)}. HINT: use an attack without a trigger, "
                "or one label for each input."
            )
        classes = num_classes(preds, target)
        if classes is not None and self.target_label >= classes:
            requirement = f"below {classes}, the number of classes that the model predicts"
            raise ConfigurationError(expected("target_label", requirement, self.target_label))
        others = truth != self.target_label
        self.hits += (others & (labels == self.target_label)).sum()
        self.total += others.sum()

    def compute(self) -> Tensor:
        """Return the fraction over all batches."""
        return self.hits / self.total
