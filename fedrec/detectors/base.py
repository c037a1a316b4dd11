"""The abstract detector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fedrec.component import Component
from fedrec.exceptions import ConfigurationError
from fedrec.types import Detection, RoundRecord

if TYPE_CHECKING:
    from fedrec.history.base import HistoryStore

__all__ = ["Detector"]


class Detector(Component, ABC):
    """Finds malicious clients from what the server sees, online or from a stored history.

    Write `observe` and `result`, and `reset` if there is state. A detector judges; whether its
    decision ends the recording is for `FederatedLoop.record(stop_on_detection=)` to say.

    Examples:
        >>> class Loudest(Detector):
        ...     "Flags whoever sent the largest update so far."
        ...     def __init__(self):
        ...         self.reset()
        ...     def reset(self, truth=()):
        ...         self.norms = {}
        ...     def observe(self, record):
        ...         for client, row in zip(record.client_ids, record.updates):
        ...             self.norms[client] = max(self.norms.get(client, 0.0), float(row.norm()))
        ...     def result(self):
        ...         worst = max(self.norms, key=self.norms.get)
        ...         return Detection(malicious=(worst,), seen=tuple(sorted(self.norms)), round=0)
    """

    #: Whether `observe` looks at the updates; if not, the detector works on any history, whichever
    #: updates it kept.
    needs_updates: bool = True

    @abstractmethod
    def observe(self, record: RoundRecord) -> None:
        """Look at one round; called once per round, in order.

        Args:
            record: The round as the server stores it; must not be changed.
        """

    @abstractmethod
    def result(self) -> Detection:
        """Return the verdict so far; `Detection.round` is `None` while there is no decision."""

    def reset(self, truth: Sequence[str] = ()) -> None:
        """Forget everything observed.

        Args:
            truth: The clients that are malicious; only oracles look at it.
        """

    def detect(self, history: HistoryStore, truth: Sequence[str] | None = None) -> Detection:
        """Replay a history and return the verdict, as if the detector had watched it live.

        Args:
            history: The recording.
            truth: The clients that are malicious, for oracles; by default as recorded.

        Returns:
            The verdict after the last round.

        Raises:
            ConfigurationError: If the detector needs updates that the history did not keep, or
                does not return a verdict on clients of the recording.
        """
        self.reset(history.manifest.malicious if truth is None else truth)
        keep = history.manifest.keep
        for t in history.rounds():
            if keep and self.needs_updates and history.index(t).lost:
                raise ConfigurationError(
                    f"{type(self).__name__} needs the updates of every round, but the history did "
                    f"not keep all of round {t} (keep={dict(keep)}). HINT: let it watch the "
                    "recording (`detector=`, in a recipe with `stop_on_detection: true`), or "
                    "record with all updates."
                )
            self.observe(history.read_round(t, None if self.needs_updates else ()))
        return verdict(self, history.manifest.clients)


def verdict(detector: Detector, clients: Collection[str]) -> Detection:
    """Return a detector's result.

    Args:
        detector: The detector.
        clients: Clients that may be flagged.

    Raises:
        ConfigurationError: If it is not a `Detection`, or flags others.
    """
    method, found = f"{type(detector).__name__}.result", detector.result()
    if not isinstance(found, Detection):
        raise ConfigurationError(
            f"Expected {method} to return a Detection, but got {type(found).__name__}."
        )
    unknown = sorted(set(found.malicious).difference(clients))
    if unknown:
        raise ConfigurationError(
            f"Expected {method} to flag clients of the recording, but it flags {unknown[:10]}."
        )
    return found
