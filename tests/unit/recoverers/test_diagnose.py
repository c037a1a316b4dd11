"""Comparing estimates with exact updates: right figures, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.aggregators import FedAvg, TrimmedMean
from fedrec.attacks import Mimic, TrimAttack
from fedrec.attacks.base import Attack
from fedrec.callbacks import Callback
from fedrec.exceptions import ConfigurationError
from fedrec.functional import relative_errors
from fedrec.history import MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.metrics.estimate_errors import EstimateErrors, read_estimate_errors
from fedrec.recoverers import FedRecover
from fedrec.testing.problems import QuadraticClient, quadratic_federation
from fedrec.types import CohortUpdates, RunResult

ROUNDS = 14


class CubicClient(QuadraticClient):
    """Its Hessian changes with the weights, so estimates have errors."""

    def local_update(self, global_weights, ctx):
        sent = super().local_update(global_weights, ctx)
        return type(sent)(
            update=sent.update + 0.3 * global_weights**3, num_samples=sent.num_samples
        )


class StopAfter(Callback):
    """Behaves as if the user had pressed Ctrl-C in a round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_end(self, loop, ctx, metrics):
        if ctx.phase == "recover" and ctx.round == self.round:
            raise KeyboardInterrupt


def federation():
    made = quadratic_federation(num_clients=6, num_malicious=2)
    for client in made.clients:
        client.__class__ = CubicClient
    return made


def loop(folder: Path | None = None, *callbacks: Callback) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu",
        enable_progress_bar=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        checkpoint_every=0.0,
    )


def recovered(
    diagnose: bool | int,
    folder: Path | None = None,
    *callbacks: Callback,
    aggregator=None,
    attack: Attack | None = None,
    estimator: str = "anchored",
    resume: bool = False,
) -> RunResult:
    """Record, and recover without one of the two malicious clients."""
    clients, history = federation(), MemoryHistory()
    rule = aggregator or FedAvg()
    loop().record(clients, rule, history, max_rounds=ROUNDS, server_lr=0.2, attack=attack)
    method = FedRecover(
        warmup_rounds=3,
        correction_period=5,
        final_rounds=1,
        tolerance_rate=0.02,
        estimator=estimator,
        diagnose=diagnose,
    )
    return loop(folder, *callbacks).recover(
        clients, history, method, clients.malicious[:1], attack=attack, resume=resume
    )


@pytest.mark.parametrize("estimator", ["anchored", "average", "paired", "history"])
@pytest.mark.parametrize("aggregator", [FedAvg(), TrimmedMean(trim=1)])
@pytest.mark.parametrize("attack", [None, TrimAttack(), Mimic()])
def test_no_bit_and_no_cost_changes(aggregator, attack, estimator) -> None:
    settings = {"aggregator": aggregator, "attack": attack, "estimator": estimator}
    plain, compared = recovered(False, **settings), recovered(True, **settings)
    assert torch.equal(plain.global_weights, compared.global_weights)
    assert plain.ledger.entries == compared.ledger.entries
    assert plain.diagnostics == compared.diagnostics
    assert plain.estimate_errors == ()
    assert compared.estimate_errors


def test_every_estimate_that_is_used_is_compared() -> None:
    result = recovered(True)
    compared = {(e.round, e.client_id) for e in result.estimate_errors}
    asked = {(e.round, e.client_id) for e in result.ledger.entries}
    everyone = {(t, c) for t in range(ROUNDS) for c in result.ledger.num_rounds}
    assert compared.isdisjoint(asked)
    assert compared | asked == everyone
    assert len(result.estimate_errors) == result.diagnostics["estimated_updates"]


