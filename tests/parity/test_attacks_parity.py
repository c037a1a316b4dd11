"""Attacks against float64 NumPy written from the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedrec.attacks import AttackContext, BackdoorAttack, TrimAttack
from fedrec.functional import every_kth_feature, pixel_pattern, trim_attack
from fedrec.parameters import ParameterVector
from fedrec.random import torch_generator

M, D = 12, 50
MALICIOUS = [0, 5, 11]


def context(client_ids: list[str], **kwargs: Any) -> AttackContext:
    values = {"round": 4, "phase": "record", "seed": 9, "purpose": "attack", **kwargs}
    return AttackContext(
        client_ids=tuple(client_ids),
        global_weights=torch.zeros(D),
        layout=ParameterVector(nn.Linear(D, 1, bias=False)),
        **values,
    )


def crafted_by_definition(x: np.ndarray, malicious: list[int], b: np.ndarray) -> np.ndarray:
    """Fang et al., full knowledge: one coordinate and one attacker at a time."""
    out = x.astype(np.float64).copy()
    for j in range(x.shape[1]):
        total = x[:, j].astype(np.float64).sum()
        for row, i in enumerate(malicious):
            if total > 0:  # the model would go down: send what is below the smallest
                low = float(x[:, j].min())
                out[i, j] = low / b[row, j] if low > 0 else low * b[row, j]
            elif total < 0:
                high = float(x[:, j].max())
                out[i, j] = high / b[row, j] if high < 0 else high * b[row, j]
            else:
                out[i, j] = 0.0
    return out


@pytest.fixture
def honest() -> torch.Tensor:
    """Coordinates of mixed and of common sign, and some that are zero everywhere."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(M, D)).astype(np.float32))
    x[:, 10:20] = x[:, 10:20].abs() + 0.1
    x[:, 20:30] = -x[:, 20:30].abs() - 0.1
    x[:, 30:33] = 0.0
    return x


@pytest.fixture
def mask() -> torch.Tensor:
    mask = torch.zeros(M, dtype=torch.bool)
    mask[MALICIOUS] = True
    return mask


@pytest.mark.parametrize("b_max", [1.0, 2.0, 5.0])
def test_trim_attack_formula(honest: torch.Tensor, mask: torch.Tensor, b_max: float) -> None:
    draws = torch.rand(len(MALICIOUS), D, generator=torch.Generator().manual_seed(1))
    b = 1 + (b_max - 1) * draws.double().numpy()
    np.testing.assert_allclose(
        trim_attack(honest, mask, draws, b_max).numpy(),
        crafted_by_definition(honest.numpy(), MALICIOUS, b),
        rtol=1e-6,
    )


def test_trim_attack_lies_beyond_the_extreme_against_the_direction(
    honest: torch.Tensor, mask: torch.Tensor
) -> None:
    draws = torch.rand(len(MALICIOUS), D, generator=torch.Generator().manual_seed(1))
    crafted = trim_attack(honest, mask, draws)[mask]
    direction = honest.sum(dim=0)
    up, down = direction > 0, direction < 0
    assert (crafted[:, up] <= honest.amin(dim=0)[up]).all()
    assert (crafted[:, down] >= honest.amax(dim=0)[down]).all()
    assert (crafted[:, direction == 0] == 0).all()
    # At most b_max times as far from zero, or at least 1 / b_max times.
    assert (crafted.abs() <= 2 * honest.abs().amax(dim=0)).all()


def test_trim_attack_class_draws_per_attacker_round_and_coordinate(
    honest: torch.Tensor, mask: torch.Tensor
) -> None:
    ids = [f"client-{i:02d}" for i in range(M)]
    b = np.stack(
        [
            1 + torch.rand(D, generator=torch_generator(9, "attack", 4, ids[i])).double().numpy()
            for i in MALICIOUS
        ]
    )
    crafted = TrimAttack().craft(honest, mask, context(ids))
    np.testing.assert_allclose(
        crafted.numpy(), crafted_by_definition(honest.numpy(), MALICIOUS, b), rtol=1e-6
    )


def test_trim_attack_has_a_large_effect_on_the_trimmed_mean(
    honest: torch.Tensor, mask: torch.Tensor
) -> None:
    # It moves a robust rule against the honest direction in nearly every coordinate; adding noise
    # to some weights, which goes by the same name elsewhere, does not.
    honest = honest + 0.2
    honest[:, 30:33] = 0.0
    ids = [f"client-{i:02d}" for i in range(M)]
    crafted = TrimAttack().craft(honest, mask, context(ids))

    def trimmed(x: torch.Tensor) -> torch.Tensor:
        return x.sort(dim=0).values[3:9].mean(dim=0)

    push = (trimmed(crafted) - trimmed(honest)) * honest.sum(dim=0).sign()
    assert (push <= 1e-6).all()
    assert (push < 0).double().mean() > 0.9


def test_pixels_are_those_of_badnets() -> None:
    white = pixel_pattern(torch.zeros(2, 1, 28, 28)).nonzero()[:, 2:].unique(dim=0)
    assert white.tolist() == [[24, 26], [25, 25], [26, 24], [26, 26]]
    white = pixel_pattern(torch.zeros(1, 64), image_shape=[8, 8]).reshape(8, 8).nonzero()
    assert white.tolist() == [[4, 6], [5, 5], [6, 4], [6, 6]]


@pytest.mark.parametrize(("features", "count"), [(561, 28), (600, 30), (20, 1)])
def test_every_20th_feature_is_zero(features: int, count: int) -> None:
    zero = (every_kth_feature(torch.ones(1, features))[0] == 0).nonzero().flatten() + 1
    assert len(zero) == count
    assert zero.tolist() == list(range(20, features + 1, 20))


@pytest.mark.parametrize(
    ("phase", "adaptive", "remaining", "factor"),
    [
        ("record", False, 4, 10.0),
        ("record", True, 4, 10.0),
        ("recover", False, 1, 10.0),
        ("recover", True, 3, 10.0 * 20 / 3),
        ("recover", True, 20, 10.0),
    ],
)
def test_backdoor_scaling(
    honest: torch.Tensor,
    mask: torch.Tensor,
    phase: str,
    adaptive: bool,
    remaining: int,
    factor: float,
) -> None:
    attack = BackdoorAttack(scale=10.0, adaptive=adaptive)
    ctx = context(["c"] * M, phase=phase, num_malicious=remaining, num_malicious_total=20)
    crafted = attack.craft(honest, mask, ctx)
    torch.testing.assert_close(crafted[mask], honest[mask] * factor)
    assert torch.equal(crafted[~mask], honest[~mask])
