"""An aggregation rule and data of my own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedrec import Aggregator
from fedrec.data import FederatedDataModule
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import RoundContext


class MedianLength(Aggregator):
    """The mean of the updates, after long ones were shortened.

    Args:
        factor: No update counts as longer than this many times the median length; at least 1.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$.
    """

    def __init__(self, *, factor: float = 1.0) -> None:
        if factor < 1:
            raise ConfigurationError(expected("factor", "a number of at least 1", factor))
        self.factor = factor

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Return what the server subtracts from the global weights, times its learning rate."""
        lengths = updates.norm(dim=1, keepdim=True)
        longest = self.factor * lengths.median()
        shortened: Tensor = updates * (longest / lengths.clamp(min=1e-12)).clamp(max=1.0)
        return shortened.mean(dim=0)


class Measurements(FederatedDataModule):
    """Three kinds of made-up plants, by four measurements: 240 rows of measurements.csv."""

    def load(self) -> tuple[TensorDataset, TensorDataset]:
        """Return training and test data, the same ones in every process."""
        file = Path(__file__).with_name("measurements.csv")
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.float32))
        x, y = rows[:, :-1], rows[:, -1].long()
        x = (x - x.mean(dim=0)) / x.std(dim=0)
        test = torch.arange(len(y)) % 4 == 0
        return TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test])
