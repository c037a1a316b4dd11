"""Several detectors vote."""

from __future__ import annotations

from collections.abc import Sequence

from fedrec._checks import check_int
from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import Detection, RoundRecord

__all__ = ["Ensemble"]


class Ensemble(Detector):
    """Flags the clients that enough of several detectors flag.

    A client's score is the fraction of the detectors that flag it. The decision is the first round
    in which anybody has enough votes. Every detector watches all rounds.

    Args:
        detectors: At least one detector, no object twice, not inside another ensemble either: it
            would see every round twice.
        votes: How many have to agree; `None` for more than half of them.

    Raises:
        ConfigurationError: If there is no detector, one object twice, or fewer than `votes`.

    Examples:
        >>> from fedrec.detectors import KnownMalicious
        >>> Ensemble([KnownMalicious(ids=["a"]), KnownMalicious(ids=["a", "b"])], votes=2).votes
        2
    """

    def __init__(self, detectors: Sequence[Detector], *, votes: int | None = None) -> None:
        detectors = tuple(detectors)
        if not detectors or not all(isinstance(d, Detector) for d in detectors):
            raise ConfigurationError(
                expected("detectors", "a list of one or more detectors", detectors)
            )
        everyone = [inner for detector in detectors for inner in _all_in(detector)]
        for i, detector in enumerate(everyone):
            if any(detector is other for other in everyone[:i]):
                hint = "construct it anew for a second vote."
                raise ConfigurationError(
                    expected("detectors", "different objects", detector, hint=hint)
                )
        if votes is not None:
            votes = check_int("votes", votes, minimum=1)
        if votes is not None and votes > len(detectors):
            requirement = f"at most the number of detectors, {len(detectors)}"
            raise ConfigurationError(expected("votes", requirement, votes))
        self.detectors = detectors
        self.votes = votes
        self.needs_updates = any(d.needs_updates for d in detectors)
        self._round: int | None = None

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: The clients that are malicious, for oracles among the detectors.
        """
        for detector in self.detectors:
            detector.reset(truth)
        self._round = None

    def observe(self, record: RoundRecord) -> None:
        """Show the round to every detector, and count."""
        for detector in self.detectors:
            detector.observe(record)
        if self._round is None and self._count()[0]:
            self._round = record.round

    def result(self) -> Detection:
        """Return who has enough votes."""
        malicious, votes = self._count()
        return Detection(
            malicious=malicious,
            seen=tuple(votes),
            round=self._round,
            scores={client: count / len(self.detectors) for client, count in votes.items()},
        )

    def _count(self) -> tuple[tuple[str, ...], dict[str, int]]:
        results = [detector.result() for detector in self.detectors]
        seen = sorted(set().union(*(result.seen for result in results)))
        votes = {client: sum(client in r.malicious for r in results) for client in seen}
        needed = len(self.detectors) // 2 + 1 if self.votes is None else self.votes
        return tuple(client for client, count in votes.items() if count >= needed), votes


def _all_in(detector: Detector) -> list[Detector]:
    """Return a detector and, of an ensemble, all in it."""
    inner = detector.detectors if isinstance(detector, Ensemble) else ()
    return [detector, *(part for member in inner for part in _all_in(member))]
