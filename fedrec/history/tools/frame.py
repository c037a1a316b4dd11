"""A history as a data frame: what each client sent in each round, in a few figures."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedrec._frames import categories, data_frame

if TYPE_CHECKING:
    import pandas as pd

    from fedrec.history.base import HistoryStore

__all__ = ["UpdateFigures", "history_frame", "update_figures"]

# Numbers of updates that are in memory at a time: 64 MB of float32.
_MOST = 1 << 24

_COLUMNS: dict[str, Any] = {
    "round": np.int64,
    "client_id": np.int64,
    "num_samples": np.int64,
    "norm": np.float64,
    "max_abs": np.float64,
    "cosine": np.float64,
    "malicious": np.bool_,
    "refused": object,
}


def history_frame(
    history: HistoryStore,
    rounds: Iterable[int] | None = None,
    client_ids: Collection[str] | None = None,
) -> pd.DataFrame:
    """Return one row per round and client that was asked, see `HistoryStore.to_pandas`.

    Args:
        history: The history.
        rounds: Rounds to read; `None` for all.
        client_ids: Clients to read; `None` for all.
    """
    manifest = history.manifest
    names = tuple(manifest.clients)
    place, malicious = {c: i for i, c in enumerate(names)}, frozenset(manifest.malicious)
    wanted = frozenset(names if client_ids is None else client_ids)
    rows: list[tuple[Any, ...]] = []
    for t in history.rounds() if rounds is None else rounds:
        index = history.index(t)
        kept = [c for c in index.kept if c in wanted]
        figures = update_figures(history, t, kept).by_client
        for client in index.cohort:
            if client in wanted:
                samples = index.num_samples.get(client, manifest.clients[client])
                figure = figures.get(client, (np.nan, np.nan, np.nan))
                truth, refused = client in malicious, index.refused.get(client)
                rows.append((t, place[client], samples, *figure, truth, refused))
    columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * len(_COLUMNS)
    frame = {
        name: np.array(column, dtype)
        for (name, dtype), column in zip(_COLUMNS.items(), columns, strict=True)
    }
    return data_frame({**frame, "client_id": categories(frame["client_id"], names)})


class UpdateFigures(NamedTuple):
    """Figures of updates of a round.

    Attributes:
        by_client: Norm, largest magnitude, and cosine to the aggregate.
        aggregate: Norm of the aggregate, `None` without any client.
    """

    by_client: dict[str, tuple[float, float, float]]
    aggregate: float | None


def update_figures(history: HistoryStore, t: int, client_ids: list[str]) -> UpdateFigures:
    """Return figures of clients' updates in a round; few updates are in memory at a time.

    Args:
        history: The history.
        t: Round, 0-based.
        client_ids: Clients whose updates of the round can be read.
    """
    at_once = max(1, _MOST // history.manifest.num_parameters)
    found: dict[str, tuple[float, float, float]] = {}
    length: float | None = None
    for start in range(0, len(client_ids), at_once):
        part = client_ids[start : start + at_once]
        length, figures = _figures(history, t, part)
        found |= zip(part, figures, strict=True)
    return UpdateFigures(found, length)


def _figures(
    history: HistoryStore, t: int, client_ids: list[str]
) -> tuple[float, list[tuple[float, float, float]]]:
    """Return the norm of the aggregate, and the figures of clients."""
    arrays = history.read(t, client_ids)
    aggregate = arrays.aggregate.astype(np.float64)
    length = float(np.linalg.norm(aggregate))
    figures = []
    for row in arrays.updates:
        update = row.astype(np.float64)
        norm = float(np.linalg.norm(update))
        product = norm * length
        cosine = float(update @ aggregate) / product if product else float("nan")
        figures.append((norm, float(np.abs(update).max()), min(max(cosine, -1.0), 1.0)))
    return length, figures
