"""R10, R16: histories of something else, and histories in other processes."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg, Median
from fedrec.exceptions import FedrecError
from fedrec.history import LMDBHistory
from fedrec.recoverers import HistoricalOnly
from fedrec.testing.problems import VectorModule, quadratic_federation

sys.path.insert(0, str(Path(__file__).parent))

import fault_stores
from fault_stores import arrays, record


class _Named(VectorModule):
    """The same parameters by another name."""

    def __init__(self, size: int) -> None:
        super().__init__(size=size)
        self.other = self.weight
        del self.weight


def start(path: Path, **changes: Any) -> None:
    """Record, or go on recording, with a few things changed."""
    federation = changes.pop("federation", None) or quadratic_federation()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, seed=changes.pop("seed", 3))
    arguments = {"max_rounds": 4, "server_lr": 0.1, "resume": True, **changes}
    with LMDBHistory(path) as history:
        loop.record(federation, arguments.pop("rule", FedAvg()), history, **arguments)


def named() -> Federation:
    federation = quadratic_federation()
    return Federation(federation.clients, _Named(4), malicious=federation.malicious)


OTHERS = {
    "more parameters": ({"federation": quadratic_federation(size=5)}, "4 parameters"),
    "layers of other names": ({"federation": named()}, "same layers and names"),
    "another seed": ({"seed": 4}, "seed: 3 recorded, 4 now"),
    "another rate": ({"server_lr": 0.2}, "server_lr: 0.1 recorded, 0.2 now"),
    "another rule": ({"rule": Median()}, "aggregator"),
    "other clients": ({"federation": quadratic_federation(num_clients=6)}, "clients"),
    "more rounds": ({"max_rounds": 5}, "max_rounds: 4 recorded, 5 now"),
    "not resumed": ({"resume": False}, "already holds a recording of 4 rounds"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_recording_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    start(tmp_path)
    before = (tmp_path / "data.mdb").read_bytes()
    changes, message = OTHERS[name]
    with pytest.raises(FedrecError) as caught:
        start(tmp_path, **changes)
    assert message in str(caught.value)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_another_model_cannot_be_recovered(tmp_path: Path) -> None:
    start(tmp_path)
    before = (tmp_path / "data.mdb").read_bytes()
    other = quadratic_federation(size=5)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    with LMDBHistory(tmp_path) as history, pytest.raises(FedrecError, match="4 parameters"):
        loop.recover(other, history, HistoricalOnly(), other.malicious)
    assert (tmp_path / "data.mdb").read_bytes() == before


def test_newer_format_and_foreign_files(tmp_path: Path) -> None:
    newer = record(tmp_path / "newer", 1).path
    data = (newer / "data.mdb").read_bytes()
    with lmdb.open(str(newer), max_dbs=8, map_size=2**30) as env, env.begin(write=True) as txn:
        meta = env.open_db(b"meta", txn)
        key = struct.pack(">II", 0, 2**32 - 5)
        text = json.loads(txn.get(key, db=meta)[48:])
        sealed = fault_stores.manifest()
        from fedrec.history.lmdb.records import StoredManifest

        payload = json.dumps({**text, "format_version": 99}).encode()
        made, _ = StoredManifest("x", sealed).pack(0, 2**32 - 5, payload)
        txn.put(key, made, db=meta)
    (tmp_path / "foreign").mkdir()
    with lmdb.open(str(tmp_path / "foreign")) as env, env.begin(write=True) as txn:
        txn.put(b"\x00" * 8, b"FREC" * 100)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "data.mdb").write_text("round,client\n" * 5000)
    assert (newer / "data.mdb").read_bytes() != data
    for name, message in (
        ("newer", "has format version 99, but this fedrec reads"),
        ("foreign", "does not hold a fedrec history"),
        ("text", "does not hold a fedrec history"),
    ):
        before = (tmp_path / name / "data.mdb").read_bytes()
        with pytest.raises(FedrecError, match=message):
            LMDBHistory(tmp_path / name).rounds()
        with pytest.raises(FedrecError):
            start(tmp_path / name)
        assert (tmp_path / name / "data.mdb").read_bytes() == before


class Rounds(Dataset[torch.Tensor]):
    """The updates of a history, for a DataLoader."""

    def __init__(self, path: Path) -> None:
        self.history = LMDBHistory(path)
        self.num_rounds = len(self.history.rounds())  # it is open when the workers start

    def __len__(self) -> int:
        return self.num_rounds

    def __getitem__(self, t: int) -> torch.Tensor:
        return self.history.read_round(t).updates


def test_workers_of_a_data_loader_read_an_open_history(tmp_path: Path) -> None:
    data = Rounds(record(tmp_path, 6).path)
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        for t, updates in enumerate(loader):
            assert (updates.numpy() == arrays(t).updates).all()
    assert t == 5
    data.history.write_round(_as_record(6))  # nothing was taken from the parent
    assert data.history.verify() == range(7)
    data.history.close()


def _as_record(t: int) -> Any:
    from fedrec.history.conversion import to_record

    return to_record(arrays(t))
