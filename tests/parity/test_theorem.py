"""Theorem 1 of the paper, with its M measured along the run."""

import numpy as np
import pytest

from fedrec import FederatedLoop
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.functional import recovery_bound
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import quadratic_federation

ROUNDS, LR = 40, 0.4
ATTACK = SignFlip(scale=0.5)


class Measured(FedRecover):
    """Keeps the trajectory, and the largest error of an estimate it uses."""

    def step(self, t, global_weights, ctx):
        if t == 0:
            self.trajectory, self.error = [], 0.0
        self.trajectory.append(global_weights.double().numpy())
        if self.exact_reason(t, ctx.max_rounds) is None:
            record = ctx.history(t)
            estimates = self._estimates(record, global_weights)[0].updates.double().numpy()
            for client_id, estimate in zip(record.client_ids, estimates, strict=True):
                exact = type(self).gradients[client_id](self.trajectory[-1])
                self.error = max(self.error, float(np.linalg.norm(estimate - exact)))
        return super().step(t, global_weights, ctx)


@pytest.mark.parametrize("estimator", ["paired", "anchored", "history"])
def test_distance_stays_below_the_bound(estimator: str) -> None:
    federation, history = quadratic_federation(size=6), MemoryHistory()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=ATTACK)
    benign = [c for c in federation.clients if c.client_id not in federation.malicious]
    hessians = [c.hessian.double().numpy() for c in benign]
    centres = [c.centre.double().numpy() for c in benign]
    spectra = np.array([np.linalg.eigvalsh(a) for a in hessians])
    mu = spectra.min()
    assert spectra.max() * LR <= 1, "the theorem asks for a learning rate of at most 1/L"
    Measured.gradients = {
        c.client_id: lambda w, a=a, b=b: a @ (w - b)
        for c, a, b in zip(benign, hessians, centres, strict=True)
    }
    recoverer = Measured(
        warmup_rounds=4,
        correction_period=8,
        final_rounds=0,
        tolerance_rate=None,
        estimator=estimator,
    )
    result = loop.recover(federation, history, recoverer, federation.malicious)
    recovered = [*recoverer.trajectory, result.global_weights.double().numpy()]

    w, p = np.zeros(6), np.array([c.num_samples for c in benign], dtype=float)
    p, ratios = p / p.sum(), []
    for t in range(ROUNDS):
        w = w - LR * p @ np.array([a @ (w - b) for a, b in zip(hessians, centres, strict=True)])
        distance = np.linalg.norm(recovered[t + 1] - w)
        q = np.sqrt(1 - LR * mu)
        bound = (1 - q ** (t + 1)) / (1 - q) * LR * recoverer.error
        assert bound == pytest.approx(recovery_bound(t + 1, recoverer.error, LR, mu))
        assert distance <= bound + 1e-6
        ratios.append(distance / bound)
    # It is no empty statement: an error five times smaller would not explain the distance.
    assert max(ratios) > 0.1
    scratch = loop.recover(federation, history, TrainFromScratch(), federation.malicious)
    np.testing.assert_allclose(scratch.global_weights.numpy(), w, atol=1e-5)
