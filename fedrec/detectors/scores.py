"""What detectors by scores share: averaging over rounds, flagging, the verdict."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.detectors.base import Detector
from fedrec.types import Detection, RoundRecord

__all__ = ["ScoreDetector"]


class ScoreDetector(Detector):
    """Base of the detectors that score the clients of every round.

    Write `score`. With `record.sent.measured` or `by_columns` in place of `record.updates`, updates
    need not be sent to all devices of a run.

    A client's score is the mean over the last `window` rounds it was scored in; once
    it has been scored in `window` rounds, a client above `threshold` is flagged, and stays so.
    Clients that come and go, or come late, are judged by the rounds they took part in. The
    decision is the first round in which anybody is flagged.

    Args:
        window: Rounds a client's score is averaged over, at least 1.
        threshold: Above this, a client is flagged.
        start_round: Rounds before this are not scored.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> class FirstEntry(ScoreDetector):
        ...     "Suspects clients by the first entry of their updates."
        ...     def score(self, record):
        ...         return record.updates[:, 0]
        >>> FirstEntry(threshold=2.0).result()
        Detection(malicious=(), seen=(), round=None, scores={})
    """

    #: Whether scores far below zero are suspicious, too.
    two_sided: bool = False

    def __init__(
        self,
        *,
        window: int = 10,
        threshold: float = 3.5,
        start_round: int = 0,
    ) -> None:
        self.window = check_int("window", window, minimum=1)
        self.threshold = check_float("threshold", threshold, minimum=0.0)
        self.start_round = check_int("start_round", start_round, minimum=0)
        self.reset()

    @abstractmethod
    def score(self, record: RoundRecord) -> Tensor:
        """Score the clients of a round; called for every round, in order.

        Args:
            record: The round, its clients sorted by id; its memory may be reused after the call.

        Returns:
            Shape $(m,)$, larger is more suspicious; NaN for a client that cannot be scored.
        """

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: Not looked at.
        """
        self._seen: set[str] = set()
        self._recent: dict[str, deque[float]] = {}
        self._flagged: dict[str, float] = {}
        self._round: int | None = None
        self._rounds: dict[int, dict[str, float]] = {}

    def observe(self, record: RoundRecord) -> None:
        """Score the round's clients and flag those that have become too suspicious."""
        self._seen.update(record.client_ids, record.cohort)
        # Sums do not depend on the order in which clients answered.
        record = record.select(tuple(sorted(record.client_ids)))
        values = self.score(record).tolist()
        if record.round < self.start_round:
            return
        scored = {c: v for c, v in zip(record.client_ids, values, strict=True) if v == v}
        if scored:
            self._rounds[record.round] = scored
        for client, value in scored.items():
            recent = self._recent.setdefault(client, deque(maxlen=self.window))
            recent.append(value)
            if client not in self._flagged and len(recent) == self.window:
                mean = self._mean(recent)
                if mean > self.threshold:
                    self._flagged[client] = mean
                    self._round = record.round if self._round is None else self._round

    def result(self) -> Detection:
        """Return the verdict so far; the score of a flagged client is the one that flagged it."""
        scores = {c: self._mean(recent) for c, recent in self._recent.items()}
        return Detection(
            malicious=tuple(sorted(self._flagged)),
            seen=tuple(sorted(self._seen)),
            round=self._round,
            scores={c: (scores | self._flagged)[c] for c in sorted(scores)},
            round_scores=dict(self._rounds),
        )

    def _mean(self, recent: deque[float]) -> float:
        mean = sum(recent) / len(recent)
        return abs(mean) if self.two_sided else mean
