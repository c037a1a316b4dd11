"""Crab against an independent float64 computation of its selection and calibration."""

import copy

import numpy as np
import pytest
import torch

from fedrec import Callback, FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.exceptions import ConfigurationError
from fedrec.functional import loss_windows, softmax_divergence
from fedrec.history import HistoryView, MemoryHistory
from fedrec.recoverers import Crab, RollbackRetrain
from fedrec.testing.problems import classifying_federation, quadratic_federation

ROUNDS, LR = 30, 0.5


class Listen(Callback):
    """Keeps what clients send, by round."""

    def __init__(self) -> None:
        self.sent = {}

    def on_updates(self, loop, ctx, updates):
        self.sent[ctx.round] = updates


def make_loop(*callbacks: Callback) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu", enable_progress_bar=False, logger=False, callbacks=list(callbacks)
    )


def recorded():
    federation, history = classifying_federation(), MemoryHistory()
    final = make_loop().record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR)
    return federation, history, final.global_weights


def divergence(before: dict, after: dict) -> float:
    total = 0.0
    for name in before:
        rows = []
        for weights in (before[name], after[name]):
            e = np.exp(np.atleast_2d(weights.double().numpy()))
            rows.append(e / e.sum(axis=-1, keepdims=True))
        total += float((rows[0] * np.log(rows[0] / rows[1])).sum())
    return total


@pytest.mark.parametrize("bound", [0.0, 0.2])
def test_crab_selects_and_calibrates(bound: float) -> None:
    federation, history, final = recorded()
    listen = Listen()
    result = make_loop(listen).recover(
        federation, history, Crab(max_sensitivity=bound), federation.malicious
    )
    records = [history.read_round(t) for t in range(ROUNDS)]
    path = [*(r.global_weights for r in records), final]
    first = int(result.diagnostics["rollback_round"])
    rolled = RollbackRetrain(max_sensitivity=bound)
    rolled.start(HistoryView(history, [c for c in federation.client_ids if c != "c4"]), ROUNDS)
    assert first == rolled.diagnostics()["rollback_round"]
    assert (first > 0) == (bound > 0)

    module, (x, y) = copy.deepcopy(federation.module).double(), federation.server_data.tensors
    losses, moves = [], []
    for t in range(first, ROUNDS):
        federation.layout.load(module, path[t].double())
        p = torch.softmax(module(x.double()), dim=1)[torch.arange(len(y)), y]
        losses.append(float(-p.log().mean().detach()))
        moves.append(divergence(*map(federation.layout.unflatten, path[t : t + 2])))
    selected, window = [], []
    for t, loss in enumerate(losses):
        if window and loss < 0.9 * losses[window[0]]:
            selected += sorted(window, key=lambda i: moves[i])[-max(1, int(0.6 * len(window))) :]
            window = []
        window.append(t)
    selected += sorted(window, key=lambda i: moves[i])[-max(1, int(0.6 * len(window))) :]
    selected = sorted(first + t for t in selected)
    assert 3 < len(selected) < ROUNDS - first
    assert result.diagnostics["selected_rounds"] == len(selected)

    w = path[first].double().numpy()
    asked = []
    for t in selected:
        old = records[t].updates.double().numpy()[:4]  # c4 is excluded
        cosines = old @ records[t].aggregate.double().numpy()
        cosines /= np.linalg.norm(old, axis=1)
        best = np.sort(np.argsort(cosines)[-2:])  # 70% of 4 clients
        new = old[best]
        if t > first:
            asked += [(f"c{i}", t) for i in best]
            assert listen.sent[t].client_ids == tuple(f"c{i}" for i in best)
            sent = listen.sent[t].updates.double().numpy()
            lengths = np.linalg.norm(new, axis=1) / np.linalg.norm(sent, axis=1)
            new = lengths[:, None] * sent
        w = w - LR * new.mean(axis=0)  # all have 12 samples
    np.testing.assert_allclose(result.global_weights.numpy(), w, atol=1e-5)
    assert [(e.client_id, e.round) for e in result.ledger.entries] == asked
    assert result.ledger.acp() == pytest.approx(1 - len(asked) / (4 * ROUNDS))


def test_windows_end_when_the_loss_has_dropped() -> None:
    # 1.8 is not below 90% of 2, 1.7 is; 3 is a rise; 1.53 is 90% of 1.7, 1.5 is below.
    found = loss_windows([2.0, 1.8, 1.7, 3.0, 1.5, 1.5], drop=0.1)
    assert found == [range(2), range(2, 4), range(4, 6)]
    assert loss_windows([1.0], drop=0.5) == [range(1)]


def test_divergence_is_kullback_leibler() -> None:
    rng = np.random.default_rng(0)
    before, after = ([rng.normal(size=(3, 4)), rng.normal(size=5)] for _ in range(2))
    found = softmax_divergence(map(torch.from_numpy, before), map(torch.from_numpy, after))
    expected = divergence(
        *({i: torch.from_numpy(x) for i, x in enumerate(m)} for m in (before, after))
    )
    assert found == pytest.approx(expected, rel=1e-12)


def test_crab_needs_data_at_the_server() -> None:
    federation, history = quadratic_federation(), MemoryHistory()
    make_loop().record(federation, FedAvg(), history, max_rounds=3, server_lr=0.3)
    with pytest.raises(ConfigurationError, match="Crab needs clean data at the server"):
        make_loop().recover(federation, history, Crab(), federation.malicious)
