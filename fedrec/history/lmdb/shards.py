"""A history in shards: the folders of these, and several of them read as one history.

Each shard is an ordinary history of all clients and all rounds, but of updates it has only those
of its own clients. Its manifest says which shard it is, and is that of the whole in all else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedrec.distributed.sharding import Sharding
from fedrec.exceptions import HistoryError, HistoryFormatError
from fedrec.history.lmdb.damage import Damage, DamagedRecordError
from fedrec.history.lmdb.environment import DATA
from fedrec.history.lmdb.reading import Snapshot, host_memory, not_stored
from fedrec.history.lmdb.records import (
    AGGREGATE,
    BUFFERS,
    GLOBAL_WEIGHTS,
    NAMES,
    ROUND,
    StoredManifest,
)
from fedrec.history.manifest import Manifest
from fedrec.history.rounds import RoundArrays, RoundIndex

__all__ = [
    "MODELS",
    "AnySnapshot",
    "ShardSnapshots",
    "damage_of_shard",
    "missing",
    "mixed",
    "of_shard",
    "of_whole",
    "require_one_file",
    "require_repaired",
    "shard_folder",
    "shard_folders",
    "shards_of",
]

SHARD, NUM_SHARDS = "shard", "num_shards"  # entries of the execution plan
REPAIRING = "repairing.json"  # beside the shards, while they are being repaired
_NAME = re.compile(r"shard-(\d{3,})")
# What all shards say of a round; checksums of vectors differ where the shards are encrypted.
_SHARED = ("cohort", "present", "num_samples", "refused", "departure")
_OF_UPDATES = ("updates", "bounds", "max_error")
# Vectors that every shard has, by what an entry calls them.
MODELS = {GLOBAL_WEIGHTS: "global_weights", AGGREGATE: "aggregate", BUFFERS: "buffers"}


def shard_folder(directory: Path, shard: int) -> Path:
    """Return the folder of a shard."""
    return directory / f"shard-{shard:03d}"


def shard_folders(directory: Path) -> dict[int, Path]:
    """Return the folders of the shards that are in a directory, by their numbers."""
    found = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / DATA).exists():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def require_one_file(directory: Path) -> None:
    """Check that a directory does not hold shards.

    Raises:
        HistoryFormatError: If it does.
    """
    if shard_folders(directory):
        raise HistoryFormatError(
            f"`{directory}` holds a history in shards. HINT: open it with `ShardedHistory`, or "
            f"make one file of it with `fedrec history merge {directory} NEW`."
        )


def require_repaired(directory: Path) -> None:
    """Check that shards are not half repaired.

    Raises:
        HistoryError: If they are.
    """
    if (directory / REPAIRING).exists():
        raise HistoryError(
            f"Repairing history `{directory}` was interrupted. HINT: finish it with "
            f"`fedrec history repair {directory}`."
        )


def missing(
    directory: Path, shards: Iterable[int], num_shards: int, where: str = ""
) -> HistoryFormatError:
    """Return the error for shards that are not there."""
    names = ", ".join(shard_folder(directory, shard).name for shard in list(shards)[:10])
    return HistoryFormatError(
        f"History `{directory}` lacks {names} of its {num_shards} shards{where}. HINT: put it "
        "there, or restore the history from a copy."
    )


def mixed(directory: Path) -> HistoryFormatError:
    """Return the error for shards that do not belong together."""
    return HistoryFormatError(
        f"The shards of history `{directory}` are not of one recording. HINT: restore the history "
        "from a copy."
    )


def damage_of_shard(damage: Damage, shard: int) -> Damage:
    """Return damage in a shard as that of the whole history."""
    return dataclasses.replace(damage, part=f"{damage.part} of shard {shard}")


def shards_of(manifest: Manifest) -> int:
    """Return how many shards a recording has.

    Raises:
        HistoryFormatError: If its manifest does not say a number.
    """
    number = manifest.execution.get(NUM_SHARDS, 1)
    if type(number) is not int or number < 1:
        raise HistoryFormatError(f"The manifest says that the history has {number!r} shards.")
    return number


def of_shard(manifest: Manifest, shard: int) -> Manifest:
    """Return the manifest of a shard, given that of the whole."""
    return dataclasses.replace(manifest, execution={**manifest.execution, SHARD: shard})


def of_whole(manifest: Manifest) -> Manifest:
    """Return the manifest of the whole, given that of a shard."""
    execution = {name: value for name, value in manifest.execution.items() if name != SHARD}
    return dataclasses.replace(manifest, execution=execution)


class ShardSnapshots:
    """Reads rounds of several shards as a `Snapshot` reads those of one history.

    Args:
        recording: The recording as a whole.
        sharding: Says whose shard is whose.
        shards: The shards that are here.
        num_rounds: How many rounds count.
    """

    def __init__(
        self,
        recording: StoredManifest,
        sharding: Sharding,
        shards: Mapping[int, Snapshot],
        num_rounds: int,
    ) -> None:
        self.recording = recording
        self.shards = shards
        self._sharding = sharding
        self._num_rounds = num_rounds
        self._first = next(iter(shards.values()))

    @property
    def parts(self) -> list[Snapshot]:
        """One for each file that is here."""
        return list(self.shards.values())

    @property
    def start(self) -> str:
        """What the first entry has as the hashes of the records before it."""
        return " ".join(snapshot.start for snapshot in self.shards.values())

    def rounds(self) -> range:
        """Return the rounds that count."""
        return range(self._num_rounds)

    def repairs(self) -> list[dict[str, Any]]:
        """Return what repairs have dropped from this history, in the order they were made."""
        return self._first.repairs()

    def forgotten(self) -> list[dict[str, Any]]:
        """Return which clients were forgotten when, in that order."""
        return self._first.forgotten()

    def entry(self, t: int) -> tuple[dict[str, Any], str]:
        """Return the entry of round `t`, with the updates in all shards that are here.

        Its hashes are those of the records in all of them, in this order.

        Raises:
            RoundNotFoundError: If the round does not count.
            HistoryCorruptedError: If the bytes are not those that were written, or the shards do
                not agree.
        """
        if t not in self.rounds():
            raise not_stored(self.recording.history, t, self.rounds())
        read = {shard: snapshot.entry(t) for shard, snapshot in self.shards.items()}
        entry = dict(next(iter(read.values()))[0])
        by_client: dict[int, tuple[Any, ...]] = {}
        names = ("updates", "bounds") if entry["max_error"] is None else _OF_UPDATES
        for shard, (part, _) in read.items():
            self._require_same(t, shard, part, entry)
            for row in self.shards[shard].kept(part):
                by_client[part["present"][row]] = tuple(part[name][row] for name in names)
        nothing = (None,) * len(names)
        rows = [by_client.get(index, nothing) for index in entry["present"]]
        entry |= {name: [row[k] for row in rows] for k, name in enumerate(names)}
        entry["previous"] = " ".join(part["previous"] for part, _ in read.values())
        return entry, " ".join(following for _, following in read.values())

    def _require_same(
        self, t: int, shard: int, part: Mapping[str, Any], first: Mapping[str, Any]
    ) -> None:
        if self.recording.pending:  # they agree when that is done
            return
        shared = _SHARED if self.recording.manifest.encryption else (*_SHARED, *MODELS.values())
        different = [name for name in shared if part[name] != first[name]]
        if different:
            raise self._disagree(t, shard, NAMES[ROUND], f"it has other entries {different}")

    def _disagree(self, t: int, shard: int, part: str, what: str) -> DamagedRecordError:
        other = next(iter(self.shards))
        damage = Damage(part=f"{part} of shard {shard}", reason=f"{what} than shard {other}")
        return DamagedRecordError(self.recording.history, dataclasses.replace(damage, round=t))

    def damage(self, t: int) -> list[Damage]:
        """Return in what the shards do not agree about round `t`; each of them is whole."""
        try:
            self.entry(t)
            if self.recording.manifest.encryption and not self.recording.pending:
                self._compare_models(t)
        except DamagedRecordError as error:
            return [error.damage]
        return []

    def _compare_models(self, t: int) -> None:
        """Compare vectors whose checksums differ as each shard has encrypted them."""
        first: dict[int, bytes] = {}
        for shard, snapshot in self.shards.items():
            entry, _ = snapshot.entry(t)
            for index, name in MODELS.items():
                if entry[name] is not None:
                    payload = bytes(snapshot.payload(t, "models", index, entry[name])[0])
                    if first.setdefault(index, payload) != payload:
                        raise self._disagree(t, shard, NAMES[index], "they are others")

    def kept(self, entry: dict[str, Any]) -> list[int]:
        """Return the rows of an entry whose update is here."""
        return [row for row, checksum in enumerate(entry["updates"]) if checksum is not None]

    def index(self, t: int) -> RoundIndex:
        """Return what is known of round `t`; bounds of the updates that are here.

        Raises:
            RoundNotFoundError: If the round does not count.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        entry, _ = self.entry(t)
        index, ids = self._first.index(t), self.recording.client_ids
        kept = self.kept(entry)
        bounds = {ids[entry["present"][row]]: entry["bounds"][row] for row in kept}
        return dataclasses.replace(index, bounds=bounds)

    def read(self, entry: dict[str, Any], client_ids: Sequence[str] | None) -> RoundArrays:
        """Return the round of an entry, with the updates of clients whose shards are here.

        Args:
            entry: The entry.
            client_ids: The clients, in the order of the rows; `None` for all in the round.

        Raises:
            RoundNotFoundError: If one of the clients is not in the round.
            HistoryCorruptedError: If the bytes are not those that were written.
        """
        t, recording = entry["round"], self.recording
        present = [recording.client_ids[index] for index in entry["present"]]
        asked = present if client_ids is None else list(client_ids)
        self.require_present(entry, asked)
        samples = dict(zip(present, entry["num_samples"], strict=True))
        updates = host_memory(len(asked), recording.manifest.num_parameters)
        rows: dict[int, list[int]] = {}
        for row, client_id in enumerate(asked):
            rows.setdefault(self._sharding.shard_of(client_id), []).append(row)
        for shard, own in rows.items():
            ids, out = [asked[k] for k in own], [updates[k] for k in own]
            snapshot = self.shards[shard]
            snapshot.read_updates(snapshot.entry(t)[0], ids, out)
        return dataclasses.replace(
            self._first.read(self._first.entry(t)[0], ()),
            client_ids=tuple(asked),
            updates=updates,
            num_samples=np.array([samples[c] for c in asked], np.int64),
        )

    def require_present(self, entry: dict[str, Any], client_ids: Sequence[str]) -> None:
        """Check that clients are in the round of an entry, whether or not their shards are here.

        Raises:
            RoundNotFoundError: If one is not.
        """
        present = {self.recording.client_ids[index] for index in entry["present"]}
        absent = [c for c in client_ids if c not in present]
        if absent:
            self._first.read(self._first.entry(entry["round"])[0], absent)

    def payload(
        self, t: int, database: str, index: int, checksum: str
    ) -> tuple[memoryview, int, int]:
        """Return the payload of a vector, as `Snapshot.payload` does."""
        snapshot = self._first
        if database == "updates":
            snapshot = self.shards[self._sharding.shard_of(self.recording.client_ids[index])]
        return snapshot.payload(t, database, index, checksum)


AnySnapshot = Snapshot | ShardSnapshots
