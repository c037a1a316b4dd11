"""Attacks against float64 NumPy written from the papers, and cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from fedrec.aggregators import FedAvg
from fedrec.attacks import (
    ALIE,
    IPM,
    MPAF,
    AttackContext,
    BackdoorAttack,
    GaussianNoise,
    LabelFlip,
    Mimic,
    ModelReplacement,
    Neurotoxin,
    SignFlip,
    TrimAttack,
)
from fedrec.functional.attack.alie import alie_quantile
from fedrec.functional.attack.neurotoxin import outside_top
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

M, D = 13, 60
MALICIOUS = [0, 5, 12]
BENIGN = [i for i in range(M) if i not in MALICIOUS]
IDS = tuple(f"client-{i:02d}" for i in range(M))


def context(d: int = D, **kwargs: Any) -> AttackContext:
    module = nn.Linear(d, 1, bias=False)
    values: dict[str, Any] = {
        "round": 4,
        "phase": "record",
        "seed": 9,
        "purpose": "attack",
        "client_ids": IDS,
        "global_weights": torch.zeros(d),
        "layout": ParameterVector(module),
        **kwargs,
    }
    return AttackContext(**values)


def draw(seed: int, common: float = 0.5, rows: int = M, d: int = D) -> torch.Tensor:
    """Draw honest updates with something in common, of very different sizes by coordinate."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=d))
    x = (common * rng.normal(size=d) + rng.normal(size=(rows, d))) * scales
    return torch.from_numpy(x.astype(np.float32))


@pytest.fixture
def mask() -> torch.Tensor:
    mask = torch.zeros(M, dtype=torch.bool)
    mask[MALICIOUS] = True
    return mask


def sent(attack: Any, honest: torch.Tensor, mask: torch.Tensor, **kwargs: Any) -> np.ndarray:
    """Craft, check that benign rows are the same bits, and return the malicious ones."""
    crafted = attack.craft(honest, mask, context(honest.shape[1], **kwargs))
    assert torch.equal(crafted[~mask], honest[~mask])
    return crafted[mask].double().numpy()


def known(honest: torch.Tensor, full_knowledge: bool) -> np.ndarray:
    return honest[BENIGN if full_knowledge else MALICIOUS].double().numpy()


# -- sign flip, noise, labels -------------------------------------------------------------------


def test_sign_flip(mask: torch.Tensor) -> None:
    """Li et al. 2019: the opposite, scaled."""
    honest = draw(0)
    np.testing.assert_allclose(
        sent(SignFlip(scale=2.5), honest, mask), -2.5 * honest.double().numpy()[MALICIOUS]
    )


@pytest.mark.parametrize("additive", [False, True])
def test_gaussian_noise(mask: torch.Tensor, additive: bool) -> None:
    """Blanchard et al. 2017: noise of standard deviation 200, drawn for every attacker."""
    honest = draw(0)
    noise = np.stack(
        [
            torch.randn(D, generator=torch_generator(9, "attack", 4, IDS[i])).double().numpy()
            for i in MALICIOUS
        ]
    )
    own = honest.double().numpy()[MALICIOUS] if additive else 0.0
    np.testing.assert_allclose(
        sent(GaussianNoise(additive=additive), honest, mask), own + 200 * noise, rtol=1e-5
    )


def test_gaussian_noise_is_gaussian() -> None:
    honest = torch.zeros(2, 40_000)
    one, two = sent(GaussianNoise(std=3.0), honest, torch.tensor([True, True]))
    # The standard errors are 0.015, 0.011 and 0.005.
    assert abs(one.mean()) < 0.06
    assert abs(one.std() - 3.0) < 0.05
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02


def test_label_flip() -> None:
    """Fang et al. 2020: label l becomes L - l - 1."""
    labels = torch.tensor([0, 3, 9, 9, 4])
    assert LabelFlip(num_classes=10).relabel(labels).tolist() == [9, 6, 0, 0, 5]
    # Tolpegin et al. 2020: source to target; a swap does not undo itself.
    assert LabelFlip(pairs=[(9, 3), (3, 9)]).relabel(labels).tolist() == [0, 9, 3, 3, 4]


# -- a little is enough -------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "f"), [(50, 24), (50, 10), (51, 12), (100, 20), (10, 3), (11, 5)])
def test_alie_quantile(n: int, f: int) -> None:
    """Baruch et al. 2019: s = floor(n/2 + 1) - f supporters; phi(z) = (n - f - s) / (n - f)."""
    s = math.floor(n / 2 + 1) - f
    z = alie_quantile(n, f)
    assert z == pytest.approx(norm.ppf((n - f - s) / (n - f)), abs=1e-12)
    # Not (n - s) / n, which some codes have.
    assert z != pytest.approx(norm.ppf((n - s) / n), abs=1e-3)


