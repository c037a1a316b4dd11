"""Malicious clients are those whose updates point elsewhere."""

from __future__ import annotations

from torch import Tensor

from fedrec.detectors.scores import ScoreDetector
from fedrec.functional.aggregation.order_statistics import coordinate_median
from fedrec.functional.consistency import row_cosines
from fedrec.functional.detection.outliers import modified_z_scores
from fedrec.types import RoundRecord

__all__ = ["CosineOutlier"]


class CosineOutlier(ScoreDetector):
    r"""Flags clients whose updates point away from where most point.

    A client's score in a round is the modified z-score of $1 - \cos(g_i, \tilde g)$, $\tilde g$
    being the coordinate-wise median of the round's updates. Finds flipped signs and directed
    attacks; lengths do not matter.

    Args:
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: Above this average a client is flagged, in robust standard deviations.
        start_round: Rounds before this are not scored.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC 1993 (the z-score).

    Examples:
        >>> CosineOutlier(window=5)
        CosineOutlier(window=5, threshold=3.5, start_round=0)
    """

    def __init__(
        self,
        *,
        window: int = 10,
        threshold: float = 3.5,
        start_round: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)

    def score(self, record: RoundRecord) -> Tensor:
        """Standardise the cosine distances to the median."""
        median = record.sent.by_columns(coordinate_median)
        cosines = record.sent.measured(lambda sent: row_cosines(sent.updates, median))
        return modified_z_scores(1 - cosines)
