"""What is encoded for a detector is what is written, and what is not finite is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.aggregators import FedAvg
from fedrec.callbacks import Callback
from fedrec.detectors import FLDetector
from fedrec.exceptions import HistoryError
from fedrec.federation import Federation
from fedrec.history import LMDBHistory, Manifest
from fedrec.history.codecs import CODECS
from fedrec.history.conversion import to_record
from fedrec.history.rounds import RoundArrays
from fedrec.loop import FederatedLoop
from fedrec.testing.problems import QuadraticClient, VectorModule
from fedrec.types import ClientUpdate, RoundContext

Make = Callable[..., RoundArrays]


class Diagonal(QuadraticClient):
    """Its Hessian is diagonal, so that a large one fits into memory."""

    def local_update(self, global_weights: torch.Tensor, ctx: RoundContext) -> ClientUpdate:
        return ClientUpdate(update=self.hessian * (global_weights - self.centre), num_samples=1)


class Forget(Callback):
    """Forgets what a forecast of the recording's size encoded."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def on_record_start(self, loop: FederatedLoop, max_rounds: int, first: int) -> None:
        self.sizes.clear()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the vectors that int8 has encoded."""
    sizes: list[int] = []
    original = type(CODECS["int8"]).encode
    monkeypatch.setattr(
        type(CODECS["int8"]),
        "encode",
        lambda codec, vector: sizes.append(vector.size) or original(codec, vector),
    )
    return sizes


@pytest.mark.parametrize("size", [50, 2**17])  # 5 updates are 1 kB, and 2.5 MiB
def test_a_recording_with_a_detector_encodes_every_update_once(
    tmp_path: Path, encoded: list[int], size: int
) -> None:
    clients = [Diagonal(f"c{k}", torch.ones(size), torch.full((size,), k + 1.0)) for k in range(5)]
    federation = Federation(clients, VectorModule(size=size))
    with LMDBHistory(tmp_path / "history", codec="int8") as history:
        FederatedLoop(enable_progress_bar=False, logger=False, callbacks=[Forget(encoded)]).record(
            federation,
            FedAvg(),
            history,
            max_rounds=4,
            server_lr=0.1,
            detector=FLDetector(),
        )
        assert history.rounds() == range(4)
    assert encoded == [size] * 4 * 5


@pytest.mark.parametrize("codec", ["int8", "float16", "sign", "int8+zstd"])
def test_the_bytes_are_those_of_a_recording_without_one(
    tmp_path: Path, manifest: Manifest, arrays: Make, codec: str
) -> None:
    for name in ("watched", "alone"):
        with LMDBHistory(tmp_path / name, codec=codec) as history:
            history.begin(manifest)
            for t in range(3):
                record = to_record(arrays(t))
                seen = history.as_stored(record.updates) if name == "watched" else None
                history.write_round(record)
                if seen is not None:
                    assert torch.equal(seen, history.read_round(t).updates)
    files = [(tmp_path / name / "data.mdb").read_bytes() for name in ("watched", "alone")]
    assert files[0] == files[1]


def test_a_round_may_be_encoded_while_the_one_before_is_not_yet_written(
    tmp_path: Path, manifest: Manifest, arrays: Make, encoded: list[int]
) -> None:
    with LMDBHistory(tmp_path, codec="int8") as history:
        history.begin(manifest)
        encoded.clear()
        records = [to_record(arrays(t)) for t in range(2)]
        seen = [history.as_stored(record.updates) for record in records]
        for t, record in enumerate(records):
            history.write_round(record)
            assert torch.equal(seen[t], history.read_round(t).updates)
    assert len(encoded) == 2 * 5


def test_what_was_encoded_goes_with_the_updates_or_is_written(
    tmp_path: Path, manifest: Manifest, arrays: Make
) -> None:
    with LMDBHistory(tmp_path, codec="int8") as history:
        history.begin(manifest)
        record = to_record(arrays(0))
        history.as_stored(record.updates)
        history.as_stored(to_record(arrays(1)).updates)  # nobody has them any more
        assert list(history._encoded._rows) == [id(record.updates)]
        history.write_round(record)
        assert history._encoded._rows == {}
        history.as_stored(record.updates)
        assert pickle.loads(pickle.dumps(history))._encoded._rows == {}


def test_other_updates_than_those_asked_about_are_encoded(
    tmp_path: Path, manifest: Manifest, arrays: Make
) -> None:
    with LMDBHistory(tmp_path, codec="int8") as history:
        history.begin(manifest)
        history.as_stored(to_record(arrays(1)).updates)
        history.write_round(to_record(arrays(0)))
        bound = history.index(0).bounds["client-0"]
    assert np.abs(arrays(0).updates[0]).max() <= bound <= 1.1 * np.abs(arrays(0).updates[0]).max()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("transaction_bytes", [2**28, 2**19])
def test_a_large_round_that_is_not_finite_leaves_nothing(
    tmp_path: Path, manifest: Manifest, value: float, codec: str, transaction_bytes: int
) -> None:
    """Its updates, 1 MiB, are looked at one by one while they are written."""
    manifest = dataclasses.replace(manifest, num_parameters=2**17, clients={"a": 1, "b": 1})
    good = RoundArrays(
        round=0,
        global_weights=np.zeros(2**17, np.float32),
        client_ids=("a", "b"),
        updates=np.ones((2, 2**17), np.float32),
        num_samples=np.ones(2, np.int64),
        aggregate=np.zeros(2**17, np.float32),
    )
    updates = good.updates.copy()
    updates[1, 12345] = value
    with LMDBHistory(tmp_path, codec=codec) as history:
        history.transaction_bytes = transaction_bytes
        history.begin(manifest)
        history.append(good)
        bad = dataclasses.replace(good, round=1, updates=updates)
        with pytest.raises(HistoryError, match=r"Round 1 has non-finite numbers in .*`b`"):
            history.append(bad)
        assert history.rounds() == range(1)
        history.append(dataclasses.replace(good, round=1))
        assert history.verify() == range(2)
        if codec == "int8":
            with pytest.raises(HistoryError, match=r"Expected `updates` to be finite.*in row 1"):
                history.as_stored(torch.from_numpy(updates))


def test_an_update_that_would_not_be_kept_is_refused_all_the_same(
    tmp_path: Path, manifest: Manifest, arrays: Make
) -> None:
    with LMDBHistory(tmp_path, keep={"every": 2}) as history:
        history.begin(manifest)
        history.append(arrays(0))
        bad = arrays(1)
        bad.updates[3, 7] = np.inf
        with pytest.raises(HistoryError, match=r"Round 1 has non-finite .*`client-3`"):
            history.append(bad)
        history.append(arrays(1))
        assert history.index(1).kept == ()
