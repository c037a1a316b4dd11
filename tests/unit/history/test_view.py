"""What a recovery sees: the remaining clients, and what is kept of them."""

from __future__ import annotations

import pytest
import torch

from fedrec.exceptions import ConfigurationError, RoundNotFoundError
from fedrec.history import HistoryView, Manifest, MemoryHistory
from fedrec.types import CohortUpdates, RoundRecord


@pytest.fixture
def history() -> MemoryHistory:
    """Three rounds of a, b, c, of which every other one is kept; in round 2 without a."""
    history = MemoryHistory(keep={"every": 2})
    history.begin(
        Manifest(
            model_fingerprint="f",
            num_parameters=2,
            clients={"a": 1, "b": 2, "c": 3},
            seed=0,
            aggregator={"class_path": "fedrec.aggregators.FedAvg", "init_args": {}},
            server_lr=0.1,
            max_rounds=3,
        )
    )
    for t, ids in enumerate(["abc", "abc", "cb"]):
        values = torch.tensor([[float(10 * t + ord(c) - ord("a") + 1)] for c in ids])
        history.write_round(
            RoundRecord(
                round=t,
                global_weights=torch.full((2,), float(t)),
                sent=CohortUpdates(
                    client_ids=tuple(ids),
                    updates=values.expand(-1, 2),
                    num_samples=torch.tensor([ord(c) - ord("a") + 1 for c in ids]),
                ),
                aggregate=torch.zeros(2),
            )
        )
    return history


def test_only_the_remaining_clients_are_seen(history: MemoryHistory) -> None:
    view = HistoryView(history, ["b", "a"])
    assert view.remaining == ("b", "a")
    assert view.rounds() == range(3)
    assert view.manifest == history.manifest
    assert [view.cohort(t) for t in range(3)] == [("a", "b"), ("a", "b"), ("b",)]
    assert [view.kept(t) for t in range(3)] == [("a", "b"), (), ("b",)]
    assert [view.excluded(t) for t in range(3)] == [("c",)] * 3
    assert [view.present(t) for t in range(3)] == [("a", "b", "c"), ("a", "b", "c"), ("c", "b")]
    assert [view.bounds(t) for t in range(3)] == [{"a": 1.0, "b": 2.0}, {}, {"b": 22.0}]
    assert view.count(range(3)) == (3, 5)


def test_what_is_kept_is_read_and_more_where_it_is_named(history: MemoryHistory) -> None:
    view = HistoryView(history, ["a", "b"])
    assert [view.read(t).updates[:, 0].tolist() for t in range(3)] == [[1, 2], [], [22]]
    assert view.read(2, ["c"]).updates.tolist() == [[23, 23]]
    assert view.read(1, ()).global_weights.tolist() == [1, 1]
    with pytest.raises(RoundNotFoundError, match="has no update of a"):
        view.read(1, ["a"])
    with pytest.raises(RoundNotFoundError, match="Round 3"):
        view.cohort(3)


def test_the_whole_view_has_nobody_excluded(history: MemoryHistory) -> None:
    view = HistoryView(history, ["a"]).whole()
    assert view.remaining == HistoryView(history).remaining == ("a", "b", "c")
    assert view.excluded(0) == ()
    assert view.count(range(3)) == (5, 8)


def test_what_excluded_clients_sent_is_missed_by_name(history: MemoryHistory) -> None:
    HistoryView(history, ["a", "b"]).require_excluded([0, 2], "This")
    HistoryView(history).require_excluded(range(3), "This")  # nobody is excluded
    with pytest.raises(
        ConfigurationError, match=r"This needs .* kept nothing of \['b', 'c'\] in round 1"
    ):
        HistoryView(history, ["a"]).require_excluded(range(3), "This")
