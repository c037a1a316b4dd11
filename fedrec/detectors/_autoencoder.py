"""The autoencoder behind `UpdateAutoencoder`."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Autoencoder"]


class Autoencoder(pl.LightningModule):
    """Squeezes vectors through few numbers and back.

    Args:
        num_features: Length of the vectors.
        hidden: Width of the layer on either side.
        code: How many numbers.
        lr: Learning rate of Adam.
    """

    def __init__(self, *, num_features: int, hidden: int, code: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(
            nn.Linear(num_features, hidden), nn.ReLU(), nn.Linear(hidden, code)
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, hidden), nn.ReLU(), nn.Linear(hidden, num_features)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Reconstruct vectors, shape (N, p)."""
        result: Tensor = self.decoder(self.encoder(x))
        return result

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean squared error of the reconstruction."""
        return functional.mse_loss(self(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
