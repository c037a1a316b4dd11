"""A round in NumPy arrays, as stores take and give it; the loop has it as a `RoundRecord`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrec.exceptions import HistoryError, RoundNotFoundError, ShapeError
from fedrec.history.manifest import Manifest

__all__ = ["RoundArrays", "RoundIndex"]


@dataclass(frozen=True, kw_only=True)
class RoundIndex:
    """What a store knows of a round without reading its vectors.

    Args:
        round: Round $t$, 0-based.
        cohort: Clients that were asked, in order.
        refused: Clients that were asked and not used, with the reason.
        num_samples: Sizes of the clients whose updates were aggregated, in row order.
        bounds: For each of these clients whose update can be read, a number that no magnitude in
            it exceeds, in row order. There are fewer where the manifest's `keep` says so.

    Examples:
        >>> index = RoundIndex(
        ...     round=0, cohort=("a", "b", "c"), refused={"c": "silent"},
        ...     num_samples={"a": 10, "b": 20}, bounds={"b": 0.5},
        ... )
        >>> index.present, index.kept, index.lost
        (('a', 'b'), ('b',), ('a',))
    """

    round: int
    cohort: tuple[str, ...]
    refused: Mapping[str, str]
    num_samples: Mapping[str, int]
    bounds: Mapping[str, float]

    @property
    def present(self) -> tuple[str, ...]:
        """Clients whose updates were aggregated, in row order."""
        return tuple(self.num_samples)

    @property
    def kept(self) -> tuple[str, ...]:
        """Clients of `present` whose updates can be read, in row order."""
        return tuple(self.bounds)

    @property
    def lost(self) -> tuple[str, ...]:
        """Clients of `present` whose updates cannot be read, in row order."""
        return tuple(c for c in self.num_samples if c not in self.bounds)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundArrays:
    """`fedrec.types.RoundRecord` in NumPy, for code that must not import torch.

    Args:
        round: Round $t$, 0-based.
        global_weights: Global weights at the start of the round, shape $(d,)$, float32.
        client_ids: The $m$ clients whose updates were aggregated, in row order.
        updates: Their updates, shape $(m, d)$, float32.
        num_samples: Shape $(m,)$, int64.
        aggregate: What the aggregation rule returned, shape $(d,)$, float32.
        cohort: Clients that were asked, in order; empty means `client_ids`.
        refused: Clients that were asked and not used, with the reason.
        buffers: Averaged buffers after the round, shape $(b,)$, float32 or float64, or `None`.
        departure: Why the executor had left its plan by then, if it had.
        dropped: Clients of `client_ids` whose updates are not here, and not to be stored.
        encoded: The updates as the store has encoded them already, in row order, if it has.

    Examples:
        >>> arrays = RoundArrays(
        ...     round=0, global_weights=np.zeros(2, np.float32), client_ids=("a", "b"),
        ...     updates=np.array([[1, -2], [4, 5]], np.float32), num_samples=np.array([10, 20]),
        ...     aggregate=np.array([3, 4], np.float32),
        ... )
        >>> arrays.magnitudes(), arrays.select(["b"]).updates.tolist()
        ([2.0, 5.0], [[4.0, 5.0]])
    """

    round: int
    global_weights: NDArray[np.float32]
    client_ids: tuple[str, ...]
    updates: NDArray[np.float32]
    num_samples: NDArray[np.int64]
    aggregate: NDArray[np.float32]
    cohort: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    buffers: NDArray[np.floating[Any]] | None = None
    departure: Mapping[str, Any] | None = None
    dropped: frozenset[str] = frozenset()
    encoded: Sequence[Any] | None = None

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Clients whose updates are here, in row order."""
        return tuple(c for c in self.client_ids if c not in self.dropped)

    def copy(self) -> RoundArrays:
        """Return the round in memory of its own."""
        return replace(
            self,
            global_weights=self.global_weights.copy(),
            updates=self.updates.copy(),
            num_samples=self.num_samples.copy(),
            aggregate=self.aggregate.copy(),
            refused=dict(self.refused),
            buffers=None if self.buffers is None else self.buffers.copy(),
        )

    def select(self, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Return the round with these clients' updates alone, in this order, in memory of its own.

        Args:
            client_ids: Clients whose updates are here; `None` for all that were aggregated.

        Raises:
            RoundNotFoundError: If the update of one of them is not here.
        """
        asked = self.client_ids if client_ids is None else tuple(client_ids)
        row = {client_id: k for k, client_id in enumerate(self.row_ids)}
        missing = [c for c in asked if c not in row]
        if missing:
            raise RoundNotFoundError(
                f"Round {self.round} of the history has no update of {', '.join(missing[:10])}"
                f"{', ...' if len(missing) > 10 else ''}. HINT: ask for clients in "
                f"`index({self.round}).kept`."
            )
        place = {client_id: k for k, client_id in enumerate(self.client_ids)}
        return replace(
            replace(self, updates=self.updates[:0]).copy(),
            client_ids=asked,
            updates=self.updates[[row[c] for c in asked]],
            num_samples=self.num_samples[[place[c] for c in asked]],
            dropped=frozenset(),
        )

    def keep(self, client_ids: Collection[str]) -> RoundArrays:
        """Return the round, in memory of its own, without the updates of all other clients."""
        kept = [c for c in self.row_ids if c in client_ids]
        rows = [k for k, c in enumerate(self.row_ids) if c in client_ids]
        return replace(
            replace(self, updates=self.updates[:0]).copy(),
            updates=self.updates[rows],
            dropped=frozenset(self.client_ids).difference(kept),
        )

    def index(self, bounds: Mapping[str, float]) -> RoundIndex:
        """Return what is known of the round without its vectors.

        Args:
            bounds: As `RoundIndex` has them.
        """
        return RoundIndex(
            round=self.round,
            cohort=self.cohort or self.client_ids,
            refused=dict(self.refused),
            num_samples=dict(zip(self.client_ids, self.num_samples.tolist(), strict=True)),
            bounds=dict(bounds),
        )

    def check(self, manifest: Manifest, next_round: int) -> None:
        """Check that a store with this manifest may append the round.

        The numbers of updates are left to `magnitudes`.

        Raises:
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has a number that is not finite in a vector that is no update.
            ShapeError: If a shape or dtype differs from the manifest's.
        """
        if self.round != next_round:
            raise HistoryError(
                f"Expected round {next_round} to be written next, but got round {self.round}. "
                "HINT: write every round once, in order; `rounds()` says which are stored."
            )
        unknown = {*self.client_ids, *self.cohort, *self.refused} - set(manifest.clients)
        if unknown:
            raise HistoryError(
                f"Round {self.round} names clients that are not in the manifest: "
                f"{', '.join(sorted(unknown))}. HINT: a recording has the clients it began with."
            )
        for name, ids in (("client_ids", self.client_ids), ("cohort", self.cohort)):
            if len(set(ids)) != len(ids):
                raise HistoryError(f"Round {self.round} names a client twice in `{name}`: {ids}.")
        m, d, b = len(self.client_ids), manifest.num_parameters, manifest.num_buffers
        buffers = np.empty(0, manifest.buffer_dtype) if self.buffers is None else self.buffers
        for name, array, shape, dtype in (
            ("global_weights", self.global_weights, (d,), "float32"),
            ("updates", self.updates, (len(self.row_ids), d), "float32"),
            ("num_samples", self.num_samples, (m,), "int64"),
            ("aggregate", self.aggregate, (d,), "float32"),
            ("buffers", buffers, (b,), manifest.buffer_dtype),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise ShapeError(
                    f"Expected `{name}` of round {self.round} to be {dtype} of shape {shape}, "
                    f"but got {array.dtype} of shape {array.shape}."
                )
        for name, vector in (
            ("global_weights", self.global_weights),
            ("aggregate", self.aggregate),
            ("buffers", buffers),
        ):
            if not np.isfinite(vector).all():
                raise not_finite(self.round, f"`{name}`")

    def magnitudes(self) -> list[float]:
        """Return the largest magnitude of each update, by which numbers that are not finite show.

        Raises:
            HistoryError: If an update has one.
        """
        largest: list[float] = largest_magnitudes(self.updates).tolist()
        for client_id, magnitude in zip(self.row_ids, largest, strict=True):
            if not math.isfinite(magnitude):
                raise not_finite(self.round, f"the update of `{client_id}`")
        return largest


def not_finite(t: int, name: str) -> HistoryError:
    """Return the error for a number that is not finite in a part of round `t`."""
    return HistoryError(f"Round {t} has non-finite numbers in {name}.")


def largest_magnitudes(updates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the largest magnitude of each row: infinite or NaN if it has such a number.

    Shape:
        - `updates`: $(m, d)$, not empty.
        - Output: $(m,)$.
    """
    # Two reductions are cheaper than magnitudes, which are as large as the input.
    result: NDArray[np.float32] = np.maximum(updates.max(axis=1), -updates.min(axis=1))
    return result
