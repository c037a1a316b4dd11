"""Testing uses the data set as its user wrote it, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedrec.evaluation import evaluate, fixed_subset
from fedrec.federation import Federation
from fedrec.testing.problems import QuadraticClient

X = torch.eye(2).repeat(5, 1)
Y = torch.tensor([0, 1]).repeat(5)


class Relabelled(TensorDataset):
    """Swaps the two labels when a sample is fetched."""

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x, 1 - y


class Parts(nn.Module):
    """Logits are the input times the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes = [part.training for part in self.modules()]
        return self.linear(self.frozen(x))


def run(module: nn.Module, dataset: Dataset[Any]) -> dict[str, float | None]:
    client = QuadraticClient("a", torch.eye(4), torch.zeros(4))
    return evaluate(
        Federation([client], module),
        dataset,
        torch.eye(2).flatten(),  # the predicted label is the place of the one
        attack=None,
        buffers=None,
        device=torch.device("cpu"),
    )


def test_error_rate_of_weights_that_are_right_for_plain_tensors() -> None:
    assert run(Parts(), TensorDataset(X, Y)) == {"ter": 0.0, "asr": None}
    assert run(Parts(), TensorDataset(X, Y.roll(1))) == {"ter": 1.0, "asr": None}


@pytest.mark.parametrize("size", [None, 4])
def test_a_subclass_that_changes_samples_is_asked_for_them(size: int | None) -> None:
    assert run(Parts(), fixed_subset(Relabelled(X, Y), size, seed=0))["ter"] == 1.0


def test_a_subset_of_plain_tensors_is_plain_tensors() -> None:
    subset = fixed_subset(TensorDataset(X, Y), 4, seed=0)
    assert type(subset) is TensorDataset
    assert len(subset) == 4


@pytest.mark.parametrize("error", [False, True])
def test_every_part_of_the_model_keeps_its_mode(error: bool) -> None:
    module = Parts().train()
    module.frozen.eval()
    before = [part.training for part in module.modules()]
    assert before == [True, True, False, False, False]
    if error:
        with pytest.raises(RuntimeError):
            run(module, TensorDataset(X.repeat(1, 2), Y))
    else:
        run(module, TensorDataset(X, Y))
    assert module.modes == [False] * 5  # all of it was in evaluation mode in between
    assert [part.training for part in module.modules()] == before
