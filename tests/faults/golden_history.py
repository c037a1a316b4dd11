"""Records the history of today's format version that every later fedrec must read.

Run once for each format version, and never again for one that was released.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fedrec.history import LMDBHistory
from fedrec.history.manifest import FORMAT_VERSION, Manifest
from fedrec.history.rounds import RoundArrays
from fedrec.history.tools.repair import compact

IDS = ("alice", "bob", "čeněk")


def manifest(codec: str) -> Manifest:
    """Return the manifest."""
    return Manifest(
        model_fingerprint="golden",
        num_parameters=130,
        buffers={"statistics": {"dtype": "float32", "shape": [2]}},
        clients=dict(zip(IDS, (10, 20, 30), strict=True)),
        malicious=("bob",),
        seed=7,
        aggregator={"class_path": "fedrec.aggregators.TrimmedMean", "init_args": {"trim": 1}},
        server_lr=0.25,
        max_rounds=5,
        training={"*": {"batch_size": 8}},
        on_bad_update="drop",
        execution={"executor": "SequentialExecutor", "threads": 1},
        versions={"fedrec": "0"},
        codec=codec,
        store_id="0123456789abcdef" * 2,
    )


def arrays(t: int) -> RoundArrays:
    """Return round `t`: whole numbers over powers of two, which float32 has exactly."""
    ramp = np.arange(130, dtype=np.float32)
    rows = [0, 1, 2] if t != 1 else [2, 0]  # in round 1 the second client was refused
    return RoundArrays(
        round=t,
        global_weights=ramp / 4 - t,
        client_ids=tuple(IDS[r] for r in rows),
        updates=np.stack([(ramp - 64) * (r + 1) / 128 + t for r in rows]),
        num_samples=np.array([10 * (r + 1) for r in rows]),
        aggregate=ramp / 8 + t,
        cohort=IDS,
        refused={"bob": "non-finite"} if t == 1 else {},
        buffers=np.array([t, -t], np.float32),
    )


def record(path: Path, codec: str) -> None:
    """Record the rounds."""
    store = LMDBHistory(path)
    store.begin(manifest(codec))
    for t in range(3):
        store.append(arrays(t))
    store.close()


def main() -> None:
    """Record with a codec that is exact and one that is not."""
    for codec in ("float32", "int8+zstd"):
        folder = Path(__file__).parent / "golden" / f"version-{FORMAT_VERSION}-{codec}"
        if (folder / "data.mdb").exists():
            sys.exit(f"`{folder}` is there already.")
        record(folder, codec)
        compact(folder)
        for name in ("lock.mdb", "writer.lock"):
            (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
