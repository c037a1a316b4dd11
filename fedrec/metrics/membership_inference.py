"""Membership inference: what a model's loss tells about its training data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from fedrec.exceptions import ShapeError

__all__ = ["MembershipInferenceAUC"]


class MembershipInferenceAUC(Metric):
    r"""AUC of the loss-threshold attack, which guesses whether a sample was trained on.

    The attack takes a sample for a member of the training data if the model's cross-entropy on it
    is low. Over all thresholds, the area under the attack's ROC curve is the probability that a
    member has a lower loss than a non-member, where ties count half:

    $$ \mathrm{AUC} = \Pr[\ell_{\mathrm{member}} < \ell_{\mathrm{other}}]
       + \tfrac12 \Pr[\ell_{\mathrm{member}} = \ell_{\mathrm{other}}] $$

    At 0.5, the loss does not tell members from other samples. To see whether a client that has left
    is forgotten, give its training data as members and test data as the others, and compare with
    the value of train-from-scratch: if the client's data are unlike the others' (or easier), that
    value is not 0.5 either. With no member or no other sample, the result is NaN. A loss that is
    not finite counts as higher than any other.

    Shape:
        - `preds`: logits $(B, C)$.
        - `target`: true labels $(B,)$.
        - `member`: whether each sample is of the training data in question, bool $(B,)$.
        - Output of `compute`: a scalar in [0, 1].

    Raises:
        ShapeError: If the shapes do not fit.

    References:
        - Yeom et al., Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting,
          CSF 2018.

    Examples:
        >>> auc = MembershipInferenceAUC()
        >>> logits = torch.tensor([[5.0, 0.0], [3.0, 0.0], [4.0, 0.0], [0.0, 0.0]])
        >>> member = torch.tensor([True, True, False, False])
        >>> auc.update(logits, torch.zeros(4, dtype=torch.long), member)
        >>> auc.compute()  # three of the four pairs are in order
        tensor(0.7500)
    """

    is_differentiable = False
    higher_is_better = False  # seen from the client that left
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    losses: list[Tensor]
    members: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("losses", [], dist_reduce_fx="cat")
        self.add_state("members", [], dist_reduce_fx="cat")

    def update(self, preds: Tensor, target: Tensor, member: Tensor) -> None:
        """Keep the losses of a batch."""
        if preds.ndim != 2 or not target.shape == member.shape == preds.shape[:1]:
            raise ShapeError(
                "Expected `preds` to be logits (B, C), `target` and `member` to be (B,), but got "
                f"{tuple(preds.shape)}, {tuple(target.shape)} and {tuple(member.shape)}."
            )
        loss = cross_entropy(preds.double(), target, reduction="none")
        self.losses.append(loss.nan_to_num(nan=torch.inf))
        self.members.append(member.bool())

    def compute(self) -> Tensor:
        """Return the area over all batches."""
        if not self.losses:
            return torch.tensor(torch.nan)
        losses, member = dim_zero_cat(self.losses), dim_zero_cat(self.members)
        inside, outside = losses[member], losses[~member].sort().values
        higher = len(outside) - torch.searchsorted(outside, inside, right=True)
        not_lower = len(outside) - torch.searchsorted(outside, inside)
        return ((higher + not_lower).double().mean() / (2 * len(outside))).float()
