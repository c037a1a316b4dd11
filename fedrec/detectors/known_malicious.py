"""The detector that knows."""

from __future__ import annotations

from collections.abc import Sequence

from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import Detection, RoundRecord

__all__ = ["KnownMalicious"]


class KnownMalicious(Detector):
    """Flags clients named in advance, as soon as they take part.

    For experiments that leave detection out, and for verdicts from elsewhere.

    Args:
        ids: The clients to flag; `None` for those that really are malicious in the experiment.

    Raises:
        ConfigurationError: If `ids` is not a list of names.

    Examples:
        >>> KnownMalicious(ids=["client-03"]).result().malicious  # nobody was seen yet
        ()
    """

    needs_updates = False

    def __init__(self, *, ids: Sequence[str] | None = None) -> None:
        if ids is not None and (
            isinstance(ids, str) or not all(isinstance(client_id, str) for client_id in ids)
        ):
            raise ConfigurationError(expected("ids", "a list of client ids", ids))
        self.ids = None if ids is None else tuple(ids)
        self.reset()

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: The clients that are malicious, used if `ids` is `None`.
        """
        self._named = set(truth if self.ids is None else self.ids)
        self._seen: set[str] = set()
        self._round: int | None = None

    def observe(self, record: RoundRecord) -> None:
        """Note who takes part."""
        self._seen.update(record.client_ids, record.cohort)
        if self._round is None:
            self._round = record.round

    def result(self) -> Detection:
        """Return those of the named clients that were seen; decided in the first round."""
        return Detection(
            malicious=tuple(sorted(self._named & self._seen)),
            seen=tuple(sorted(self._seen)),
            round=self._round,
        )
