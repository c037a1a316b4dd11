"""RFLBAT."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.aggregators.base import Aggregator
from fedrec.functional.aggregation.means import mean_of_rows
from fedrec.functional.aggregation.plane_clusters import gap_clusters
from fedrec.functional.cosine import cosine_similarities
from fedrec.functional.detection.outliers import principal_coordinates
from fedrec.types import RoundContext

__all__ = ["RFLBAT"]


class RFLBAT(Aggregator):
    r"""Averages the cluster of clients that are least alike, without outliers, in a plane.

    1. Updates are projected on their first two principal components.
    2. Outliers are left out: clients whose sum of distances to all others in that plane is more
       than $\epsilon_1$ times the median sum.
    3. The others are clustered by k-means, into as many clusters as the gap statistic finds
       ([`gap_clusters`][fedrec.functional.gap_clusters]).
    4. Attackers share a trigger, so they are more alike than benign clients are: of the clusters
       with at least two clients, the one whose median of mean cosine similarities (of whole
       updates, within the cluster) is smallest is kept.
    5. Outliers of that cluster are left out as in 2, with $\epsilon_2$, and the others averaged.

    Client weights are ignored.

    Args:
        outlier_factor: $\epsilon_1 > 0$.
        cluster_factor: $\epsilon_2 > 0$.
        max_clusters: Largest number of clusters that is tried.

    Shape:
        - `updates`: $(m, d)$, one client update per row.
        - Output: $(d,)$, dtype and device of `updates`. It is zero, with a `FedrecWarning`, if
          nobody is left.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Wang et al., RFLBAT: A Robust Federated Learning Algorithm against Backdoor Attack, arXiv
          2201.03772, 2022.

    Examples:
        >>> benign = torch.rand(8, 4, generator=torch.Generator().manual_seed(0)) - 0.5
        >>> rule = RFLBAT()
        >>> result = rule(torch.cat([benign, 6.0 + 0.1 * benign[:4]]))
        >>> torch.allclose(result, benign.mean(dim=0))
        True
    """

    def __init__(
        self,
        *,
        outlier_factor: float = 10.0,
        cluster_factor: float = 4.0,
        max_clusters: int = 10,
    ) -> None:
        self.outlier_factor = check_float(
            "outlier_factor", outlier_factor, minimum=0, open_minimum=True
        )
        self.cluster_factor = check_float(
            "cluster_factor", cluster_factor, minimum=0, open_minimum=True
        )
        self.max_clusters = check_int("max_clusters", max_clusters, minimum=1)

    def aggregate(
        self,
        updates: Tensor,
        client_weights: Tensor | None = None,
        ctx: RoundContext | None = None,
    ) -> Tensor:
        """Average the cluster that is least alike."""
        points = principal_coordinates(updates, min(2, len(updates)))
        # The sign of a principal component is arbitrary, and depends on the order of clients.
        largest = points.gather(0, points.abs().argmax(dim=0, keepdim=True))
        points = points * largest.sign()
        rows = torch.arange(len(updates))
        rows = rows[_within(points, self.outlier_factor)]
        if len(rows):
            labels = gap_clusters(points[rows], self.max_clusters)
            rows = rows[labels == _least_alike(updates[rows.to(updates.device)], labels)]
            rows = rows[_within(points[rows], self.cluster_factor)]
        if not len(rows):
            return self._no_effect(f"leaves out all of {len(updates)} updates", updates)
        return mean_of_rows(updates, rows)


def _within(points: Tensor, factor: float) -> Tensor:
    """Return who is no outlier by the sum of distances to all others, shape (m,), bool."""
    sums: Tensor = torch.linalg.vector_norm(points[:, None] - points, dim=2).sum(dim=1)
    return sums <= factor * sums.quantile(0.5)


def _least_alike(updates: Tensor, labels: Tensor) -> int:
    """Return the cluster whose members' median of mean cosine similarities is smallest."""
    cosines = cosine_similarities(updates).cpu()
    medians = []
    for label in range(int(labels.max()) + 1):
        inside = labels == label
        alike = cosines[inside][:, inside].mean(dim=1).quantile(0.5)
        medians.append(float(alike) if int(inside.sum()) > 1 else 1.0)
    return medians.index(min(medians))