def test_errors_of_history_reused_are_what_numpy_says() -> None:
    """With `estimator="history"`, the estimate is the recorded update, known without us."""
    clients, history = federation(), MemoryHistory()
    loop().record(clients, FedAvg(), history, max_rounds=ROUNDS, server_lr=0.2)
    seen: dict[int, np.ndarray] = {}

    class Watch(Callback):
        def on_round_start(self, loop, ctx):
            seen[ctx.round] = ctx.global_weights.double().numpy()

    method = FedRecover(
        warmup_rounds=3, tolerance_rate=None, final_rounds=1, estimator="history", diagnose=True
    )
    result = loop(None, Watch()).recover(clients, history, method, ["q5"])
    hessians = {
        c.client_id: (c.hessian.double().numpy(), c.centre.double().numpy())
        for c in clients.clients
    }
    for error in result.estimate_errors:
        w = seen[error.round]
        matrix, centre = hessians[error.client_id]
        exact = matrix @ w - matrix @ centre + 0.3 * w**3
        record = history.read_round(error.round, [error.client_id])
        estimate = record.updates[0].double().numpy()
        distance = np.sqrt(((estimate - exact) ** 2).sum() / (exact**2).sum())
        cosine = (estimate @ exact) / np.sqrt((estimate @ estimate) * (exact @ exact))
        assert error.relative_error == pytest.approx(distance, rel=1e-4)
        assert error.cosine == pytest.approx(cosine, abs=1e-5)
    assert max(e.relative_error for e in result.estimate_errors) > 0.05


def test_some_clients_are_drawn_the_same_each_time() -> None:
    whole = {(e.round, e.client_id): e for e in recovered(True).estimate_errors}
    some = recovered(2).estimate_errors
    assert some == recovered(2).estimate_errors
    assert {len([e for e in some if e.round == t]) for t in {e.round for e in some}} == {2}
    assert all(whole[e.round, e.client_id] == e for e in some)
    assert {e.client_id for e in some} == {c for _, c in whole}  # not always the same two


@pytest.mark.parametrize("stop", [5, 9])
def test_an_interrupted_recovery_has_every_row_once(tmp_path: Path, stop: int) -> None:
    whole = recovered(True, tmp_path / "whole", attack=TrimAttack())
    path = tmp_path / "cut" / "recover" / "FedRecover" / "diagnostics.csv"
    clients, history = federation(), MemoryHistory()
    loop().record(clients, FedAvg(), history, max_rounds=ROUNDS, server_lr=0.2, attack=TrimAttack())

    def go_on(*callbacks: Callback) -> RunResult:
        method = FedRecover(
            warmup_rounds=3, correction_period=5, final_rounds=1, tolerance_rate=0.02, diagnose=True
        )
        return loop(tmp_path / "cut", *callbacks).recover(
            clients, history, method, clients.malicious[:1], attack=TrimAttack(), resume=True
        )

    with pytest.raises(KeyboardInterrupt):
        go_on(StopAfter(stop))
    with path.open("a") as file:
        file.write("q0,")  # as a killed process may leave it
    resumed = go_on()
    assert resumed.estimate_errors == whole.estimate_errors
    assert read_estimate_errors(path) == list(whole.estimate_errors)
    assert torch.equal(resumed.global_weights, whole.global_weights)
    again = go_on()  # finished: nothing is done again
    assert again.estimate_errors == whole.estimate_errors
    assert set(resumed.client_seconds) == {e.reason for e in whole.ledger.entries}


def test_another_recovery_starts_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "recover" / "FedRecover" / "diagnostics.csv"
    recovered(True, tmp_path)
    assert path.exists()
    recovered(False, tmp_path)
    assert not path.exists()


def test_zero_updates() -> None:
    exact = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    estimates = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    assert relative_errors(estimates, exact).tolist() == [0.0, float("inf"), 1.0]


def test_a_row_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "diagnostics.csv"
    errors = EstimateErrors(path.parent, 0)
    for t, client_id, exact in ((3, 'a,"b', [0.0, 0.0]), (4, "c", [1.0, 0.3])):
        estimated, sent = (
            CohortUpdates(
                client_ids=(client_id,),
                updates=torch.tensor([update]),
                num_samples=torch.tensor([10]),
            )
            for update in ([1.0, 0.1], exact)
        )
        errors.add(t, estimated, sent)
    errors.close()
    assert read_estimate_errors(path) == errors.rows
    assert EstimateErrors(path.parent, 4).rows == errors.rows[:1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"diagnose": 0},
            "Expected `diagnose` to be true, false, or an integer of at least 1, but got 0",
        ),
        ({"diagnose": True, "estimator": "none"}, "without estimates there is nothing to compare"),
    ],
)
def test_mistakes(settings, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FedRecover(**settings)
