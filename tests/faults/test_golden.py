"""R11: histories of every format version there was are read, number by number."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from fedrec.history import LMDBHistory
from fedrec.history.manifest import FORMAT_VERSION

sys.path.insert(0, str(Path(__file__).parent))

import golden_history

GOLDEN = Path(__file__).parent / "golden"


def vectors(t: int) -> tuple[list[float], list[list[float]], list[float]]:
    """The formulas of `golden_history.arrays`, element by element."""
    rows = [2, 0] if t == 1 else [0, 1, 2]
    weights = [i / 4 - t for i in range(130)]
    updates = [[(i - 64) * (r + 1) / 128 + t for i in range(130)] for r in rows]
    return weights, updates, [i / 8 + t for i in range(130)]


@pytest.mark.parametrize("codec", ["float32", "int8+zstd"])
@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_history_of_an_earlier_release(version: int, codec: str, tmp_path: Path) -> None:
    source = GOLDEN / f"version-{version}-{codec}"
    assert (source / "data.mdb").stat().st_size < 50_000
    # A copy, as reading takes locks in files beside it.
    path = shutil.copytree(source, tmp_path / "history")
    store = LMDBHistory(path)
    assert store.verify() == range(3)
    found = store.manifest
    assert list(found.clients.items()) == [("alice", 10), ("bob", 20), ("čeněk", 30)]
    assert (found.seed, found.server_lr, found.malicious) == (7, 0.25, ("bob",))
    assert found.codec == codec
    for t in range(3):
        weights, updates, aggregate = vectors(t)
        record = store.read(t)
        assert record.client_ids == (("čeněk", "alice") if t == 1 else ("alice", "bob", "čeněk"))
        assert record.num_samples.tolist() == ([30, 10] if t == 1 else [10, 20, 30])
        assert record.cohort == ("alice", "bob", "čeněk")
        assert record.refused == ({"bob": "non-finite"} if t == 1 else {})
        assert record.global_weights.tolist() == weights
        assert record.aggregate.tolist() == aggregate
        assert record.buffers is not None
        assert record.buffers.tolist() == [t, -t]
        if codec == "float32":
            assert record.updates.tolist() == updates
        else:
            # A step of int8 is the largest magnitude over 127, at most; half of it may be lost.
            step = np.abs(updates).max(axis=1, keepdims=True) / 127
            assert (np.abs(record.updates - updates) <= 1.01 * step).all()
    store.close()
    # It can be gone on with.
    store.append(golden_history.arrays(3))
    assert store.verify() == range(4)
    store.close()
