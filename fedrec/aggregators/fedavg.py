"""Federated averaging."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_bool
from fedrec.aggregators.base import Aggregator
from fedrec.functional.aggregation.means import shares, weighted_mean
from fedrec.types import RoundContext

__all__ = ["FedAvg"]


class FedAvg(Aggregator):
    r"""The mean of the client updates, weighted by the clients' sizes.

    $$\sum_{i=1}^m \frac{n_i}{\sum_k n_k} g_i$$

    Not robust: a single malicious client can move it anywhere.

    Args:
        weighted: Weight clients by `client_weights` ($n_i$, their number of samples); `False` for
            the plain mean.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`.

    Raises:
        ConfigurationError: If `weighted` is not a bool.

    References:
        - McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized
          Data, AISTATS 2017.

    Examples:
        >>> import torch
        >>> updates, sizes = torch.tensor([[1.0], [4.0]]), torch.tensor([200, 100])
        >>> FedAvg()(updates, sizes)
        tensor([2.])
        >>> FedAvg(weighted=False)(updates, sizes)
        tensor([2.5000])
    """

    def __init__(self, *, weighted: bool = True) -> None:
        self.weighted = check_bool("weighted", weighted)

    def coefficients(self, client_weights: Tensor) -> Tensor:
        """Every client's share."""
        if not self.weighted:
            client_weights = torch.ones_like(client_weights)
        return shares(client_weights, client_weights)

    needs = "sums"

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average."""
        return weighted_mean(updates, client_weights if self.weighted else None)
