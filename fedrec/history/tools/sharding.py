"""Making shards of a history, and one file of its shards."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrec._checks import check_int
from fedrec._files import sync
from fedrec.distributed.sharding import Sharding
from fedrec.exceptions import ConfigurationError, HistoryError, expected
from fedrec.history.lmdb.encryption import Keys
from fedrec.history.lmdb.encryption import master_key as read_master_key
from fedrec.history.lmdb.errors import full_disk
from fedrec.history.lmdb.records import FORGOTTEN, REPAIRS, StoredManifest
from fedrec.history.lmdb.shards import NUM_SHARDS, of_shard, shard_folder
from fedrec.history.manifest import Manifest
from fedrec.history.tools.copying import Progress, copy_rounds, require_whole
from fedrec.history.tools.opening import open_history

__all__ = ["Conversion", "merge_history", "shard_history"]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What sharding or merging made.

    Args:
        path: The new history.
        rounds: Rounds in it.
        num_shards: Files that it lies in.
        num_bytes: Their size.
    """

    path: str
    rounds: int
    num_shards: int
    num_bytes: int


def shard_history(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    num_shards: int,
    master_key: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Make a history in shards of another one, which stays as it is.

    Everything is checked while it is copied, and read back. The new history appears as a whole or
    not at all. It is the same recording (`store_id`), and says how many shards it has
    (`num_shards` in the execution plan of its manifest): the results of a recovery are a function
    of that number, not of the number of processes. An encrypted history stays so, with new data
    keys.

    Args:
        path: The history, in one file or in shards, or the run folder it lies in.
        new: Directory to make; an empty one is taken, too.
        num_shards: How many shards, at most the number of clients.
        master_key: Where the master key of an encrypted history comes from, as in `LMDBHistory`.
        progress: Called after each round, with the number of rounds left.

    Raises:
        ConfigurationError: If `num_shards` is out of range.
        HistoryFormatError: If there is no history.
        HistoryKeyError: If it is encrypted and the master key is missing.
        HistoryCorruptedError: If it is damaged.
        HistoryFullError: If the disk has no room.
        HistoryError: If `new` is not empty, or cannot be written.

    Examples:
        >>> import tempfile
        >>> from fedrec.history import LMDBHistory, Manifest, ShardedHistory
        >>> manifest = Manifest(
        ...     model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20}, seed=0,
        ...     aggregator={}, server_lr=0.1, max_rounds=5,
        ... )
        >>> with tempfile.TemporaryDirectory() as path:
        ...     with LMDBHistory(f"{path}/history") as history:
        ...         history.begin(manifest)
        ...     _ = shard_history(f"{path}/history", f"{path}/sharded", num_shards=2)
        ...     ShardedHistory(f"{path}/sharded").manifest.execution
        {'num_shards': 2}
    """
    num_shards = check_int("num_shards", num_shards, minimum=1)

    def manifests(manifest: Manifest) -> list[tuple[Manifest, frozenset[int]]]:
        ids = tuple(manifest.clients)
        if num_shards > len(ids):
            requirement = f"at most the {len(ids)} clients"
            raise ConfigurationError(expected("num_shards", requirement, num_shards))
        sharding = Sharding(client_ids=ids, num_shards=num_shards)
        execution = {**manifest.execution, NUM_SHARDS: num_shards}
        whole = dataclasses.replace(manifest, execution=execution)
        own = [
            frozenset(i for i, c in enumerate(ids) if sharding.shard_of(c) == shard)
            for shard in range(num_shards)
        ]
        return [(of_shard(whole, shard), indices) for shard, indices in enumerate(own)]

    folders = [shard_folder(Path(), shard) for shard in range(num_shards)]
    return _convert(path, new, folders, manifests, master_key, progress)


def merge_history(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    master_key: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Make a history in one file of one in shards, which stays as it is.

    It equals one that was recorded to one file. Its manifest still says how many shards there were,
    so that a recovery gives the same bits. All else is as in `shard_history`.

    Args:
        path: The history, or the run folder it lies in.
        new: Directory to make; an empty one is taken, too.
        master_key: Where the master key of an encrypted history comes from, as in `LMDBHistory`.
        progress: Called after each round, with the number of rounds left.

    Raises:
        HistoryFormatError: If there is no history, or a shard is missing.
        HistoryKeyError: If it is encrypted and the master key is missing.
        HistoryCorruptedError: If it is damaged.
        HistoryFullError: If the disk has no room.
        HistoryError: If `new` is not empty, or cannot be written.
    """

    def manifests(manifest: Manifest) -> list[tuple[Manifest, frozenset[int]]]:
        return [(manifest, frozenset(range(len(manifest.clients))))]

    return _convert(path, new, [Path()], manifests, master_key, progress)


def _convert(
    path: str | os.PathLike[str],
    new: str | os.PathLike[str],
    folders: Sequence[Path],
    manifests: Callable[[Manifest], list[tuple[Manifest, frozenset[int]]]],
    source_of_key: str | None,
    progress: Progress | None,
) -> Conversion:
    """Copy a history to new files.

    Args:
        path: The history.
        new: Directory of the new one.
        folders: Where its files go in that.
        manifests: Returns the manifest of each file and the clients whose updates it holds, by
            index, given the manifest of the history.
        source_of_key: Where the master key comes from.
        progress: Called after each round, with the number of rounds left.
    """
    target = Path(new).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise HistoryError(f"`{target}` exists and is not empty. HINT: choose another NEW.")
    beside = target.with_name(f".{target.name}.new")
    with open_history(path, master_key=source_of_key) as source:
        with source.snapshot() as snapshot:
            recording = snapshot.recording
            if recording.pending:
                raise HistoryError(f"History `{source.path}`: {recording.unfinished()}.")
            master = None
            if recording.manifest.encryption is not None:
                recording.require_keys()
                master = read_master_key(source_of_key, target)
            parts = snapshot.parts
            models, updates = (
                max(p.environment.stored_bytes(p.txn, "models") for p in parts),
                sum(p.environment.stored_bytes(p.txn, "updates") for p in parts),
            )
            rounds = len(snapshot.rounds())
            lists = {REPAIRS: {"repairs": snapshot.repairs()}}
            lists[FORGOTTEN] = {"forgotten": snapshot.forgotten()}
            lists = {index: content for index, content in lists.items() if any(content.values())}
        made = manifests(recording.manifest)
        try:
            shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed here
            beside.mkdir(parents=True)
            needed = models * len(made) + updates
            if shutil.disk_usage(beside).free < needed:
                raise full_disk(target, needed, "the new history takes as much")
            left = 2 * rounds * len(made)

            def count(_: int) -> None:
                nonlocal left
                left -= 1
                if progress is not None:
                    progress(left)

            for folder, (manifest, own) in zip(folders, made, strict=True):
                directory = beside / folder
                directory.mkdir(exist_ok=True)
                keys = None
                if master is not None:
                    keys = Keys.create(str(target / folder), manifest.clients, master)
                    keys.write(directory)
                copied = StoredManifest(str(target / folder), manifest, keys)
                copy_rounds(
                    source.snapshot,
                    copied,
                    directory,
                    rounds,
                    lambda t, index: None,
                    lists=lists,
                    only=own,
                    progress=count,
                )
                require_whole(directory, copied, count)
            beside.replace(target)
            sync(target.parent)
        except OSError as error:
            raise HistoryError(f"`{target}` cannot be written: {error}.") from error
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    with open_history(target, master_key=source_of_key) as result:
        num_bytes = result.num_bytes()
    return Conversion(path=str(target), rounds=rounds, num_shards=len(folders), num_bytes=num_bytes)
