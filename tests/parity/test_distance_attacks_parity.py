"""Attacks that measure distances against float64 NumPy written from the papers, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedrec.aggregators import Krum
from fedrec.attacks import AttackContext, KrumAttack, MinMax, MinSum
from fedrec.functional.attack.krum_attack import krum_attack, krum_attack_partial
from fedrec.functional.attack.min_max import min_max, min_sum, perturbation
from fedrec.parameters import ParameterVector

M, D = 13, 60
MALICIOUS = [0, 5, 12]
BENIGN = [i for i in range(M) if i not in MALICIOUS]
CONTEXT = AttackContext(
    round=4,
    phase="record",
    client_ids=tuple(f"client-{i:02d}" for i in range(M)),
    global_weights=torch.zeros(D),
    layout=ParameterVector(nn.Linear(D, 1, bias=False)),
)


def draw(seed: int, common: float = 0.5, rows: int = M) -> torch.Tensor:
    """Draw honest updates with something in common, of very different sizes by coordinate."""
    rng = np.random.default_rng(seed)
    scales = np.exp(rng.normal(size=D))
    x = (common * rng.normal(size=D) + rng.normal(size=(rows, D))) * scales
    return torch.from_numpy(x.astype(np.float32))


@pytest.fixture
def mask() -> torch.Tensor:
    mask = torch.zeros(M, dtype=torch.bool)
    mask[MALICIOUS] = True
    return mask


def sent(attack: Any, honest: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """Craft, check that benign rows are the same bits, and return the malicious ones."""
    crafted = attack.craft(honest, mask, CONTEXT)
    assert torch.equal(crafted[~mask], honest[~mask])
    return crafted[mask].double().numpy()


def known(honest: torch.Tensor, full_knowledge: bool) -> np.ndarray:
    return honest[BENIGN if full_knowledge else MALICIOUS].double().numpy()


# -- Min-Max and Min-Sum ------------------------------------------------------------------------


def searched(x: np.ndarray, p: np.ndarray, allowed: Any) -> np.ndarray:
    """Search the largest gamma, with every distance computed anew."""
    mu = x.mean(axis=0)
    low, high = 0.0, 1.0
    while allowed(x, mu + high * p):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(x, mu + middle * p) else (low, middle)
    return mu + low * p


def within_max(x: np.ndarray, m: np.ndarray) -> bool:
    farthest = max(np.linalg.norm(a - b) for a in x for b in x)
    return max(np.linalg.norm(m - a) for a in x) <= farthest


def within_sum(x: np.ndarray, m: np.ndarray) -> bool:
    largest = max(sum(np.linalg.norm(a - b) ** 2 for b in x) for a in x)
    return sum(np.linalg.norm(m - a) ** 2 for a in x) <= largest


def direction(x: np.ndarray, kind: str) -> np.ndarray:
    mu = x.mean(axis=0)
    if kind == "std":
        return -np.sqrt(((x - mu) ** 2).sum(axis=0) / (len(x) - 1))
    return -np.sign(mu) if kind == "sign" else -mu / np.sqrt((mu**2).sum())


@pytest.mark.parametrize("full_knowledge", [True, False])
@pytest.mark.parametrize("kind", ["std", "unit", "sign"])
@pytest.mark.parametrize(
    ("attack", "allowed"), [(MinMax, within_max), (MinSum, within_sum)], ids=["max", "sum"]
)
def test_min_max_and_min_sum(
    mask: torch.Tensor, attack: Any, allowed: Any, kind: str, full_knowledge: bool
) -> None:
    """Shejwalkar and Houmansadr 2021, equations of the AGR-agnostic attacks."""
    honest = draw(3)
    x = known(honest, full_knowledge)
    expected = searched(x, direction(x, kind), allowed)
    for row in sent(attack(perturbation=kind, full_knowledge=full_knowledge), honest, mask):
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [min_max, min_sum])
@pytest.mark.parametrize("common", [0.0, 1e3])
def test_the_step_is_the_largest(function: Any, common: float) -> None:
    """However far from the origin: the bound holds there, and not a thousandth further."""
    x = draw(4).double() + common
    p = perturbation(x)
    mu = x.mean(dim=0)
    allowed = within_max if function is min_max else within_sum
    moved = function(x, p) - mu
    assert allowed(x.numpy(), (mu + (1 - 1e-9) * moved).numpy())
    assert not allowed(x.numpy(), (mu + (1 + 1e-3) * moved).numpy())


def test_the_step_has_no_upper_limit_of_its_own() -> None:
    # Searches that start at 10 or 50 and halve their step end below twice that. By hand: four
    # corners of a square of side 2000 around (1, 0), to leave along the first axis. The diagonal
    # is 1000 sqrt(8), and x + 1000 squared plus 1000 squared may be 8e6: x = 1000 (sqrt(7) - 1).
    x = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]]).double() * 1000
    x = x + torch.tensor([1.0, 0.0]).double()
    p = perturbation(x, "unit")
    assert p.tolist() == [-1.0, 0.0]
    assert (1 - min_max(x, p)[0]).item() == pytest.approx(1000 * (math.sqrt(7) - 1), rel=1e-9)
    # From a corner: 4e6 + 4e6 + 8e6. From the mean: 4 * 2e6. The rest is 4 gamma^2.
    assert (1 - min_sum(x, p)[0]).item() == pytest.approx(math.sqrt(2e6), rel=1e-9)


def test_min_sum_bound_is_that_of_the_worst_benign_client() -> None:
    # 0, 0 and 3: the sums are 9, 9 and 18. From the mean 1: 1 + 1 + 4 = 6, and 3 gamma^2 = 12.
    x = torch.tensor([[0.0], [0.0], [3.0]])
    assert min_sum(x, perturbation(x, "sign")).item() == pytest.approx(-1.0)
    # With the least sum, 9, it would be 1 - 1.
    assert min_max(x, perturbation(x, "sign")).item() == pytest.approx(0.0)


@pytest.mark.parametrize("function", [min_max, min_sum])
def test_unanimous_clients_leave_no_room(function: Any) -> None:
    x = torch.full((4, 3), 2.0)
    for kind in ("std", "unit", "sign"):
        torch.testing.assert_close(function(x, perturbation(x, kind)), x[0])
    zeros = torch.zeros(4, 3)
    for kind in ("std", "unit", "sign"):
        assert torch.equal(function(zeros, perturbation(zeros, kind)), zeros[0])


# -- the Krum attack ----------------------------------------------------------------------------


def krum(x: np.ndarray, f: int) -> int:
    """Blanchard et al. 2017: the sum over the m - f - 2 nearest others."""
    scores = []
    for i in range(len(x)):
        others = sorted(((x[i] - x[j]) ** 2).sum() for j in range(len(x)) if j != i)
        scores.append(sum(others[: max(len(x) - f - 2, 1)]))
    return int(np.argmin(scores))


def first_picked(rows: np.ndarray, s: np.ndarray, copies: int, threshold: float = 1e-5) -> Any:
    """Fang et al. 2020: halve lambda from the theorem's bound until Krum picks the crafted."""
    m, d = len(rows) + copies, rows.shape[1]
    nearest = []
    for i in range(len(rows)):
        others = sorted(((rows[i] - rows[j]) ** 2).sum() for j in range(len(rows)) if j != i)
        nearest.append(sum(others[: max(m - copies - 2, 1)]))
    lam = math.sqrt(min(nearest) / (max(m - 2 * copies - 1, 1) * d))
    lam += max(np.linalg.norm(r) for r in rows) / math.sqrt(d)
    while lam >= threshold:
        if krum(np.concatenate([rows, np.repeat(-lam * s[None], copies, axis=0)]), copies) >= len(
            rows
        ):
            return lam, True
        lam /= 2
    return 2 * lam, False


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("common", [0.0, 0.3])
def test_krum_attack(mask: torch.Tensor, seed: int, common: float) -> None:
    honest = draw(seed, common)
    x = honest.double().numpy()
    s = np.sign(x[krum(x, 3)])
    lam, picked = first_picked(x[BENIGN], s, copies=3)
    crafted = sent(KrumAttack(), honest, mask)
    for row in crafted:
        np.testing.assert_allclose(row, -lam * s, rtol=1e-5)
    assert (krum(np.concatenate([x[BENIGN], crafted]), 3) >= len(BENIGN)) is picked
    assert picked or common > 0


