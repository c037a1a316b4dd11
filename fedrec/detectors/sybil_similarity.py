"""Malicious clients are those that pull in the same direction, round after round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrec.detectors._client_rows import ClientRows
from fedrec.detectors.scores import ScoreDetector
from fedrec.distributed.updates import gram_of
from fedrec.functional.cosine import cosines_of
from fedrec.functional.detection.outliers import modified_z_scores
from fedrec.types import CohortUpdates, RoundRecord

__all__ = ["SybilSimilarity"]

# Cosines are brought below 1 by this, so that twins are at a finite distance.
_TWINS = 1e-12


class SybilSimilarity(ScoreDetector):
    r"""Flags clients whose updates, summed over all rounds, are unusually like another client's.

    As in FoolsGold, $v_i = \max_{j \ne i} \cos(\sum_t g_i^t, \sum_t g_j^t)$ over the clients of the
    round, and fake identities of one attacker have $v_i$ near 1. FoolsGold turns $v_i$ into weights
    that suppose benign clients to be little alike; here a client's score is the modified z-score of
    $\operatorname{artanh}(v_i)$, so that the similarity of the other clients is what counts: iid
    clients resemble each other, too, but not as twins do.

    A single attacker has no twin and is not found. Sums keep what was added, so that a client that
    stands out by chance does so for long, hence the high threshold. Of 30 benign runs with 20
    clients (MNIST for 100 rounds, digits for 150, degrees of non-iid 0.1, 0.5 and 0.8, five seeds
    each) one run had two clients above 6; three runs had clients above 4, none above 8. On MNIST, 4
    attackers among 20 clients, all sending the same update, score 150 with iid data and 30 to 48 at
    a degree of non-iid of 0.5; attackers that only push the same way (Trim attack) score 19 with
    iid data and 2 at 0.5. Remembers one sum per client.

    Args:
        window: Rounds a client's score is averaged over; it is flagged after that many at the
            earliest.
        threshold: Above this average a client is flagged, in robust standard deviations.
        start_round: Rounds before this are not scored, but count for the sums.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020.

    Examples:
        >>> SybilSimilarity(window=5)
        SybilSimilarity(window=5, threshold=6.0, start_round=0)
    """

    def __init__(
        self,
        *,
        window: int = 10,
        threshold: float = 6.0,
        start_round: int = 0,
    ) -> None:
        super().__init__(window=window, threshold=threshold, start_round=start_round)

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: Not looked at.
        """
        super().reset(truth)
        self._sums = ClientRows()

    def score(self, record: RoundRecord) -> Tensor:
        """Add the updates to the sums, and standardise every client's largest similarity."""
        sums = record.sent.with_rows([self._added(sent) for sent in record.sent.shards().values()])
        if len(record.client_ids) == 1:
            return torch.full((1,), torch.nan)
        cosines = cosines_of(gram_of(sums)).cpu().double()
        largest = cosines.fill_diagonal_(-1).amax(dim=1)
        return modified_z_scores(torch.atanh(largest.clamp(-1 + _TWINS, 1 - _TWINS)))

    def _added(self, sent: CohortUpdates) -> Tensor:
        """Add updates to the sums of their clients; return these sums."""
        sums = self._sums.read(sent)[0] + sent.updates
        # One client whose sum overflows must not hide the others.
        limit = torch.finfo(sums.dtype).max
        sums.clamp_(-limit, limit)
        self._sums.write(sent, sums)
        return sums
