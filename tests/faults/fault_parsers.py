"""S2: many forged records, handed in one process to what reads them."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from fault_damage import HEADER, KINDS, Place, forge
from fault_stores import D, Facts, arrays, fork, manifest

from fedrec.exceptions import FedrecError
from fedrec.history.codecs import CODECS
from fedrec.history.lmdb.entries import make_entry, read_entry
from fedrec.history.lmdb.records import FLOAT32, MANIFEST, ROUND, StoredManifest, canonical
from fedrec.history.lmdb.writing import pack_vector, vectors_of

_FILE_BYTES = 10**6
_MOST_MEMORY = 300  # MB


def _read_manifest(record: bytes) -> None:
    StoredManifest.load("x", record)


def _read_entry(recording: StoredManifest, t: int, record: bytes) -> None:
    payload = recording.unpack(memoryview(record), t, ROUND)
    entry = read_entry(payload, recording, t, _FILE_BYTES)
    # What is let through can be used.
    assert all(recording.client_ids[k] for k in entry["cohort"] + entry["present"])
    assert len({len(entry[name]) for name in ("present", "updates", "bounds")}) == 1


def _read_vector(recording: StoredManifest, t: int, index: int, codec: str, record: bytes) -> None:
    payload = recording.unpack(
        memoryview(record), t, index, codec=CODECS[codec].id, dtype=FLOAT32, size=D
    )
    out = np.empty(D, np.float32)
    try:
        CODECS[codec].decode(payload, out)
    except ValueError:  # which is an error of the record for whoever reads it
        return
    assert codec in ("float32", "lz4", "zstd") or np.isfinite(out).all()


def records(codec: str) -> list[tuple[Place, bytes, StoredManifest, Callable[[bytes], None]]]:
    """Return records of a history of one round, and what reads each of them."""
    recording = StoredManifest("x", manifest(codec))
    vectors = vectors_of(arrays(0), recording)
    packed = {vector.client_index: pack_vector(recording, 0, vector) for vector in vectors}
    summaries = {index: summary for index, (_, summary) in packed.items()}
    entry = canonical(make_entry(arrays(0), recording, "0" * 64, summaries))
    found = [
        (
            Place(vector.database, 0, vector.client_index, 0, 0),
            packed[vector.client_index][0],
            partial(_read_vector, recording, 0, vector.client_index, vector.codec.name),
        )
        for vector in (vectors[0], vectors[-1])
    ]
    as_record = recording.pack(0, ROUND, entry)[0]
    found.append((Place("rounds", 0, ROUND, 0, 0), as_record, partial(_read_entry, recording, 0)))
    found.append((Place("meta", 0, MANIFEST, 0, 0), recording.record, _read_manifest))
    return [(place, record, recording, read) for place, record, read in found]


def _parse(num_inputs: int, seed: int, _send: Callable[[object], None]) -> dict[str, Any]:
    """Hand forged records to what reads them; anything but an error of fedrec's raises."""
    rng = random.Random(seed)
    where = [one for codec in sorted(CODECS) for one in records(codec)]
    for _, record, _, read in where:
        read(record)  # as it is, it is read
    facts = Facts()
    for _ in range(num_inputs):
        place, record, recording, read = rng.choice(where)
        # Without texts that nest 100,000 times, which take longer than all others together.
        made, kind = forge(record, rng, recording, place, KINDS)
        try:
            read(made)
        except FedrecError:
            facts["errors"] = facts.get("errors", 0) + 1
        else:
            assert kind.startswith("sealed") or made == record, (place, kind, made[:HEADER].hex())
        facts[kind] = facts.get(kind, 0) + 1
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert used < _MOST_MEMORY, f"{used} MB"
    return facts


def parsed(num_inputs: int, rng: random.Random, folder: object) -> Facts:
    """S2: one process reads so many forged records."""
    found: Facts = fork(partial(_parse, num_inputs, rng.randrange(2**32))).result()
    return found
