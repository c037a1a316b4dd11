"""Attacks published since 2020 against float64 NumPy written from the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg, Median
from fedrec.attacks import AttackContext, PoisonedFL
from fedrec.data import Digits
from fedrec.functional import is_aligned
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

M, D, F = 10, 400, 3
LAYOUT = ParameterVector(nn.Linear(D, 1, bias=False))
MASK = torch.arange(M) < F


def context(t: int, weights: np.ndarray, aggregate: np.ndarray | None, **more: Any):
    last = None if aggregate is None else torch.from_numpy(aggregate)
    return AttackContext(
        round=t,
        phase="record",
        seed=9,
        purpose="attack",
        client_ids=tuple(f"client-{i:02d}" for i in range(M)),
        global_weights=torch.from_numpy(weights),
        layout=LAYOUT,
        last_aggregate=last,
        **more,
    )


# -- PoisonedFL: Xie et al. 2025, section 4, on differences of models: w(t+1) = w(t) + g(t) -------


class ByDefinition:
    """The attacker of the paper, who adds; it keeps all that it has seen."""

    def __init__(self, s: np.ndarray, period: int, c: float = 8.0) -> None:
        self.s, self.period, self.c, self.mine = s, period, c, np.zeros(D)
        self.models: list[np.ndarray] = []
        self.factors: list[float] = []

    def next(self, w: np.ndarray) -> np.ndarray:
        self.models.append(w.copy())
        t = len(self.models) - 1
        if t > 0 and t % self.period == 0:
            signs = np.sign(w - self.models[t - self.period])
            aligned = int((signs == self.s).sum())
            # Binomial with 400 trials: 99 % are below 224.
            if aligned < 224 and 0.7 * self.c >= 0.5:
                self.c *= 0.7
        self.factors.append(self.c)
        if t == 0:
            return np.zeros(D)
        g = w - self.models[t - 1]
        norm = np.linalg.norm(g)
        mine = self.mine * norm / np.linalg.norm(self.mine) if self.mine.any() else 0.0
        v = np.abs(g - mine)
        self.mine = self.c * norm * v / np.linalg.norm(v) * self.s
        return self.mine


@pytest.mark.parametrize("passes", [True, False])
def test_poisonedfl(passes: bool) -> None:
    rng = np.random.default_rng(3)
    eta, attack = 0.5, PoisonedFL(period=4)
    generator = torch_generator(9, "attack")
    s = 2.0 * torch.randint(0, 2, (D,), generator=generator).double().numpy() - 1
    attacker, w, aggregate = ByDefinition(s, period=4), rng.normal(size=D), None
    for t in range(19):
        honest = rng.normal(size=(M, D))
        ctx = context(t, w, aggregate, server_lr=eta)
        crafted = attack.craft(torch.from_numpy(honest), MASK, ctx)
        # Asked again in the same round (a recovery does), it sends the same.
        again = attack.craft(torch.from_numpy(honest[:4]), MASK[:4], ctx)
        assert torch.equal(again, crafted[:4])
        want = -attacker.next(w) / eta  # the server subtracts eta times what is sent
        for row in crafted[:F].numpy():
            np.testing.assert_allclose(row, want, rtol=1e-9, atol=1e-12)
        assert torch.equal(crafted[F:], torch.from_numpy(honest[F:]))
        assert attack.state_dict()["factor"] == pytest.approx(attacker.factors[-1])
        received = crafted.numpy() if passes else honest
        aggregate = np.clip(received, -3, 3).mean(axis=0)
        w = w - eta * aggregate
    # Tests in rounds 4, 8, 12 and 16: all passed, or all failed.
    assert attacker.c == pytest.approx(8.0 if passes else 8.0 * 0.7**4)


def test_the_scale_has_a_floor() -> None:
    rng = np.random.default_rng(0)
    attack, w = PoisonedFL(period=1, scale=1.0), rng.normal(size=D)
    for t in range(6):
        attack.craft(
            torch.zeros(M, D, dtype=torch.float64), MASK, context(t, w, rng.normal(size=D))
        )
        w = rng.normal(size=D)
    assert attack.state_dict()["factor"] == pytest.approx(0.7)  # 0.49 would be below 0.5


def test_alignment_is_tested_at_one_percent() -> None:
    # The authors' tables: 70,415 of 139,960 coordinates, 603,618 of 1,204,682.
    for d, least in ((139_960, 70_415), (1_204_682, 603_618)):
        signs = torch.ones(d)
        for count in (least - 2, least + 2):
            moved = torch.where(torch.arange(d) < count, 1.0, -1.0)
            assert is_aligned(moved, signs) == (count > least)


def digits(**kwargs: Any) -> Federation:
    torch.manual_seed(0)
    return Federation.from_data(
        Digits(num_clients=10), MLP(in_features=64), batch_size=32, **kwargs
    )


def test_poisonedfl_hurts_and_moves_the_weights_along_its_signs() -> None:
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    ters = {}
    for attack in (None, PoisonedFL()):
        for rule in (FedAvg(), Median()):
            federation, history = digits(fake_clients=4), MemoryHistory()
            run = loop.record(
                federation, rule, history, max_rounds=30, server_lr=0.3, attack=attack
            )
            ters[type(rule), attack is None] = loop.test(federation, run.global_weights)["ter"]
            d = federation.layout.num_parameters
            signs = 2 * torch.randint(0, 2, (d,), generator=torch_generator(0, "attack")) - 1
            moved = run.global_weights - history.read_round(0).global_weights
            assert is_aligned(moved, signs.float()) == (attack is not None)
    # A median holds for as many rounds as these; a mean does not.
    assert ters[FedAvg, False] > ters[FedAvg, True] + 0.2
