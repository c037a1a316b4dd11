"""A history as a data frame."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedrec.exceptions import RoundNotFoundError
from fedrec.history import HistoryStore, LMDBHistory, Manifest, MemoryHistory
from fedrec.history.tools import frame
from fedrec.types import CohortUpdates, RoundRecord


def fill(history: HistoryStore) -> HistoryStore:
    history.begin(
        Manifest(
            model_fingerprint="f", num_parameters=2, clients={"a": 10, "b": 20, "c": 30}, seed=0,
            aggregator={"class_path": "fedrec.aggregators.FedAvg", "init_args": {}},
            server_lr=0.1, max_rounds=2, malicious=("b",),
        )
    )  # fmt: skip
    for t, (ids, updates, refused) in enumerate(
        [(("a", "b"), [[3.0, -4.0], [0.0, 0.0]], {"c": "not finite"}), (("c",), [[-1.0, 0.0]], {})]
    ):
        history.write_round(
            RoundRecord(
                round=t, global_weights=torch.zeros(2), aggregate=torch.tensor([1.0, 0.0]),
                sent=CohortUpdates(
                    client_ids=ids, updates=torch.tensor(updates), refused=refused,
                    num_samples=torch.tensor([{"a": 10, "b": 20, "c": 30}[c] for c in ids]),
                ),
            )
        )  # fmt: skip
    return history


@pytest.mark.parametrize("at_once", [1, 4, 1 << 24])
def test_one_row_per_round_and_client(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(frame, "_MOST", at_once)
    table = fill(MemoryHistory()).to_pandas()
    assert table["round"].tolist() == [0, 0, 0, 1]
    assert table["client_id"].tolist() == ["a", "b", "c", "c"]
    assert table["num_samples"].tolist() == [10, 20, 30, 30]
    assert table["norm"].tolist()[:2] == [5.0, 0.0]
    assert table["max_abs"].tolist()[:2] == [4.0, 0.0]
    assert table["cosine"].tolist()[0] == 0.6
    assert math.isnan(table["cosine"][1])  # an update of zeros has no direction
    assert math.isnan(table["norm"][2])  # refused
    assert table.iloc[3][["norm", "max_abs", "cosine"]].tolist() == [1.0, 1.0, -1.0]
    assert table["malicious"].tolist() == [False, True, False, False]
    assert table["refused"].dropna().to_dict() == {2: "not finite"}


def test_some_rounds_and_clients() -> None:
    history = fill(MemoryHistory())
    assert history.to_pandas(rounds=[1])["client_id"].tolist() == ["c"]
    table = history.to_pandas(client_ids=["a"])
    assert table[["round", "client_id", "norm"]].values.tolist() == [[0, "a", 5.0]]
    assert history.to_pandas(rounds=[]).empty
    assert list(history.to_pandas(rounds=[]).columns) == list(table.columns)
    with pytest.raises(RoundNotFoundError):
        history.to_pandas(rounds=[2])


def test_updates_that_are_not_kept_have_no_figures(tmp_path: Path) -> None:
    with LMDBHistory(tmp_path / "h", keep={"last": 1}) as history:
        table = fill(history).to_pandas()
    assert table["norm"].isna().tolist() == [True, True, True, False]
    assert table["num_samples"].tolist() == [10, 20, 30, 30]
