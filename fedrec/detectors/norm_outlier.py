"""Malicious clients are those whose updates are unusually large."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_bool
from fedrec.detectors.scores import ScoreDetector
from fedrec.functional.detection.outliers import modified_z_scores
from fedrec.functional.distances import squared_norms
from fedrec.types import RoundRecord

__all__ = ["NormOutlier"]


class NormOutlier(ScoreDetector):
    r"""Flags clients whose updates are longer than those of most.

    A client's score in a round is the modified z-score of $\lVert g_i \rVert$ among the round's
    clients. Finds scaled updates and large noise; attacks that keep to the usual length, and any
    attack by half of the clients or more, pass.

    Args:
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: Above this average a client is flagged, in robust standard deviations.
        two_sided: Whether unusually short updates are suspicious, too.
        start_round: Rounds before this are not scored.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC 1993.

    Examples:
        >>> import torch
        >>> from fedrec.types import CohortUpdates
        >>> updates = torch.tensor([[3.0], [-4.0], [5.0], [4.5], [-60.0]])
        >>> detector = NormOutlier(window=1)
        >>> detector.observe(
        ...     RoundRecord(
        ...         round=0,
        ...         global_weights=torch.zeros(1),
        ...         sent=CohortUpdates(
        ...             client_ids=tuple("abcde"),
        ...             updates=updates,
        ...             num_samples=torch.ones(5, dtype=torch.int64),
        ...         ),
        ...         aggregate=torch.zeros(1),
        ...     )
        ... )
        >>> detector.result().malicious
        ('e',)
    """

    def __init__(
        self,
        *,
        window: int = 10,
        threshold: float = 3.5,
        two_sided: bool = False,
        start_round: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)
        self.two_sided = check_bool("two_sided", two_sided)

    def score(self, record: RoundRecord) -> Tensor:
        """Standardise the norms."""
        norms = record.sent.measured(lambda sent: squared_norms(sent.updates).sqrt())
        return modified_z_scores(norms)
