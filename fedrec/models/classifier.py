"""The base of the models: cross entropy, plain SGD, the papers' initial weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedrec._checks import check_float

__all__ = ["Classifier"]


class Classifier(pl.LightningModule, ABC):
    r"""A network trained with the mean cross entropy and plain SGD.

    A subclass builds its layers in `__init__`, calls `initialize` at its end, and writes `forward`.
    A federation's model need not be a `Classifier`: any LightningModule will do.

    Args:
        lr: Learning rate of SGD. With one local step it has no effect on a client's update, which
            then is the gradient itself.

    Shape:
        - Input: a batch of inputs of `forward`, samples first.
        - Output of `forward`: logits, $(B, C)$.

    Raises:
        ConfigurationError: If `lr` is not positive.

    Examples:
        >>> class Linear(Classifier):
        ...     def __init__(self, lr=0.1):
        ...         super().__init__(lr=lr)
        ...         self.layer = nn.Linear(4, 3)
        ...         self.initialize()
        ...     def forward(self, x):
        ...         return self.layer(x)
        >>> Linear()(torch.zeros(2, 4))
        tensor([[0., 0., 0.],
                [0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """

    def __init__(self, *, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = check_float("lr", lr, minimum=0.0, open_minimum=True)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""

    def initialize(self) -> None:
        r"""Draw initial weights as the reference code does: Xavier uniform, magnitude 2.24.

        Weights are uniform within $\pm\sqrt{2.24 / ((f_\mathrm{in} + f_\mathrm{out}) / 2)}$, where
        the fans of a convolution count its kernel's area; biases are 0.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                # Without a gain, `xavier_uniform_` has magnitude 3.
                nn.init.xavier_uniform_(module.weight, gain=math.sqrt(2.24 / 3))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of a batch, and log it as `loss`."""
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log `val_loss` and `val_ter`, the fraction of wrong predictions."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log `test_loss` and `test_ter`, the fraction of wrong predictions."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        x, y = batch
        logits = self(x)
        self.log(f"{stage}_loss", cross_entropy(logits, y))
        self.log(f"{stage}_ter", (logits.argmax(dim=1) != y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.lr)
