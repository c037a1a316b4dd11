"""How much room a recording takes on disk, before it begins and while rounds are written."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedrec._checks import check_choice, check_int
from fedrec.exceptions import HistoryFullError
from fedrec.history.codecs import CODECS
from fedrec.history.lmdb.encryption import OVERHEAD
from fedrec.history.lmdb.environment import MAP_SIZE, Environment
from fedrec.history.lmdb.errors import full_disk
from fedrec.history.lmdb.records import HEADER_BYTES
from fedrec.history.lmdb.shards import SHARD, shards_of
from fedrec.history.manifest import FLOAT_BYTES, Manifest
from fedrec.history.retention import Retention

__all__ = ["Forecast", "expected_bytes", "forecast", "require_room", "require_room_for_all"]

_PAGE = 4096
_LEAF = _PAGE - 16  # room for records in a page
_LARGEST_IN_LEAF = 2038 - 2  # a longer record has pages of its own
_NODE = 8 + 8  # what LMDB stores with a record: a header, and the key
_POINTER = 8 + 2
# Roots, and pages that a commit replaces: the commit after the next uses them again.
_FIXED = 64 * _PAGE
_SLACK = 2**20  # a file is made this much longer before records are deleted
# JSON of an entry: for each client its index, number of samples, checksum and bounds.
_ENTRY_BYTES, _ENTRY_CLIENT_BYTES = 500, 90
# The most numbers that are encoded to learn how large an update is.
_SAMPLE = 2**18


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """How much room a recording is expected to take.

    Args:
        num_bytes: Size of the file when all rounds are stored.
        update_bytes: Bytes that one client update takes.
        round_bytes: Bytes by which a round with updates makes the file larger.
        assumed: Whether the size of an update depends on its numbers. Then it is that of normally
            distributed ones, a fifth of them zero.
    """

    num_bytes: int
    update_bytes: int
    round_bytes: int
    assumed: bool


def forecast(
    *,
    num_clients: int,
    num_parameters: int,
    max_rounds: int,
    codec: str = "float32",
    keep: Mapping[str, Any] | None = None,
    clients_per_round: int | None = None,
    num_buffers: int = 0,
    encrypted: bool = False,
    num_shards: int = 1,
) -> Forecast:
    """Tell how much room a recording will take on disk.

    Args:
        num_clients: $n$.
        num_parameters: $d$.
        max_rounds: $T$.
        codec: How client updates are stored.
        keep: Which of them, as in `LMDBHistory`.
        clients_per_round: $m$; by default all clients.
        num_buffers: Values in buffers that are averaged; in float64 each counts twice.
        encrypted: Whether the history is.
        num_shards: How many shards it has (`ShardedHistory`); the forecast is of all of them.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> paper = {"num_clients": 100, "num_parameters": 139_960, "max_rounds": 2000}
        >>> round(forecast(**paper).num_bytes / 1e9)
        115
        >>> round(forecast(**paper, codec="int8", keep={"every": 10}).num_bytes / 1e9, 1)
        5.2
    """
    num_clients = check_int("num_clients", num_clients, minimum=1)
    num_parameters = check_int("num_parameters", num_parameters, minimum=1)
    max_rounds = check_int("max_rounds", max_rounds, minimum=1)
    num_shards = check_int("num_shards", num_shards, minimum=1)
    if clients_per_round is not None:
        clients_per_round = check_int("clients_per_round", clients_per_round, minimum=1)
    check_choice("codec", codec, CODECS)
    retention = Retention.of(keep)
    m = num_clients if clients_per_round is None else min(clients_per_round, num_clients)
    kept = math.ceil(m * min(retention.count(num_clients), num_clients) / num_clients)
    seal = OVERHEAD if encrypted else 0
    slack = 0 if retention.last is None else _SLACK
    payload, assumed = _payload_bytes(codec, num_parameters)
    update = _record_bytes(payload + seal)
    model = 2 * _record_bytes(FLOAT_BYTES * num_parameters + seal)
    model += _record_bytes(FLOAT_BYTES * num_buffers + seal) if num_buffers else 0
    model += _record_bytes(_ENTRY_BYTES + _ENTRY_CLIENT_BYTES * m + seal)
    model *= num_shards
    num_bytes = max_rounds * model + retention.most_rounds(max_rounds) * kept * update
    return Forecast(
        num_bytes=num_shards * (_FIXED + slack) + math.ceil(num_bytes),
        update_bytes=math.ceil(update),
        round_bytes=math.ceil(model + kept * update),
        assumed=assumed,
    )


def of_manifest(manifest: Manifest, own_shards: int | None = None) -> Forecast:
    """Tell how much room a recording with this manifest, or a shard of one, will take.

    Args:
        manifest: Its manifest.
        own_shards: So many of its shards alone.
    """
    is_shard = SHARD in manifest.execution
    num_shards = shards_of(manifest) if is_shard or own_shards is not None else 1
    share = (1 if own_shards is None else own_shards) / num_shards
    arguments = (manifest.sampler or {}).get("init_args")
    fraction = arguments.get("fraction", 1.0) if isinstance(arguments, Mapping) else 1.0
    n = len(manifest.clients)
    known = isinstance(fraction, (int, float)) and 0 < fraction <= 1
    told = forecast(
        num_clients=n,
        num_parameters=manifest.num_parameters,
        max_rounds=manifest.max_rounds,
        codec=manifest.codec,
        keep=manifest.keep,
        clients_per_round=max(1, int(fraction * n + 0.5)) if known else n,
        num_buffers=manifest.buffer_words,
        encrypted=manifest.encryption is not None,
        num_shards=num_shards,
    )
    return replace(told, num_bytes=math.ceil(told.num_bytes * share))


def require_room_for_all(
    directory: Path, manifest: Manifest, map_size: int | None, own_shards: int | None = None
) -> None:
    """Check that the disk, and the map where that was not chosen, can hold a whole recording.

    Args:
        directory: Where it is to be.
        manifest: Its manifest.
        map_size: The map of each file, if it was chosen.
        own_shards: So many of its shards alone, each of which has a map of its own.

    Raises:
        HistoryFullError: If one cannot.
    """
    total = of_manifest(manifest, own_shards)
    place = next(p for p in (directory, *directory.parents) if p.exists())
    free = shutil.disk_usage(place).free
    recording = (
        f"{manifest.max_rounds} rounds of {len(manifest.clients)} clients and "
        f"{manifest.num_parameters} parameters as `{manifest.codec}`"
    )
    assumed = ", if they compress as expected" if total.assumed else ""
    if free < total.num_bytes:
        raise HistoryFullError(
            f"The disk of history `{directory}` has {free} bytes free, but {recording} need about "
            f"{total.num_bytes} bytes{assumed}: {total.num_bytes - free} bytes are missing. HINT: "
            "free some space, choose a smaller `codec`, or `keep` fewer updates."
        )
    if map_size is None and total.num_bytes > MAP_SIZE * (own_shards or 1):
        raise HistoryFullError(
            f"History `{directory}` reserves {MAP_SIZE} bytes of address space, but {recording} "
            f"need about {total.num_bytes}{assumed}. HINT: pass `map_size={2 * total.num_bytes}`."
        )


def require_room(
    environment: Environment, manifest: Manifest, num_rounds: int, num_bytes: int
) -> None:
    """Check that the disk has room for two rounds more.

    Args:
        environment: Where the recording is.
        manifest: Its manifest.
        num_rounds: Rounds it has.
        num_bytes: Size of the next one before it is encoded.

    Raises:
        HistoryFullError: If it has not; the message says what the rest of the recording needs.
    """
    free = shutil.disk_usage(environment.directory).free
    if free >= 2 * num_bytes:
        return
    measured = _Measured(environment, num_rounds, manifest) if num_rounds else None
    per_round = num_bytes if measured is None else min(num_bytes, measured.round_bytes)
    # Where updates are deleted as rounds are written, the next updates go to their pages.
    room = free + (measured.free_bytes if measured is not None and manifest.keep else 0)
    if room >= 2 * per_round:
        return
    total = of_manifest(manifest).num_bytes if measured is None else measured.expected_bytes
    missing = max(0, total - environment.num_bytes() - free)
    left = max(0, manifest.max_rounds - num_rounds)
    why = f"that is room for two rounds, and for the {left} that are left {missing} are missing"
    raise full_disk(environment.directory, 2 * per_round, why)


def expected_bytes(environment: Environment, manifest: Manifest, num_rounds: int) -> int:
    """Return the size to expect when `max_rounds` are stored, from the mean of those that are."""
    if not num_rounds:
        return of_manifest(manifest).num_bytes
    return _Measured(environment, num_rounds, manifest).expected_bytes


class _Measured:
    """What the rounds that are stored say about the rounds to come."""

    def __init__(self, environment: Environment, num_rounds: int, manifest: Manifest) -> None:
        retention = Retention.of(manifest.keep)
        with environment.read() as txn:
            updates, models, rounds = (
                environment.stored_bytes(txn, name) for name in ("updates", "models", "rounds")
            )
            used = environment.compact_bytes(txn)
        window = range(max(0, num_rounds - (retention.last or num_rounds)), num_rounds)
        with_updates = sum(retention.stores(t) for t in window)
        num_updates = with_updates or 1
        all_rounds = max(manifest.max_rounds, num_rounds)
        most = retention.most_rounds(all_rounds)
        self.free_bytes = max(0, environment.num_bytes() - used)
        self.round_bytes = -(-(models + rounds) // num_rounds) - (-updates // num_updates)
        self.expected_bytes = (
            used
            - (updates + models + rounds)
            + (models + rounds) * all_rounds // num_rounds
            + updates * most // num_updates
        )


def _payload_bytes(codec_name: str, num_parameters: int) -> tuple[int, bool]:
    """Return the bytes of an encoded update, and whether they depend on its numbers."""
    codec, size = CODECS[codec_name], min(num_parameters, _SAMPLE)
    sample = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
    sample[::5] = 0
    varied = len(codec.encode(sample).payload)
    constant = len(codec.encode(np.ones(size, np.float32)).payload)
    return math.ceil(varied * num_parameters / size), varied != constant


def _record_bytes(payload: int) -> float:
    """Return the bytes that a record takes: pages of its own, and its part of the pages of keys."""
    node = _NODE + HEADER_BYTES + payload
    if node > _LARGEST_IN_LEAF:
        pages = math.ceil((16 + HEADER_BYTES + payload) / _PAGE)
        return pages * _PAGE + _PAGE / (_LEAF // (_NODE + _POINTER))
    return _PAGE / (_LEAF // (node + node % 2 + 2))
