from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrec.exceptions import ConfigurationError
from fedrec.models import HARMLP, MLP, PurchaseMLP


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_numbers_of_parameters() -> None:
    assert num_parameters(MLP(in_features=64)) == 64 * 32 + 32 + 32 * 10 + 10
    assert num_parameters(MLP(in_features=64, hidden=())) == 650
    assert num_parameters(MLP(in_features=3, hidden=[4, 5], num_classes=2)) == 16 + 25 + 12
    assert num_parameters(PurchaseMLP()) == 717_924
    assert num_parameters(HARMLP()) == 211_206


@pytest.mark.parametrize(("name", "activate"), [("relu", torch.relu), ("tanh", torch.tanh)])
def test_forward_is_affine_activation_affine(name: str, activate) -> None:
    torch.manual_seed(0)
    module = MLP(in_features=4, hidden=(3,), num_classes=2, activation=name)
    w1, b1, w2, b2 = module.parameters()
    x = torch.randn(5, 2, 2)
    torch.testing.assert_close(module(x), activate(x.reshape(5, 4) @ w1.T + b1) @ w2.T + b2)


def test_the_papers_networks() -> None:
    torch.manual_seed(0)
    purchase, har = PurchaseMLP(), HARMLP()
    x = torch.rand(2, 600)
    w1, b1, w2, b2 = purchase.parameters()
    torch.testing.assert_close(purchase(x), torch.tanh(x @ w1.T + b1) @ w2.T + b2)
    x = torch.rand(2, 561)
    w1, b1, w2, b2, w3, b3 = har.parameters()
    hidden = torch.relu(torch.relu(x @ w1.T + b1) @ w2.T + b2)
    torch.testing.assert_close(har(x), hidden @ w3.T + b3)
    # The paper's learning rates for sums over 1,800 and 32 samples, made for means.
    assert purchase.lr == pytest.approx(1e-4 * 1800)
    assert har.lr == pytest.approx(3e-4 * 32)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"in_features": 0}, "in_features"),
        ({"in_features": 2, "hidden": (3, 0)}, r"hidden\[1\]"),
        ({"in_features": 2, "hidden": (2.5,)}, r"hidden\[0\]"),
        ({"in_features": 2, "num_classes": 1}, "num_classes"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{name}`"):
        MLP(**arguments)  # type: ignore[arg-type]


def test_an_unknown_activation_gets_a_suggestion() -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean `relu`\? Known: relu, tanh"):
        MLP(in_features=2, activation="rely")
