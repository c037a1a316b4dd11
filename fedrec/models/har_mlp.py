"""The paper's network for human activity recognition."""

from __future__ import annotations

from fedrec._checks import check_float
from fedrec.models.mlp import MLP

__all__ = ["HARMLP"]


class HARMLP(MLP):
    """561 features, two hidden layers of 256 with ReLU, 6 classes: 211,206 parameters.

    Args:
        lr: Learning rate of SGD, for gradients that are means over the batch.

    Shape:
        - Input: $(B, 561)$.
        - Output: logits, $(B, 6)$.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023.

    Examples:
        >>> sum(p.numel() for p in HARMLP().parameters())
        211206
    """

    def __init__(self, *, lr: float = 9.6e-3) -> None:
        # Checked here, before `MLP` saves it as a hyperparameter.
        lr = check_float("lr", lr, minimum=0, open_minimum=True)
        super().__init__(
            in_features=561, hidden=(256, 256), num_classes=6, activation="relu", lr=lr
        )
