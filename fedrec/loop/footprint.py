"""How much memory a run is going to need, told before it starts."""

from __future__ import annotations

from fedrec.history.manifest import FLOAT_BYTES

__all__ = ["num_bytes_text", "recording_bytes", "recovery_bytes"]

# Matrices of one row per client: computed, attacked, being stored, and in the store's transaction;
# in a recovery: read, read ahead, asked for, estimated.
_MATRICES = 4


def recording_bytes(num_clients: int, num_parameters: int) -> int:
    """Return about how many bytes a recording takes besides model, data and one chunk of clients.

    The number of rounds has no influence.

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
    """Return a number of bytes for people, in decimal units.

    Examples:
        >>> num_bytes_text(223_936_000)
        '224 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
