"""Another malicious client is found after a recovery."""

import numpy as np
import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.testing.problems import VectorModule, quadratic_federation

ROUNDS, LR = 40, 0.3
ATTACK = SignFlip(scale=0.5)


def test_recover_again_without_both_and_go_on_training() -> None:
    federation, history = quadratic_federation(num_malicious=2), MemoryHistory()
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False, logger=False)
    loop.record(federation, FedAvg(), history, max_rounds=ROUNDS, server_lr=LR, attack=ATTACK)
    untouched = [history.read_round(t).updates.clone() for t in history.rounds()]

    def recover(recoverer, exclude):
        result = loop.recover(federation, history, recoverer, exclude, attack=ATTACK)
        return result.global_weights

    method = FedRecover(warmup_rounds=5, correction_period=8, final_rounds=2)
    first = recover(method, ["q4"])
    second = recover(method, ["q3", "q4"])

    # The first recovery left no trace, neither in the history nor in the method.
    assert all(torch.equal(history.read_round(t).updates, untouched[t]) for t in history.rounds())
    assert torch.equal(second, recover(FedRecover(**method.init_args()), ["q3", "q4"]))
    scratch = recover(TrainFromScratch(), ["q3", "q4"])
    assert float((second - scratch).norm()) < 0.1 * float((first - scratch).norm())

    # On they go: plain gradient descent from the recovered weights, in float64.
    module = VectorModule(size=4)
    with torch.no_grad():
        module.weight.copy_(second)
    remaining = Federation(federation.clients[:3], module)
    later = loop.record(remaining, FedAvg(), MemoryHistory(), max_rounds=20, server_lr=LR)
    w, p = second.double().numpy(), np.array([1, 2, 3]) / 6
    for _ in range(20):
        gradients = [
            c.hessian.double().numpy() @ (w - c.centre.double().numpy()) for c in remaining.clients
        ]
        w = w - LR * p @ np.array(gradients)
    np.testing.assert_allclose(later.global_weights.numpy(), w, atol=1e-5)
