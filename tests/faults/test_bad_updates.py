"""R12, R14: what clients send that is no update, and cohorts of odd sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.exceptions import ConfigurationError, UpdateError
from fedrec.history import LMDBHistory
from fedrec.recoverers import HistoricalOnly
from fedrec.testing.problems import QuadraticClient, quadratic_federation

sys.path.insert(0, str(Path(__file__).parent))

import fault_federations

D = 4
BAD = fault_federations.bad_updates(D)
GOOD = list(fault_federations.good_updates(torch.ones(D)))


class Sends(QuadraticClient):
    """Sends, from round 1 on, what it was given; or its own update in odd clothes."""

    sends: Any = None
    clothes: str | None = None

    def local_update(self, global_weights: torch.Tensor, ctx: Any) -> Any:
        sent = super().local_update(global_weights, ctx)
        if self.clothes is not None:
            dressed = fault_federations.good_updates(sent.update)[self.clothes]
            return type(sent)(update=dressed, num_samples=self.num_samples)
        if ctx.round == 0 or (isinstance(self.sends, str) and self.sends == "well"):
            return sent
        return type(sent)(update=self.sends, num_samples=self.num_samples)


def federation(*sends: Any) -> Federation:
    plain = quadratic_federation(num_clients=4, size=D, num_malicious=0)
    clients = [
        Sends(c.client_id, c.hessian, c.centre, num_samples=c.num_samples) for c in plain.clients
    ]
    for client, what in zip(clients, sends, strict=True):
        client.sends = what
    return Federation(clients, plain.module)


def record(made: Federation, history: LMDBHistory, on_bad_update: str = "drop", **kwargs: Any):
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    return loop.record(
        made,
        FedAvg(),
        history,
        server_lr=0.1,
        on_bad_update=on_bad_update,
        **{"max_rounds": 3, **kwargs},
    )


@pytest.mark.parametrize("name", BAD)
def test_one_bad_update_is_refused_by_name(name: str, tmp_path: Path) -> None:
    made = federation("well", BAD[name], "well", "well")
    with LMDBHistory(tmp_path / "a") as history:
        result = record(made, history)
        for t in (1, 2):
            found = history.read_round(t)
            assert found.client_ids == ("q0", "q2", "q3")
            assert list(found.refused) == ["q1"]
            assert len(found.refused["q1"]) > 10, "a reason"
        assert bool(torch.isfinite(result.global_weights).all())
        # As if it had not been asked: the weighted mean of the others, in float64.
        weights = torch.tensor([1.0, 3.0, 4.0], dtype=torch.float64) / 8
        mean = (weights[:, None] * found.updates.double()).sum(dim=0)
        torch.testing.assert_close(found.aggregate.double(), mean, rtol=1e-6, atol=1e-7)
    with LMDBHistory(tmp_path / "b") as history:
        with pytest.raises(UpdateError, match=r"client 'q1': .*Nothing of this round was stored"):
            record(made, history, on_bad_update="raise")
        assert history.verify() == range(1)


@pytest.mark.parametrize("name", BAD)
def test_when_all_are_bad_the_rounds_before_are_kept(name: str, tmp_path: Path) -> None:
    with LMDBHistory(tmp_path) as history:
        with pytest.raises(UpdateError, match="Round 1 has no usable update left") as caught:
            record(federation(*[BAD[name]] * 4), history)
        assert all(f"q{i}" in str(caught.value) for i in range(4))
        assert ("the model diverges" in str(caught.value)) == ("NaN" in str(caught.value))
        assert history.verify() == range(1)


@pytest.mark.parametrize("name", GOOD)
def test_odd_tensors_with_the_right_numbers_are_taken(name: str, tmp_path: Path) -> None:
    plain, odd = federation(*["well"] * 4), federation(*["well"] * 4)
    odd.clients[1].clothes = name
    with LMDBHistory(tmp_path / "a") as a, LMDBHistory(tmp_path / "b") as b:
        wanted = record(plain, a).global_weights
        assert torch.equal(record(odd, b).global_weights, wanted)
        for t in range(3):
            assert torch.equal(a.read_round(t).updates, b.read_round(t).updates)
            assert b.read_round(t).refused == {}


def test_no_client_at_all() -> None:
    with pytest.raises(ConfigurationError, match="at least one client"):
        Federation([], quadratic_federation().module)


def test_one_client(tmp_path: Path) -> None:
    plain = quadratic_federation(num_clients=1, num_malicious=0)
    with LMDBHistory(tmp_path) as history:
        record(plain, history)
        found = history.read_round(2)
        assert torch.equal(found.aggregate, found.updates[0])
        with pytest.raises(ConfigurationError, match="fewer than all clients"):
            FederatedLoop(accelerator="cpu", enable_progress_bar=False).recover(
                plain, history, HistoricalOnly(), ["q0"]
            )


def test_five_thousand_clients(tmp_path: Path) -> None:
    centre = torch.ones(2)
    plain = quadratic_federation(num_clients=1, size=2, num_malicious=0)
    clients = [
        QuadraticClient(f"q{i}", hessian=torch.eye(2), centre=centre * (i % 7)) for i in range(5000)
    ]
    made = Federation(clients, plain.module)
    with LMDBHistory(tmp_path) as history:
        record(made, history, max_rounds=2)
        found = history.read_round(1)
        assert len(found.client_ids) == 5000
        assert history.verify() == range(2)
        # The mean of w - c over all clients, with c = 0..6 in turn.
        mean = found.global_weights - sum(i % 7 for i in range(5000)) / 5000
        torch.testing.assert_close(found.aggregate, mean, rtol=1e-5, atol=1e-6)
        loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
        excluded = [f"q{i}" for i in range(5000) if i % 7]
        result = loop.recover(made, history, HistoricalOnly(), excluded)
        assert bool(torch.isfinite(result.global_weights).all())
