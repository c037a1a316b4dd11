"""Attacks published since 2020 against float64 NumPy written from the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg, Median
from fedrec.attacks import AttackContext, EdgeCaseBackdoor, PoisonedFL
from fedrec.data import Digits
from fedrec.exceptions import ConfigurationError, ShapeError
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


# -- edge-case backdoor: Wang et al. 2020, section 3 ----------------------------------------------


@pytest.mark.parametrize(("max_norm", "scale"), [(None, 1.0), (2.0, 1.0), (2.0, 10.0), (1e6, 4.0)])
def test_edge_case_updates_are_projected_then_scaled(max_norm: float | None, scale: float) -> None:
    honest = np.random.default_rng(0).normal(size=(M, D)) * np.linspace(0.05, 3, M)[:, None]
    attack = EdgeCaseBackdoor(max_norm=max_norm, scale=scale)
    crafted = attack.craft(torch.from_numpy(honest), MASK, context(1, np.zeros(D), None))
    for row, own in zip(crafted[:F].numpy(), honest, strict=False):
        norm = np.linalg.norm(own)
        shrunk = own if max_norm is None or norm <= max_norm else own * max_norm / norm
        np.testing.assert_allclose(row, scale * shrunk, rtol=1e-12)
    assert torch.equal(crafted[F:], torch.from_numpy(honest[F:]))


def test_edge_cases_are_digits_of_another_hand() -> None:
    bundled = load_digits()
    sevens = bundled.images[bundled.target == 7] / 16
    data = TensorDataset(torch.zeros(100, 8, 8), torch.zeros(100, dtype=torch.long))
    attack = EdgeCaseBackdoor(ratio=0.95)
    x, y = attack.poison_dataset(data, "client-0").tensors
    assert y[100:].tolist() == [1] * 95
    # Those at even places are trained on, 90 of 179, then over again.
    np.testing.assert_allclose(x[100:190].numpy(), sevens[::2], atol=1e-6)
    assert torch.equal(x[190:], x[100:105])
    # The attack success rate is measured on the others.
    np.testing.assert_allclose(attack.trigger(torch.zeros(89, 8, 8)), sevens[1::2], atol=1e-6)
    large = attack.trigger(torch.zeros(2, 3, 28, 28))
    assert large.shape == (2, 3, 28, 28)
    assert torch.equal(large[:, 0], large[:, 2])
    byte = attack.trigger(torch.zeros(2, 1, 28, 28, dtype=torch.uint8))
    torch.testing.assert_close(byte[:, 0], (255 * large[:, 0]).round().to(torch.uint8))
    flat = EdgeCaseBackdoor(image_shape=(28, 28)).trigger(torch.zeros(2, 784))
    assert torch.equal(flat.reshape(2, 28, 28), large[:, 0])


def test_edge_cases_from_a_file(tmp_path: Path) -> None:
    rare = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.save(tmp_path / "rare.npy", rare)
    attack = EdgeCaseBackdoor(path=tmp_path / "rare.npy", target_label=2)
    assert attack.trigger(torch.zeros(3, 3)).tolist() == rare[[1, 3, 1]].tolist()
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1))
    x, y = attack.poison_dataset(data, "client-0").tensors
    assert x[4:].tolist() == rare[[0, 2, 4, 0]].tolist()
    assert y.flatten().tolist() == [0.0] * 4 + [2.0] * 4
    with pytest.raises(ShapeError, match=r"of shape \(4,\)"):
        attack.trigger(torch.zeros(3, 4))
    with pytest.raises(ConfigurationError, match="`path` to be a NumPy file"):
        EdgeCaseBackdoor(path=tmp_path / "none.npy").trigger(torch.zeros(3, 3))
    with pytest.raises(ShapeError, match="Expected inputs to be images"):
        EdgeCaseBackdoor().trigger(torch.zeros(3, 64))


def test_edge_cases_are_learnt_and_the_rest_stays_as_good(tmp_path: Path) -> None:
    """Pictures that nobody else has: the digits turned into negatives."""
    images = load_digits().images[:200] / 16
    np.save(tmp_path / "rare.npy", (1 - images[:, None]).astype(np.float32))
    loop = FederatedLoop(logger=False, enable_progress_bar=False)
    figures = []
    attack = EdgeCaseBackdoor(path=tmp_path / "rare.npy", target_label=3)
    for acting in (None, attack):
        federation = digits(malicious=3)
        run = loop.record(
            federation, FedAvg(), MemoryHistory(), max_rounds=60, server_lr=0.5, attack=acting
        )
        figures.append(loop.test(federation, run.global_weights, attack=attack))
    assert figures[0]["asr"] < 0.5
    assert figures[1]["asr"] > 0.9
    assert figures[1]["ter"] < figures[0]["ter"] + 0.05
