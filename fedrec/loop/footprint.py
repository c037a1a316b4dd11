"""Estimates of the memory that a run needs."""

from __future__ import annotations

from fedrec.history.manifest import FLOAT_BYTES

__all__ = ["num_bytes_text", "recording_bytes", "recovery_bytes"]

# Matrices of shape (m, d) that are in memory at once. In a recording: updates as computed, as
# attacked, being stored, in the store's transaction. In a recovery: read, read ahead, exact,
# estimated.
_MATRICES = 4


def recording_bytes(num_clients: int, num_parameters: int) -> int:
    """Return about how many bytes a recording takes besides model, data and one chunk of clients.

    It does not depend on the number of rounds.

    Args:
        num_clients: Clients of a round, $m$.
        num_parameters: $d$.

    Examples:
        >>> recording_bytes(num_clients=100, num_parameters=139_960)
        223936000
    """
    return FLOAT_BYTES * _MATRICES * num_clients * num_parameters


def recovery_bytes(num_clients: int, num_parameters: int, kept: int) -> int:
    """Return about how many bytes a recovery takes besides model, data and one chunk of clients.

    Args:
        num_clients: Clients of a round that remain, $m$.
        num_parameters: $d$.
        kept: Bytes that the recoverer keeps from round to round.
    """
    return recording_bytes(num_clients, num_parameters) + kept


def num_bytes_text(num_bytes: float) -> str:
    """Return a number of bytes as text, in decimal units.

    Examples:
        >>> num_bytes_text(223_936_000)
        '224 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
