"""The history on disk, in shards: several processes write and read it, each its own clients."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrec.distributed.sharding import Sharding
from fedrec.exceptions import HistoryError, HistoryFormatError
from fedrec.history.base import HistoryStore
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.encoded import EncodedUpdates
from fedrec.history.lmdb.environment import DATA
from fedrec.history.lmdb.history import LMDBHistory
from fedrec.history.lmdb.lock import WriterLock
from fedrec.history.lmdb.records import StoredManifest
from fedrec.history.lmdb.shards import (
    SHARD,
    ShardSnapshots,
    damage_of_shard,
    missing,
    mixed,
    of_shard,
    of_whole,
    require_repaired,
    shard_folder,
    shard_folders,
    shards_of,
)
from fedrec.history.lmdb.space import require_room_for_all
from fedrec.history.lmdb.writing import Row
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundArrays, RoundIndex

if TYPE_CHECKING:
    from torch import Tensor

    from fedrec.distributed.ranks import Ranks
    from fedrec.types import RoundRecord

__all__ = ["ShardedHistory"]

_log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """What a process sees of a shard."""

    num_shards: int
    store_id: str
    num_clients: int
    num_rounds: int


class _Opened(NamedTuple):
    """A recording, and the shards of it that this process has."""

    recording: StoredManifest
    sharding: Sharding
    shards: dict[int, LMDBHistory]


class _Bounds(NamedTuple):
    """Bounds of the updates in the rounds that were stored when the ranks met.

    Attributes:
        values: Of each rank, those of its clients in row order, one round after the other; NaN
            where an update is not stored.
        starts: Where each round begins in them, shape (rounds + 1, ranks).
    """

    values: list[NDArray[np.float64]]
    starts: NDArray[np.int64]


class ShardedHistory(HistoryStore):
    """The history in a directory, in one LMDB file for each shard of the clients.

    Clients belong to shards: blocks of equal size, in the order of the manifest. Several processes
    (`FederatedLoop(devices=4)`) share the shards out among them: each writes and reads the updates
    of its own clients alone, on a disk of its own if need be. One process reads and writes all of
    them. How many shards there are is fixed when the recording begins (`num_shards` in the
    execution plan of its manifest) and does not depend on the number of processes.

    Each shard is a history like `LMDBHistory`, in `shard-000`, `shard-001`, and so on: it has all
    rounds with all that is known of them, and of the updates those of its own clients. A round
    counts when all shards have it. What some have beyond it, after a crash, is dropped when the
    history is written to again, and the log says so.

    Args:
        path: Directory of the shards; it is made when a recording begins.
        codec: How client updates are stored, as in `LMDBHistory`.
        keep: Which client updates are stored, as in `LMDBHistory`.
        map_size: Most bytes that a shard may ever take, as in `LMDBHistory`.
        master_key: Where the master key of an encrypted history comes from, as in `LMDBHistory`.
        sync_every: When a round waits for the disk, as in `LMDBHistory`.

    Attributes:
        path: As given; so are `codec`, `keep`, `map_size`, `master_key` and `sync_every`.

    Raises:
        ConfigurationError: If an argument is not one that `LMDBHistory` takes.

    Examples:
        >>> import os, tempfile, torch
        >>> from fedrec.types import CohortUpdates, RoundRecord
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={"class_path": "fedrec.aggregators.FedAvg", "init_args": {}},
        ...     server_lr=0.1, max_rounds=1, execution={"num_shards": 2},
        ... )
        >>> record = RoundRecord(
        ...     round=0, global_weights=torch.zeros(2), aggregate=torch.tensor([3.0, 4.0]),
        ...     sent=CohortUpdates(
        ...         client_ids=("a", "b"), updates=torch.tensor([[1.0, 2.0], [4.0, 5.0]]),
        ...         num_samples=torch.tensor([10, 20]),
        ...     ),
        ... )
        >>> with tempfile.TemporaryDirectory() as path, ShardedHistory(path) as history:
        ...     history.begin(manifest)
        ...     history.write_round(record)
        ...     print(sorted(os.listdir(path)))
        ...     history.rounds(), history.read_round(0, ["b"]).updates
        ['shard-000', 'shard-001']
        (range(0, 1), tensor([[4., 5.]]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        codec: str | None = None,
        keep: Mapping[str, Any] | None = None,
        map_size: int | None = None,
        master_key: str | None = None,
        sync_every: int = 1,
    ) -> None:
        self._stores: dict[int, LMDBHistory] = {}
        example = LMDBHistory(  # checks them
            path,
            codec=codec,
            keep=keep,
            map_size=map_size,
            master_key=master_key,
            sync_every=sync_every,
        )
        self.path = example.path
        self.codec, self.keep, self.map_size = example.codec, example.keep, example.map_size
        self.master_key, self.sync_every = example.master_key, example.sync_every
        self._directory = self.path.absolute()
        self._encoded = EncodedUpdates()
        self._forget_what_was_found()

    def _forget_what_was_found(self) -> None:
        self._ranks: Ranks | None = None
        self._opened: _Opened | None = None
        self._bounds: _Bounds | None = None
        self._most: int | None = None  # rounds that all ranks have, until the others are dropped
        self._is_even = False  # whether own shards have the same rounds, and we may write

    def require_writers(self, ranks: Ranks) -> None:
        """Take any number of processes: each writes shards of its own."""

    def attach(self, ranks: Ranks) -> None:
        """Share the shards out among the processes of a run; called by all of them at once.

        A process has its own shards afterwards, and knows of the others' updates in the rounds
        that are stored by now how large they are (`index`). It returns a round with
        `ShardedUpdates`, the rows of its own shards among them (`read_round`).

        Args:
            ranks: The processes.

        Raises:
            HistoryFormatError: If a shard is missing where its rank looks for it, or the shards
                are not of one recording.
            ConfigurationError: If there are fewer shards than processes.
            HistoryError: If a shard cannot be read; in all processes.
            RankError: If another process has left, or does not answer in time.
        """
        self.close()
        self._forget_what_was_found()
        self._ranks = ranks
        state = self._state(ranks.each(self._scan))
        if state is None:
            return
        num_shards, num_rounds = state
        lists = ranks.each(lambda: self._enter(num_shards))
        recording = self._open().recording
        for forgotten, pending in lists:
            recording.forgotten |= {
                c: when for c, when in forgotten if c not in recording.forgotten
            }
            recording.pending += tuple(c for c in pending if c not in recording.pending)
        if ranks.size > 1:
            self._most = num_rounds
            gathered = ranks.each(self._own_bounds)
            self._bounds = _Bounds([values for values, _ in gathered], gathered[0][1])

    def _scan(self) -> dict[int, _Found]:
        """Return what there is of each shard that is in the directory.

        Raises:
            HistoryError: If one cannot be read, or something else is there.
        """
        if (self._directory / DATA).exists():
            raise HistoryFormatError(
                f"`{self.path}` holds a history in one file, not in shards. HINT: open it with "
                "`LMDBHistory`, or make shards of it with "
                f"`fedrec history shard {self.path} NEW --shards 8`."
            )
        require_repaired(self._directory)
        found = {}
        for shard, folder in shard_folders(self._directory).items():
            store = self._store(shard)
            manifest = store.manifest
            if manifest.execution.get(SHARD) != shard:
                raise HistoryFormatError(
                    f"`{folder}` holds a history that is not shard {shard} of another. HINT: check "
                    "the path."
                )
            found[shard] = _Found(
                num_shards=shards_of(manifest),
                store_id=manifest.store_id,
                num_clients=len(manifest.clients),
                num_rounds=len(store.rounds()),
            )
        return found

    def _state(self, found: Sequence[Mapping[int, _Found]]) -> tuple[int, int] | None:
        """Return the number of shards and of rounds, given what each rank has found.

        Returns:
            `None` if nothing was recorded. So it is where not all shards could be made, when a
            recording began, and none has a round.

        Raises:
            HistoryFormatError: If a shard is missing, or they are not of one recording.
            ConfigurationError: If there are fewer shards than ranks.
        """
        seen = [shard for shards in found for shard in shards.values()]
        if not seen:
            return None
        has_rounds = any(shard.num_rounds for shard in seen)
        if len({shard[:2] for shard in seen}) > 1:
            if not has_rounds:
                return None
            raise mixed(self.path)
        num_shards, clients = seen[0].num_shards, tuple(map(str, range(seen[0].num_clients)))
        sharding = Sharding(client_ids=clients, num_shards=num_shards, size=len(found))
        own = {shard: found[sharding.owner(shard)].get(shard) for shard in range(num_shards)}
        absent = [shard for shard, one in own.items() if one is None]
        if absent and has_rounds:
            ranks = ", ".join(map(str, sorted({sharding.owner(shard) for shard in absent})))
            where = f" where rank {ranks} looks for it" if len(found) > 1 else ""
            raise missing(self.path, absent, num_shards, where)
        if absent:
            return None
        return num_shards, min(one.num_rounds for one in own.values() if one is not None)

    def _enter(self, num_shards: int) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        """Open own shards; return who was forgotten in them when, and who is being forgotten."""
        rank, size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        manifest = of_whole(next(iter(self._stores.values())).manifest)
        sharding = Sharding(
            client_ids=tuple(manifest.clients), num_shards=num_shards, rank=rank, size=size
        )
        shards = {shard: self._store(shard) for shard in sharding.own}
        for shard, store in self._stores.items():
            if shard not in shards:
                store.close()
        recording = StoredManifest(str(self.path), manifest)
        for store in shards.values():
            with store.snapshot() as snapshot:
                recording.keys = snapshot.recording.keys
                recording.forgotten |= snapshot.recording.forgotten
                new = [c for c in snapshot.recording.pending if c not in recording.pending]
                recording.pending += tuple(new)
        self._stores, self._opened = shards, _Opened(recording, sharding, shards)
        return list(recording.forgotten.items()), recording.pending

    def _own_bounds(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return bounds of own clients' updates, as `_Bounds` has them, and where rounds begin."""
        sharding = self._open().sharding
        rank_of = {c: sharding.owner(sharding.shard_of(c)) for c in sharding.client_ids}
        values: list[float] = []
        starts = np.zeros((len(self.rounds()) + 1, sharding.size), np.int64)
        for t in self.rounds():
            with self.snapshot() as snapshots:
                index = snapshots.index(t)
            ranks = [rank_of[c] for c in index.present]
            starts[t + 1] = starts[t] + np.bincount(ranks, minlength=sharding.size)
            present = zip(index.present, ranks, strict=True)
            values += [
                index.bounds.get(c, math.nan) for c, rank in present if rank == sharding.rank
            ]
        return np.array(values), starts

    @property
    def _has_others(self) -> bool:
        return self._ranks is not None and self._ranks.size > 1

    def _store(self, shard: int) -> LMDBHistory:
        store = self._stores.get(shard)
        if store is None:
            store = self._stores[shard] = LMDBHistory(
                shard_folder(self._directory, shard),
                codec=self.codec,
                keep=self.keep,
                map_size=self.map_size,
                master_key=self.master_key,
                sync_every=self.sync_every,
            )
        return store

    def _open(self) -> _Opened:
        """Return the recording.

        Raises:
            HistoryFormatError: If there is none.
        """
        if self.is_empty or self._opened is None:
            raise HistoryFormatError(
                f"Nothing has been recorded in `{self.path}`. HINT: check the path."
            )
        return self._opened

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written yet; so it is when a recording could not be begun.

        Raises:
            HistoryFormatError: If the directory holds an `LMDBHistory`, or a shard is missing.
        """
        if self._opened is None and not self._has_others:
            state = self._state([self._scan()])
            if state is not None:
                self._enter(state[0])
        return self._opened is None

    @property
    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            HistoryFormatError: If nothing has been recorded yet, or by a newer fedrec, or with
                another codec or `keep` than was asked for.
        """
        return self._open().recording.manifest

    def begin(self, manifest: Manifest) -> None:
        """Start a recording; called by all ranks at once, if there are several.

        Args:
            manifest: The manifest; its execution plan says how many shards there are
                (`num_shards`; 1 if it does not). What was asked for as `codec` and `keep` is
                replaced, and all ranks take the `store_id` of rank 0.

        Raises:
            HistoryFormatError: If the store already holds a recording.
            HistoryFullError: If the disk cannot hold all of its rounds (`forecast`).
            HistoryLockedError: If another process is just starting one.
            ConfigurationError: If there are fewer shards than ranks, or more than clients.
        """
        if not self.is_empty:
            raise HistoryFormatError(
                f"History `{self.path}` already holds a recording of {len(self.rounds())} rounds. "
                "HINT: resume it, or record to another path."
            )
        self.close()
        self._stores = {}  # of a recording that could not be begun
        ranks = self._ranks
        if ranks is None:
            self._remove_all()
            self._begin(manifest)
            return
        shared = dataclasses.replace(manifest, store_id=ranks.broadcast(manifest.store_id))
        if any(ranks.each(lambda: bool(shard_folders(self._directory)))):
            for rank in range(ranks.size):  # one by one, as they may have the same directory
                ranks.each(self._remove_all if rank == ranks.rank else lambda: None)
        ranks.each(lambda: self._begin(shared))

    def _begin(self, manifest: Manifest) -> None:
        num_shards = shards_of(manifest)
        rank, size = (0, 1) if self._ranks is None else (self._ranks.rank, self._ranks.size)
        own = Sharding(
            client_ids=tuple(manifest.clients), num_shards=num_shards, rank=rank, size=size
        ).own
        planned = dataclasses.replace(
            manifest,
            codec=self.codec or manifest.codec,
            keep=manifest.keep if self.keep is None else self.keep,
        )
        require_room_for_all(self._directory, planned, self.map_size, own_shards=len(own))
        try:
            for shard in own:
                self._store(shard).begin(of_shard(manifest, shard))
        except BaseException:
            self.close()
            raise
        self._enter(num_shards)

    def _remove_all(self) -> None:
        """Remove the shards of a recording that could not be begun."""
        for folder in shard_folders(self._directory).values():
            lock = WriterLock(folder)
            try:
                shutil.rmtree(folder)
            finally:
                lock.release()

    def write_round(self, record: RoundRecord) -> None:
        """Append a round; when this returns, own shards survive a power cut (see `sync_every`).

        Nothing is said to other ranks: a thread of its own may write.

        Args:
            record: The round; its number is the number of rounds stored so far, its clients are
                in the manifest. Of `ShardedUpdates` the rows of own clients are used, and of other
                updates these are taken out.

        Raises:
            ForgottenError: If one of its clients was forgotten.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        from fedrec.distributed.updates import ShardedUpdates
        from fedrec.history.conversion import to_arrays

        sent = record.sent
        if isinstance(sent, ShardedUpdates):
            updates, row_ids = sent.part, sent.own_ids
        else:
            updates, row_ids = sent.updates, list(sent.client_ids)
        arrays = to_arrays(record, updates, pinned=True)
        dropped = frozenset(arrays.client_ids).difference(row_ids)
        self._write(
            dataclasses.replace(arrays, dropped=dropped), row_ids, self._encoded.pop(updates)
        )

    def append(self, arrays: RoundArrays) -> None:
        """Append a round; when this returns, own shards survive a power cut (see `sync_every`).

        Raises:
            ForgottenError: If one of its clients was forgotten.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If it is not the next round, names an unknown client or one twice, or
                has numbers that are not finite.
            ShapeError: If a shape or dtype differs from the manifest's.
            HistoryFullError: If there is no room; all earlier rounds are intact.
            HistoryLockedError: If another process, or another store, is writing.
        """
        self._write(arrays, arrays.row_ids, arrays.encoded)

    def _write(
        self, arrays: RoundArrays, row_ids: Sequence[str], encoded: Sequence[Row] | None
    ) -> None:
        """Write a round to own shards, given the clients of its rows."""
        recording, sharding, shards = self._open()
        self._even_out()
        arrays.check(recording.manifest, len(self.rounds()))
        row_of = {client_id: row for row, client_id in enumerate(row_ids)}
        self._is_even = False  # until all is done

        def write(shard: int) -> None:
            ids = [c for c in arrays.client_ids if c in row_of and sharding.shard_of(c) == shard]
            rows = [row_of[c] for c in ids]
            shards[shard].append(
                dataclasses.replace(
                    arrays,
                    updates=_rows(arrays.updates, rows),
                    dropped=frozenset(arrays.client_ids).difference(ids),
                    encoded=None if encoded is None else [encoded[row] for row in rows],
                )
            )

        with ThreadPoolExecutor(len(shards)) as pool:  # which wait for the disk together
            list(pool.map(write, shards))
        self._is_even = True

    def _even_out(self) -> None:
        """Drop what some shards have beyond the rounds that all have, and keep others from writing.

        Raises:
            HistoryLockedError: If another process, or another store, is writing.
        """
        if self._is_even:
            return
        shards = self._open().shards
        for store in shards.values():
            store.lock()
        counts = {shard: len(store.rounds()) for shard, store in shards.items()}
        least = min([*counts.values()] if self._most is None else [*counts.values(), self._most])
        further = {shard: count for shard, count in counts.items() if count > least}
        if further:
            rounds = ", ".join(
                f"round{f's {least}..' if count - 1 > least else ' '}{count - 1} of shard {shard}"
                for shard, count in further.items()
            )
            _log.warning(
                "History `%s`: dropped %s, which other shards lack: writing was interrupted.",
                self.path,
                rounds,
            )
            for shard in further:
                shards[shard].truncate(least)
        self._most, self._is_even = None, True

    def read(self, t: int, client_ids: Sequence[str] | None = None) -> RoundArrays:
        """Read a round as arrays, of all shards; the result owns its memory.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            ForgottenError: If one of the clients was forgotten.
            HistoryCorruptedError: If the bytes are not those that were written.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
            HistoryError: If other ranks have some of the shards.
        """
        sharding = self._open().sharding
        others = [v for v in range(sharding.num_shards) if v not in sharding.own]
        if others:
            names = ", ".join(shard_folder(self.path, shard).name for shard in others[:10])
            raise HistoryError(
                f"Rank {sharding.rank} cannot read a whole round of history `{self.path}`, as "
                f"{names} belong to other ranks. HINT: `read_round` gives the rows of own shards; "
                "whole rounds can be read in one process."
            )
        with self.snapshot() as snapshots:
            return snapshots.read(snapshots.entry(t)[0], client_ids)

    def read_round(self, t: int, client_ids: Sequence[str] | None = None) -> RoundRecord:
        """Read a round; the result owns its memory.

        Once `attach` was called and there are several shards, `sent` is a `ShardedUpdates`, with
        the rows of own shards. Nothing is said to other ranks: a thread of its own may read.

        Args:
            t: Round, 0-based.
            client_ids: Read only these clients' updates, in this order; `None` for all.

        Raises:
            RoundNotFoundError: If the round, or the update of one of the clients, is not stored.
            ForgottenError: If one of the clients was forgotten.
            HistoryCorruptedError: If the bytes are not those that were written.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        from fedrec.history.conversion import to_record

        recording, sharding, _ = self._open()
        if self._ranks is None or sharding.num_shards == 1:
            return to_record(self.read(t, client_ids))
        import torch

        from fedrec.distributed.updates import ShardedUpdates

        with self.snapshot() as snapshots:
            entry, _ = snapshots.entry(t)
            present = [recording.client_ids[index] for index in entry["present"]]
            asked = present if client_ids is None else list(client_ids)
            snapshots.require_present(entry, asked)
            own = sharding.in_order(sharding.owned(asked))
            record = to_record(snapshots.read(entry, own))
        samples = dict(zip(present, entry["num_samples"], strict=True))
        sent = ShardedUpdates(
            part=record.updates,
            sharding=sharding,
            ranks=self._ranks,
            client_ids=tuple(asked),
            num_samples=torch.tensor([samples[c] for c in asked], dtype=torch.int64),
            refused=record.refused,
        )
        return dataclasses.replace(record, sent=sent)

    def index(self, t: int) -> RoundIndex:
        """Return what is known of a round without reading its vectors.

        With several ranks, rounds that were written since `attach` have bounds of own clients'
        updates alone.

        Raises:
            RoundNotFoundError: If the round is not stored.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        with self.snapshot() as snapshots:
            index, stored = snapshots.index(t), len(snapshots.rounds())
        if self._bounds is None or t >= len(self._bounds.starts) - 1:
            return index
        recording, sharding, _ = self._open()
        if recording.retention.expired(t, stored):
            return index
        starts, ends = self._bounds.starts[t : t + 2].tolist()
        of_rank = [
            iter(values[start:end].tolist())
            for values, start, end in zip(self._bounds.values, starts, ends, strict=True)
        ]
        bounds: dict[str, float] = {}
        for client_id in index.present:
            rank = sharding.owner(sharding.shard_of(client_id))
            bound = next(of_rank[rank])
            if rank == sharding.rank:
                bound = index.bounds.get(client_id, math.nan)
            if not math.isnan(bound):
                bounds[client_id] = bound
        return dataclasses.replace(index, bounds=bounds)

    def rounds(self) -> range:
        """Return the rounds that all shards have, `range(0, k)`."""
        if self.is_empty:
            return range(0)
        with self.snapshot() as snapshots:
            return snapshots.rounds()

    @contextmanager
    def snapshot(self) -> Iterator[ShardSnapshots]:
        """Read own shards as they are at one moment, by entries and vectors; for tools."""
        recording, sharding, shards = self._open()
        with ExitStack() as stack:
            open_ = {v: stack.enter_context(store.snapshot()) for v, store in shards.items()}
            counts = [len(snapshot.rounds()) for snapshot in open_.values()]
            least = min(counts if self._most is None else [*counts, self._most])
            yield ShardSnapshots(recording, sharding, open_, least)

    def as_stored(self, updates: Tensor) -> Tensor:
        """Return updates that are to be written as `read_round` would return them afterwards.

        They are encoded for that; when a round with these very updates is written, it is not done
        again.

        Args:
            updates: Shape $(m, d)$, of `ShardedUpdates` the rows of own clients; must not be
                changed until they are written.

        Returns:
            Shape $(m, d)$; `updates` itself if the codec is lossless.
        """
        return self._encoded.add(self._open().recording.codec, updates)

    def seal(self, content: bytes, shard: int = 0) -> bytes:
        """Return the content of a shard's file beside the history: encrypted, if that is.

        Raises:
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        return self._open().shards[shard].seal(content)

    def unseal(self, content: bytes, shard: int = 0) -> bytes:
        """Return what `seal` was given.

        Raises:
            HistoryCorruptedError: If it was changed, or is of another history.
            HistoryKeyError: If the history is encrypted and the master key is missing or another.
        """
        return self._open().shards[shard].unseal(content)

    @property
    def is_locked(self) -> bool:
        """Whether the recording is encrypted and its keys are not known."""
        return self._open().recording.is_locked

    @property
    def forgotten(self) -> tuple[str, ...]:
        """Clients that were forgotten (`fedrec.history.forget`), or are being forgotten."""
        return () if self.is_empty else tuple(self._open().recording.forgotten)

    def num_bytes(self) -> int:
        """Return the size of own shards in bytes."""
        return 0 if self.is_empty else sum(s.num_bytes() for s in self._open().shards.values())

    def damage(self, progress: Callable[[int], None] | None = None) -> list[Damage]:
        """Read own shards, list every damage in them, and find out whether they agree.

        Of an encrypted history whose master key is not given, each record is compared with its
        checksum, and no more.

        Args:
            progress: Called with the number of rounds that are left, of all shards.

        Returns:
            One entry for each damaged record, each break of a chain, and each round in which the
            shards do not agree; none if all is well.

        Raises:
            HistoryCorruptedError: If a file is truncated, or a manifest is damaged.
        """
        recording, _, shards = self._open()
        left = {shard: len(store.rounds()) for shard, store in shards.items()}
        damage: list[Damage] = []
        for shard, store in shards.items():

            def count(of_shard: int, shard: int = shard) -> None:
                left[shard] = of_shard
                if progress is not None:
                    progress(sum(left.values()))

            found = store.damage(count)
            damage += [damage_of_shard(d, shard) for d in found]
        if not damage and not recording.is_locked:
            for t in self.rounds():
                with self.snapshot() as snapshots:
                    damage += snapshots.damage(t)
        return damage

    def verify(self) -> range:
        """Read own shards, follow their chains of hashes, and find out whether they agree.

        Returns:
            The rounds that all of them have.

        Raises:
            HistoryCorruptedError: If something is not as it was written.
        """
        rounds = self.rounds()
        damage = self.damage()
        if damage:
            raise DamagedRecordError(str(self.path), damage[0])
        return rounds

    def close(self) -> None:
        """Let go of the files and of the right to write. The history can be used again."""
        for store in self._stores.values():
            store.close()
        self._encoded.clear()
        self._is_even = False
        if not self._has_others:  # the directory may be another one when it is used again
            self._stores, self._opened = {}, None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        found = dict.fromkeys(("_ranks", "_opened", "_bounds", "_most"))
        fresh = {"_stores": {}, "_encoded": EncodedUpdates(), "_is_even": False}
        return {**self.__dict__, **found, **fresh, "path": self._directory}


def _rows(updates: NDArray[np.float32], rows: Sequence[int]) -> NDArray[np.float32]:
    """Return rows of updates, without a copy if they follow each other."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows)) if rows else ()):
        start = rows[0] if rows else 0
        return updates[start : start + len(rows)]
    return updates[list(rows)]
