"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fedrec._checks import check_choice, check_int
from fedrec.models.classifier import Classifier

__all__ = ["MLP"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MLP(Classifier):
    """A fully connected network. Inputs of any shape are flattened.

    Args:
        in_features: Numbers in one input.
        hidden: Widths of the hidden layers, first to last; empty for logistic regression.
        num_classes: Number of classes.
        activation: `"relu"` or `"tanh"`.
        lr: Learning rate of SGD.

    Shape:
        - Input: $(B, ...)$ with `in_features` numbers a sample.
        - Output: logits, $(B, C)$.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> import torch
        >>> MLP(in_features=64, hidden=(32,))(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        *,
        in_features: int,
        hidden: Sequence[int] = (32,),
        num_classes: int = 10,
        activation: str = "relu",
        lr: float = 0.1,
    ) -> None:
        super().__init__(lr=lr)
        lr = self.lr
        in_features = check_int("in_features", in_features, minimum=1)
        hidden = tuple(check_int(f"hidden[{i}]", h, minimum=1) for i, h in enumerate(hidden))
        num_classes = check_int("num_classes", num_classes, minimum=2)
        self.save_hyperparameters()
        activate = _ACTIVATIONS[check_choice("activation", activation, _ACTIVATIONS)]
        layers: list[nn.Module] = [nn.Flatten()]
        widths = [in_features, *hidden]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), activate()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        self.initialize()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.layers(x)
        return logits
