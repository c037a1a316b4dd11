"""The paper's network for MNIST and Fashion-MNIST."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrec._checks import check_int
from fedrec.models.classifier import Classifier

__all__ = ["CNN"]


class CNN(Classifier):
    """Two convolutions with pooling, two fully connected layers.

    Convolution 3x3 to 30 channels, ReLU, 2x2 max-pooling; convolution 3x3 to 50 channels, ReLU, 2x2
    max-pooling; fully connected layer of `hidden` with ReLU; logits. No padding. On MNIST that is
    139,960 parameters with `hidden=100` and 266,060 with `hidden=200`, the two widths in use for
    this network.

    Args:
        in_channels: 1 for grey images, 3 for colour.
        num_classes: Number of classes.
        hidden: Width of the fully connected hidden layer.
        lr: Learning rate of SGD.
        image_size: Height and width of the images in pixels, at least 10.

    Shape:
        - Input: $(B, c, h, h)$ with $c$ `in_channels` and $h$ `image_size`.
        - Output: logits, $(B, C)$.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover: Recovering from Poisoning Attacks in Federated Learning using
          Historical Information, IEEE S&P 2023.

    Examples:
        >>> sum(p.numel() for p in CNN().parameters())
        139960
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        num_classes: int = 10,
        hidden: int = 100,
        lr: float = 0.1,
        image_size: int = 28,
    ) -> None:
        super().__init__(lr=lr)
        lr = self.lr
        in_channels = check_int("in_channels", in_channels, minimum=1)
        num_classes = check_int("num_classes", num_classes, minimum=2)
        hidden = check_int("hidden", hidden, minimum=1)
        image_size = check_int(
            "image_size", image_size, minimum=10, hint="use `MLP` for smaller images."
        )
        self.save_hyperparameters()
        side = ((image_size - 2) // 2 - 2) // 2
        self.layers = nn.Sequential(
            # ReLU and the maximum commute; after pooling, ReLU has a quarter of the values.
            nn.Conv2d(in_channels, 30, kernel_size=3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(30, 50, kernel_size=3),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(50 * side * side, hidden),
            nn.ReLU(),
            nn.Linear(hidden, num_classes),
        )
        self.initialize()
        # On a CPU, convolutions and pooling take half the time in this memory format.
        for layer in self.layers:
            layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.layers(x)
        return logits