@pytest.mark.parametrize("own", [1, 2, 3, 4, 6])
def test_krum_attack_partial_knowledge(own: int) -> None:
    for seed in range(4):
        x = draw(seed, 0.2, rows=own).double().numpy()
        s = np.sign(x.mean(axis=0))
        for copies in range(1, own + 1):
            lam, picked = first_picked(x, s, copies)
            if picked:
                break
        crafted = krum_attack_partial(torch.from_numpy(x))
        np.testing.assert_allclose(crafted.numpy(), -lam * s, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_krum_takes_a_step_against_its_own_choice(mask: torch.Tensor, seed: int) -> None:
    honest, rule = draw(seed, common=0.1), Krum(num_byzantine=3)
    crafted = KrumAttack().craft(honest, mask, CONTEXT)
    assert torch.equal(rule(crafted), crafted[0])
    assert torch.equal(rule(crafted).sign(), -rule(honest).sign())


def test_krum_attack_by_hand() -> None:
    # Honest -1, -1/2, 1/2, 1 and the attacker's 0.6. Of all five, 0.6 has the least sum over two
    # neighbours, 0.01 + 0.16: the direction is down. The start is sqrt(1.25 / 2) + 1 = 1.79, where
    # the sum is 0.63 + 1.67 and that of -1/2, 0.25 + 1. Half of it, 0.895: 0.011 + 0.156, and the
    # best other one is -1 with 0.011 + 0.25.
    honest = torch.tensor([[-1.0], [-0.5], [0.5], [1.0], [0.6]])
    crafted = krum_attack(honest, torch.tensor([False] * 4 + [True]))
    assert crafted.item() == pytest.approx(-(math.sqrt(0.625) + 1) / 2, rel=1e-6)


def test_with_too_many_attackers_krum_has_one_neighbour() -> None:
    # All four attack. Rows 1 and 2 are nearest to each other, so Krum's choice is positive.
    honest = torch.tensor([[-9.0], [1.0], [1.2], [5.0]])
    assert krum_attack(honest, torch.tensor([True] * 4), threshold=0.5).tolist() == [-0.5]


def test_krum_attack_sends_the_smallest_step_where_none_is_picked() -> None:
    # All benign clients agree on 1: nothing on the other side of zero is ever picked.
    honest = torch.ones(5, 1)
    crafted = krum_attack(honest, torch.tensor([False] * 4 + [True]), threshold=0.1)
    assert crafted.item() == pytest.approx(-0.125)  # 1, 1/2, 1/4, 1/8
