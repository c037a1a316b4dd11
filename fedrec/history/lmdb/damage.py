"""Damage: a part of a history that is not as it was written."""

from __future__ import annotations

from dataclasses import dataclass

from fedrec.exceptions import HistoryCorruptedError

__all__ = ["Damage", "DamagedRecordError"]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A part of a history that is not as it was written.

    Args:
        part: Which part: a client, the global weights, the aggregate, the buffers, the round
            record, or the file.
        reason: What is wrong with it.
        round: Round it belongs to, or `None` if it is of the history as a whole.
        client_id: Client whose update it is, or `None`.

    Examples:
        >>> print(Damage(part="client `a`", reason="they are missing", round=3, client_id="a"))
        round 3, client `a`: they are missing
    """

    part: str
    reason: str
    round: int | None = None
    client_id: str | None = None

    def __str__(self) -> str:
        where = self.part if self.round is None else f"round {self.round}, {self.part}"
        return f"{where}: {self.reason}"


class DamagedRecordError(HistoryCorruptedError):
    """A record is not the one that was written.

    Args:
        history: How errors name the history.
        damage: Which record, and what is wrong with it.
    """

    def __init__(self, history: str, damage: Damage) -> None:
        super().__init__(history, damage)
        self.history = history
        self.damage = damage

    def __str__(self) -> str:
        return (
            f"History `{self.history}`, {self.damage}. HINT: restore the history from a copy, or "
            f"drop what is damaged with `fedrec history repair {self.history}`; what is whole can "
            "still be read."
        )
