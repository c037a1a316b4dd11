"""The paper's network for Purchase."""

from __future__ import annotations

from fedrec._checks import check_float
from fedrec.models.mlp import MLP

__all__ = ["PurchaseMLP"]


class PurchaseMLP(MLP):
    """600 binary features, one hidden layer of 1,024 with tanh, 100 classes: 717,924 parameters.

    Args:
        lr: Learning rate of SGD, for gradients that are means over the batch.

    Shape:
        - Input: $(B, 600)$.
        - Output: logits, $(B, 100)$.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023.

    Examples:
        >>> sum(p.numel() for p in PurchaseMLP().parameters())
        717924
    """

    def __init__(self, *, lr: float = 0.18) -> None:
        # Checked here, before `MLP` saves it as a hyperparameter.
        lr = check_float("lr", lr, minimum=0, open_minimum=True)
        super().__init__(in_features=600, hidden=(1024,), num_classes=100, activation="tanh", lr=lr)
