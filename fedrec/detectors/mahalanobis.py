"""Malicious clients are those far from the others, measured by how the others vary."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec._checks import check_choice, check_int
from fedrec.detectors.scores import ScoreDetector
from fedrec.distributed.updates import gram_of
from fedrec.functional.detection.outliers import (
    modified_z_scores,
    principal_projections,
    robust_distances,
)
from fedrec.functional.kernels._columns import column_mean, inner_products
from fedrec.random import torch_generator
from fedrec.types import RoundRecord

__all__ = ["Mahalanobis"]

_ZERO = 1e-9


class Mahalanobis(ScoreDetector):
    r"""Flags clients with a large robust Mahalanobis distance.

    The updates of a round are projected to few dimensions; there the minimum covariance determinant
    gives a mean and a covariance that outliers cannot bend. A client's score is the modified
    z-score of the logarithm of its distance.

    Args:
        num_components: Dimensions $k$. A round of $2k$ clients or fewer is not scored; false alarms
            are rare with more than $5k$ clients.
        projection: `"pca"` on the round's first principal components, or `"random"` on Gaussian
            directions, the same in every round.
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: Above this average a client is flagged, in robust standard deviations.
        start_round: Rounds before this are not scored.
        seed: Seed of directions and of the search for the smallest determinant.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Rousseeuw and Van Driessen, A Fast Algorithm for the Minimum Covariance Determinant
          Estimator, Technometrics 1999.

    Examples:
        >>> Mahalanobis(projection="random").projection
        'random'
    """

    def __init__(
        self,
        *,
        num_components: int = 2,
        projection: str = "pca",
        window: int = 10,
        threshold: float = 3.5,
        start_round: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)
        self.num_components = check_int("num_components", num_components, minimum=1)
        self.projection = check_choice("projection", projection, ["pca", "random"])
        self.seed = check_int("seed", seed, minimum=0)

    def score(self, record: RoundRecord) -> Tensor:
        """Project, then standardise the distances."""
        sent = record.sent
        if len(sent.client_ids) <= 2 * self.num_components:
            return torch.full((len(sent.client_ids),), torch.nan)
        if self.projection == "pca":
            points = principal_projections(gram_of(sent, column_mean), self.num_components)
        else:
            generator = torch_generator(self.seed, "mahalanobis")
            d = record.global_weights.numel()
            directions = torch.randn(self.num_components, d, generator=generator)
            directions = directions.to(record.global_weights.device)
            points = sent.measured(
                lambda sent: torch.stack([inner_products(sent.updates, v) for v in directions], 1)
            )
        # Distances of points outside of the best half have a long tail, which a logarithm shortens.
        return modified_z_scores(robust_distances(points, self.seed).clamp(min=_ZERO).log())