def test_alie_quantile_by_hand() -> None:
    # 10 clients, 2 malicious: a majority of 6 takes 4 of the 8 benign, half of them: z = 0.
    assert alie_quantile(10, 2) == pytest.approx(0.0, abs=1e-12)
    # 7 clients, 3 malicious: one of 4 has to be won over, so a quarter may be farther out.
    assert alie_quantile(7, 3) == pytest.approx(0.6744898, abs=1e-6)
    # The attackers are a majority themselves, or alone.
    assert alie_quantile(7, 4) == pytest.approx(norm.ppf(2 / 3))
    assert alie_quantile(3, 3) == 0.0
    assert alie_quantile(1, 0) == 0.0


@pytest.mark.parametrize("full_knowledge", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_alie(mask: torch.Tensor, full_knowledge: bool, sign: int) -> None:
    honest = draw(1)
    x = known(honest, full_knowledge)
    z = norm.ppf((M - 3 - (math.floor(M / 2 + 1) - 3)) / (M - 3))
    mu = x.sum(axis=0) / len(x)
    sigma = np.sqrt(((x - mu) ** 2).sum(axis=0) / len(x))
    for row in sent(ALIE(sign=sign, full_knowledge=full_knowledge), honest, mask):
        np.testing.assert_allclose(row, mu + sign * z * sigma, rtol=1e-4, atol=1e-5)


def test_alie_counts_the_cohort_not_the_rows_it_sees() -> None:
    honest = draw(1)[MALICIOUS]
    everyone = torch.tensor([True, True, True])
    ctx = {"client_ids": IDS[:3], "cohort_size": 50, "cohort_malicious": 24}
    x = honest.double().numpy()
    np.testing.assert_allclose(
        sent(ALIE(), honest, everyone, **ctx)[0],
        x.mean(axis=0) - norm.ppf(24 / 26) * x.std(axis=0),
        rtol=1e-4,
        atol=1e-5,
    )


# -- inner-product manipulation -----------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 10.0])
def test_ipm(mask: torch.Tensor, epsilon: float) -> None:
    """Xie et al. 2019: the negative of the benign mean, times epsilon."""
    honest = draw(2)
    total = np.zeros(D)
    for i in BENIGN:
        total += honest[i].double().numpy()
    for row in sent(IPM(epsilon=epsilon), honest, mask):
        np.testing.assert_allclose(row, -epsilon * total / len(BENIGN), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("epsilon", "turned"), [(3.0, False), (3.5, True)])
def test_ipm_turns_the_mean_beyond_benign_over_malicious(
    mask: torch.Tensor, epsilon: float, turned: bool
) -> None:
    # (10 - 3 epsilon) / 13 of the benign mean.
    honest = draw(2)
    crafted = IPM(epsilon=epsilon).craft(honest, mask, context())
    product = FedAvg().aggregate(crafted) @ honest[BENIGN].mean(dim=0)
    assert bool(product < 0) is turned


# -- Trim attack, partial knowledge -------------------------------------------------------------


def test_trim_attack_partial_knowledge(mask: torch.Tensor) -> None:
    """Fang et al. 2020: [mu - 4 sd, mu - 3 sd] where the attackers' mean is up, else the mirror."""
    honest = draw(5)
    own = honest.double().numpy()[MALICIOUS]
    crafted = sent(TrimAttack(full_knowledge=False), honest, mask)
    for row, i in enumerate(MALICIOUS):
        u = torch.rand(D, generator=torch_generator(9, "attack", 4, IDS[i])).double().numpy()
        for j in range(D):
            mu = own[:, j].sum() / 3
            sd = math.sqrt(((own[:, j] - mu) ** 2).sum() / 3)
            low, high = (mu - 4 * sd, mu - 3 * sd) if mu > 0 else (mu + 3 * sd, mu + 4 * sd)
            expected = high - u[j] * (high - low) if mu > 0 else low + u[j] * (high - low)
            assert crafted[row, j] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert low - 1e-4 <= crafted[row, j] <= high + 1e-4


# -- Mimic --------------------------------------------------------------------------------------


class Mimicked:
    """Karimireddy et al. 2022: one client at a time, covariance written out."""

    def __init__(self, start: np.ndarray, warmup: int) -> None:
        self.z, self.mu, self.t, self.warmup, self.target = start, 0.0, 0, warmup, None

    def choose(self, x: np.ndarray) -> int:
        if self.t < self.warmup:
            t = self.t
            self.mu = t / (1 + t) * self.mu + x.mean(axis=0) / (1 + t)
            covariance = sum(np.outer(row - self.mu, row - self.mu) for row in x)
            step = covariance @ self.z
            step /= np.linalg.norm(step)
            self.z = step if t == 0 else t / (1 + t) * self.z + step / (1 + t)
            self.z /= np.linalg.norm(self.z)
            self.target = int(np.argmax([row @ self.z for row in x]))
            self.t += 1
        return self.target


@pytest.mark.parametrize("warmup", [1, 4, 20])
def test_mimic(mask: torch.Tensor, warmup: int) -> None:
    attack = Mimic(warmup_rounds=warmup)
    start = torch.randn(D, generator=torch_generator(9, "attack")).double().numpy()
    by_definition = Mimicked(start, warmup)
    chosen = []
    for t in range(8):
        honest = draw(20 + t)
        i = BENIGN[by_definition.choose(honest.double().numpy()[BENIGN])]
        crafted = attack.craft(honest, mask, context(round=t))
        assert torch.equal(crafted[mask], honest[i].expand(3, -1))
        assert torch.equal(crafted[~mask], honest[~mask])
        chosen.append(i)
    assert len(set(chosen[warmup - 1 :])) == 1 or warmup > 8
    np.testing.assert_allclose(
        attack.state_dict()["direction"].double().numpy(), by_definition.z, atol=1e-4
    )


def test_mimic_copies_the_client_farthest_along_what_differs_most() -> None:
    # Apart along the first axis only: 0, 0, 0, 10 or 0, 0, 0, -10 from the mean.
    honest = torch.tensor([[0.0, 1.0], [0.0, 1.0], [10.0, 1.0], [0.0, 1.0], [7.0, 7.0]])
    attackers = torch.tensor([False] * 4 + [True])
    ctx = context(2, client_ids=IDS[:5], round=0)
    attack = Mimic()
    crafted = attack.craft(honest, attackers, ctx)
    direction = attack.state_dict()["direction"]
    assert direction.abs().tolist() == pytest.approx([1.0, 0.0], abs=1e-6)
    farthest = honest[2] if direction[0] > 0 else honest[0]
    assert torch.equal(crafted[4], farthest)


# -- fake clients, targeted attacks -------------------------------------------------------------


def test_mpaf_drags_to_the_base_model(mask: torch.Tensor) -> None:
    """Cao and Gong 2022: lambda times the way from the global to the base model."""
    weights = draw(6, rows=1)[0]
    base = MPAF().base_weights(ParameterVector(nn.Linear(D, 1, bias=False)), seed=9)
    assert base.abs().max() <= 1 / math.sqrt(D)
    assert base.std() == pytest.approx(1 / math.sqrt(3 * D), rel=0.3)
    rows = sent(MPAF(scale=7.0), draw(0), mask, global_weights=weights)
    for row in rows:
        np.testing.assert_allclose(
            row, 7.0 * (weights.double().numpy() - base.double().numpy()), rtol=1e-4, atol=1e-5
        )
    # Alone, unscaled and with a learning rate of 1 it replaces the model by the base model.
    one = MPAF(scale=1.0).craft(draw(0), mask, context(global_weights=weights))[MALICIOUS]
    torch.testing.assert_close(weights - FedAvg().aggregate(one), base)
    # The base model is the same in every round.
    later = MPAF(scale=7.0).craft(draw(0), mask, context(global_weights=weights, round=5))
    np.testing.assert_array_equal(later[mask].double().numpy(), rows)


@pytest.mark.parametrize(("local_lr", "server_lr"), [(None, 0.3), (0.05, 0.3), (0.3, 0.1)])
def test_model_replacement(mask: torch.Tensor, local_lr: float | None, server_lr: float) -> None:
    """Bagdasaryan et al. 2020: with n / eta the average is the attacker's model, once converged."""
    honest = draw(7)
    honest[BENIGN] = 0.0
    honest[MALICIOUS] = honest[MALICIOUS[0]].clone()  # one attacker with three clients
    attack = ModelReplacement(BackdoorAttack(scale=1.0), local_lr=local_lr)
    crafted = attack.craft(honest, mask, context(server_lr=server_lr))
    weights = draw(8, rows=1)[0]
    step = server_lr if local_lr is None else local_lr
    torch.testing.assert_close(
        weights - server_lr * FedAvg().aggregate(crafted),
        weights - step * honest[MALICIOUS[0]],
        rtol=1e-4,
        atol=1e-5,
    )


def test_model_replacement_makes_up_for_those_that_were_found(mask: torch.Tensor) -> None:
    honest = draw(7)
    one = torch.zeros(M, dtype=torch.bool)
    one[5] = True
    attack = ModelReplacement(SignFlip())
    np.testing.assert_allclose(
        sent(attack, honest, one)[0], -13.0 * honest[5].double().numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(
        sent(attack, honest, mask)[1], -13.0 / 3 * honest[5].double().numpy(), rtol=1e-6
    )


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_neurotoxin(mask: torch.Tensor, fraction: float) -> None:
    """Zhang et al. 2022: nothing in the top-k coordinates of the last aggregate."""
    honest, last = draw(9), draw(10, rows=1)[0]
    order = sorted(range(D), key=lambda j: -abs(float(last[j])))
    expected = 4.0 * honest.double().numpy()[MALICIOUS]
    for j in order[: round(fraction * D)]:
        expected[:, j] = 0.0
    attack = Neurotoxin(BackdoorAttack(scale=4.0), top_fraction=fraction)
    np.testing.assert_allclose(sent(attack, honest, mask, last_aggregate=last), expected)
    # Before the first aggregate there is nothing to project by.
    np.testing.assert_allclose(
        sent(attack, honest, mask), 4.0 * honest.double().numpy()[MALICIOUS], rtol=1e-6
    )


def test_neurotoxin_by_hand() -> None:
    update, last = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([0.1, -9.0, 3.0, 0.0])
    assert outside_top(update, last, 2).tolist() == [[1.0, 0.0, 0.0, 4.0]]
    assert update.tolist() == [[1.0, 2.0, 3.0, 4.0]]
