"""Estimates that are aggregated while they are computed, against estimates that are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import (
    Aggregator,
    FedAvg,
    FedAvgM,
    MeanAroundMedian,
    Median,
    MultiKrum,
    TrimmedMean,
)
from fedrec.clients import Client
from fedrec.federation import ClientSampler
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory, undecoded
from fedrec.recoverers import FedRecover, PairedLBFGS
from fedrec.recoverers.aggregated import AggregatedUpdates
from fedrec.testing.problems import VectorModule
from fedrec.types import ClientUpdate, CohortUpdates

ROUNDS, ESTIMATED = 16, 8  # warm-up of 4, corrections in rounds 7 and 11, the last two rounds
SIZE = 3 * 1024 + 100  # three blocks of columns, the last of them longer
WITH_NUMBA = choose_kernel(torch.device("cpu"), 6, SIZE) == "numba"
needs_numba = pytest.mark.skipif(not WITH_NUMBA, reason="estimates are compiled by numba")


class Changed(FedAvg):
    """Changes what FedAvg does, and does not say what it needs."""

    def aggregate(self, updates, client_weights=None, ctx=None):
        return updates.flip(1).mean(dim=0)


RULES = [
    FedAvg(),
    FedAvg(weighted=False),
    Median(),
    TrimmedMean(trim=1),
]
RULES_OF_ROWS = [
    MultiKrum(num_byzantine=1),
    MeanAroundMedian(num_byzantine=1),
    FedAvgM(FedAvg()),
    Changed(),
]


class Bowl(Client):
    """A client with loss h (w - c)^2 / 2, coordinate by coordinate."""

    def __init__(self, number: int) -> None:
        super().__init__(f"c{number}", num_samples=1 + number)
        generator = torch.Generator().manual_seed(number)
        self.centre = torch.randn(SIZE, generator=generator)
        self.curvature = 0.5 + torch.rand(SIZE, generator=generator)

    def local_update(self, global_weights: Tensor, ctx: Any) -> ClientUpdate:
        update = self.curvature * (global_weights - self.centre)
        return ClientUpdate(update=update, num_samples=self.num_samples)


class Noted(FedRecover):
    """Notes what the updates of each round are."""

    def start(self, history, max_rounds):
        self.kinds = []
        super().start(history, max_rounds)

    def round_updates(self, t, global_weights, ctx):
        found = super().round_updates(t, global_weights, ctx)
        self.kinds.append(type(found))
        return found


class Kept(Noted):
    """Aggregates estimates after all of them are computed."""

    def _aggregated(self, record, global_weights, ctx):
        return None


def recover(
    rule: Aggregator,
    history: HistoryStore | None = None,
    *,
    sampler: ClientSampler | None = None,
    num_threads: int = 1,
    **arguments: Any,
) -> int:
    """Record and recover in both ways, compare every bit; return how many rounds were aggregated
    while they were estimated.
    """
    federation = Federation([Bowl(i) for i in range(7)], VectorModule(size=SIZE), malicious=["c6"])
    loop = FederatedLoop(
        accelerator="cpu", enable_progress_bar=False, logger=False, num_threads=num_threads
    )
    with MemoryHistory() if history is None else history as store:
        loop.record(federation, rule, store, max_rounds=ROUNDS, server_lr=0.1, sampler=sampler)
        found = []
        for kind in (Noted, Kept):
            recoverer = kind(warmup_rounds=4, correction_period=4, final_rounds=2, **arguments)
            found.append((recoverer, loop.recover(federation, store, recoverer, ["c6"])))
    (one, fused), (other, kept) = found
    assert torch.equal(fused.global_weights, kept.global_weights)
    assert fused.diagnostics == kept.diagnostics
    assert fused.ledger.acp() == kept.ledger.acp()
    assert AggregatedUpdates not in other.kinds
    return one.kinds.count(AggregatedUpdates)


@needs_numba
@pytest.mark.parametrize("estimator", ["anchored", "average", "paired"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_same_bits_by_every_rule(rule: Aggregator, estimator: str) -> None:
    assert recover(rule, estimator=estimator, tolerance_rate=None) == ESTIMATED


@needs_numba
@pytest.mark.parametrize("estimator", ["average", "anchored"])
@pytest.mark.parametrize("rule", [FedAvg(), TrimmedMean(trim=1)])
def test_the_same_bits_by_several_threads(rule: Aggregator, estimator: str) -> None:
    assert recover(rule, estimator=estimator, tolerance_rate=None, num_threads=3) == ESTIMATED


@pytest.mark.parametrize("rule", RULES_OF_ROWS, ids=repr)
def test_whole_rows_where_the_rule_needs_them(rule: Aggregator) -> None:
    assert recover(rule, tolerance_rate=None) == 0


@pytest.mark.parametrize("arguments", [{"diagnose": True}, {"estimator": "history"}])
def test_whole_rows_where_something_else_needs_them(arguments: dict[str, Any]) -> None:
    assert recover(FedAvg(), tolerance_rate=None, **arguments) == 0


class Halved(PairedLBFGS):
    """Changes estimates, and says nothing of how they are aggregated."""

    def estimate(self, record, global_weights):
        found = super().estimate(record, global_weights)
        return found._replace(updates=found.updates / 2)


def test_estimates_that_a_subclass_changes_are_kept() -> None:
    assert recover(FedAvg(), estimator=Halved(), tolerance_rate=None) == 0


@needs_numba
@pytest.mark.parametrize("rule", [FedAvg(), TrimmedMean(trim=1)])
def test_clients_whose_estimates_are_abnormal_are_asked(rule: Aggregator) -> None:
    # Of every round, some estimates exceed it: 5 % of the entries do.
    assert recover(rule, estimator="anchored", tolerance_rate=0.05) < ESTIMATED
    assert recover(rule, abnormality_threshold=1e-6) == 0


@needs_numba
@pytest.mark.parametrize("estimator", ["average", "anchored"])
def test_partial_participation(estimator: str) -> None:
    settings = {"estimator": estimator, "tolerance_rate": None}
    assert recover(FedAvg(), sampler=ClientSampler(fraction=0.6), **settings) > 0


@needs_numba
def test_a_history_that_does_not_keep_all() -> None:
    # Clients that were not kept are asked.
    history = MemoryHistory(keep={"clients": 0.5})
    settings = {"estimator": "anchored", "tolerance_rate": None}
    assert recover(TrimmedMean(trim=1), history, **settings) == 0


@needs_numba
@pytest.mark.parametrize("codec", ["float32", "int8", "int8+zstd"])
def test_a_history_on_disk(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    expand = undecoded.expand
    monkeypatch.setattr(undecoded, "expand", lambda *row: decoded.append(1) or expand(*row))
    history = LMDBHistory(tmp_path / "history", codec=codec)
    settings = {"estimator": "anchored", "tolerance_rate": None}
    assert recover(TrimmedMean(trim=1), history, **settings) == ESTIMATED
    # Of six clients: in six rounds of each recovery for the estimator to learn from, and where rows
    # are kept in all others but the last two, too.
    assert len(decoded) == (0 if codec == "float32" else 6 * (6 + 6 + ESTIMATED))


@needs_numba
@pytest.mark.parametrize("estimator", ["anchored", "paired"])
def test_products_of_the_next_round_are_computed_along(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedrec.functional.kernels import _numba_pairs

    dots, sizes = _numba_pairs.dots, []

    def counted(matrix, *rest):
        sizes.append(len(matrix))
        return dots(matrix, *rest)

    monkeypatch.setattr(_numba_pairs, "dots", counted)
    assert recover(FedAvg(), estimator=estimator, tolerance_rate=None) == ESTIMATED
    # Six clients have two pairs each. Estimates: once after each of the three times that clients
    # were asked, and in every round where rows are kept.
    asked = (
        5 if estimator == "anchored" else 0
    )  # of six rounds, the first has nothing to learn from
    assert sizes.count(12) == (asked + 3) + (asked + ESTIMATED)


def test_rows_are_computed_for_who_asks_for_them() -> None:
    like = CohortUpdates(
        client_ids=("a", "b"), updates=torch.zeros(2, 3), num_samples=torch.tensor([1, 2])
    )
    calls = []

    def compute() -> Tensor:
        calls.append(1)
        return torch.arange(6.0).view(2, 3)

    sent = AggregatedUpdates(torch.ones(3), compute, like)
    assert sent.client_ids == like.client_ids
    assert not calls
    assert torch.equal(sent.select(["b"]).updates, torch.tensor([[3.0, 4.0, 5.0]]))
    assert sent.num_bytes == 24
    assert calls == [1]
    # What is made of it has rows of its own, and no aggregate.
    assert (
        type(sent.select(["b"])) is type(replace(sent, updates=torch.zeros(2, 3))) is CohortUpdates
    )
