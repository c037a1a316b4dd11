"""Malicious clients are those in the smaller clusters of the features that tell clients apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.detectors.scores import ScoreDetector
from fedrec.functional.detection.two_means import two_means
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["Auror"]


class Auror(ScoreDetector):
    r"""Flags clients that are in the minority in most of the coordinates that show two groups.

    In every coordinate, 2-means cuts the clients into two clusters. A coordinate is *indicative* if
    the centres of the two are far apart, on average over the first `find_rounds` rounds. From then
    on, a client's score in a round is the fraction of the indicative coordinates in which it is in
    the cluster of fewer than half of the clients. Without any indicative coordinate nobody is
    suspicious.

    The distance is in units of the spread within the clusters, which makes one `alpha` serve models
    and rounds of any scale; the paper's is absolute, and chosen for a model. Forced upon normally
    distributed values, two clusters are 2.8 spreads apart on average with 100 clients, 3.2 with 20
    and 4 with 9. The method assumes iid data: a benign client whose data differ is in the minority,
    too.

    Args:
        alpha: Distance of the two centres from which a coordinate is indicative, in units of the
            spread within the clusters; above 0.
        find_rounds: Rounds in which the indicative coordinates are looked for.
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: $\tau$: above this fraction of the indicative coordinates a client is flagged.
        start_round: Rounds before this are not looked at.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Shen et al., Auror: Defending Against Poisoning Attacks in Collaborative Deep Learning
          Systems, ACSAC 2016.

    Examples:
        >>> Auror(alpha=4.0, find_rounds=5).find_rounds
        5
    """

    def __init__(
        self,
        *,
        alpha: float = 3.5,
        find_rounds: int = 10,
        window: int = 10,
        threshold: float = 0.5,
        start_round: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)
        self.alpha = check_float("alpha", alpha, minimum=0.0, open_minimum=True)
        self.find_rounds = check_int("find_rounds", find_rounds, minimum=1)

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: Not looked at.
        """
        super().reset(truth)
        self._separation: Tensor | None = None
        self._looked = 0
        self._indicative: Tensor | None = None

    def score(self, record: RoundRecord) -> Tensor:
        """Look for indicative coordinates, or count in how many a client is in the minority."""
        m = len(record.client_ids)
        nothing = torch.full((m,), torch.nan, dtype=torch.float64)
        if m < 2 or record.round < self.start_round:
            return nothing
        if self._indicative is None:
            self._look(record.sent)
            return nothing
        if len(self._indicative) == 0:
            return torch.zeros(m, dtype=torch.float64)
        upper = two_means(record.sent.narrowed(self._indicative).updates)[2]
        size = upper.sum(dim=0)
        minority = torch.where(size * 2 < m, upper, ~upper & (size * 2 > m)) & (size > 0)
        return minority.double().mean(dim=1).cpu()

    def _look(self, sent: CohortUpdates) -> None:
        separation = sent.by_columns(_separations)
        if self._separation is None:
            self._separation = torch.zeros_like(separation)
        self._separation += separation
        self._looked += 1
        if self._looked == self.find_rounds:
            mean = self._separation / self.find_rounds
            self._indicative = (mean >= self.alpha).nonzero()[:, 0]
            self._separation = None


def _separations(updates: Tensor) -> Tensor:
    """Return how far apart the two centres of each column are, in units of the spread."""
    distance, spread, _ = two_means(updates)
    # Clusters without any spread are as far apart as can be, unless their centres are the same.
    return torch.where(spread > 0, distance / spread, torch.where(distance > 0, 1e6, 0.0))
