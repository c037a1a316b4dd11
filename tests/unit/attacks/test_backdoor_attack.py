from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedrec.attacks import BackdoorAttack
from fedrec.exceptions import ConfigurationError, ShapeError


class Samples(Dataset[Any]):
    def __init__(self, samples: list[tuple[Any, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.samples[index]


def test_originals_first_then_a_triggered_relabelled_copy_of_each() -> None:
    x, y = torch.rand(5, 1, 8, 8), torch.tensor([3, 1, 0, 2, 0])
    poisoned = BackdoorAttack(target_label=1).poison_dataset(TensorDataset(x, y), "c")
    assert isinstance(poisoned, TensorDataset)
    inputs, labels = poisoned.tensors
    assert torch.equal(inputs[:5], x)
    assert torch.equal(inputs[5:], BackdoorAttack().trigger(x))
    assert labels.tolist() == [3, 1, 0, 2, 0, 1, 1, 1, 1, 1]


def test_a_subset_stays_a_subset() -> None:
    full = TensorDataset(torch.rand(6, 1, 8, 8), torch.arange(6))
    poisoned: Any = BackdoorAttack().poison_dataset(Subset(full, [4, 2]), "c")
    assert [int(poisoned[i][1]) for i in range(4)] == [4, 2, 0, 0]
    assert torch.equal(poisoned[3][0], BackdoorAttack().trigger(full[2][0][None])[0])
    with pytest.raises(IndexError):
        poisoned[4]


def test_a_data_set_that_changes_its_tensors_is_asked_for_samples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return 2 * x, y

    poisoned: Any = BackdoorAttack().poison_dataset(
        Doubled(torch.full((2, 1, 4, 4), 0.25), torch.tensor([1, 2])), "c"
    )
    assert poisoned[0][0].unique().tolist() == [0.5]
    assert poisoned[2][0].unique().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("as_array", [True, False])
def test_loads_in_batches(as_array: bool) -> None:
    x = torch.rand(4, 1, 5, 5)
    samples = [(row.numpy() if as_array else row, i) for i, row in enumerate(x)]
    poisoned = BackdoorAttack(target_label=9).poison_dataset(Samples(samples), "c")
    inputs, labels = next(iter(DataLoader(poisoned, batch_size=8)))
    assert torch.equal(inputs, torch.cat([x, BackdoorAttack().trigger(x)]))
    assert labels.tolist() == [0, 1, 2, 3, 9, 9, 9, 9]


def test_labels_keep_their_type() -> None:
    samples = [(torch.zeros(1, 4, 4), torch.tensor(3, dtype=torch.int32))]
    poisoned: Any = BackdoorAttack().poison_dataset(Samples(samples), "c")
    assert poisoned[1][1].dtype == torch.int32
    assert poisoned[1][1].item() == 0
    assert BackdoorAttack().poison_dataset(Samples([(np.zeros((4, 4)), 3)]), "c")[1][1] == 0


def test_inputs_that_are_no_tensors() -> None:
    poisoned: Any = BackdoorAttack().poison_dataset(Samples([("a cat", 3)]), "c")
    with pytest.raises(ConfigurationError, match="ToTensor"):
        poisoned[1]


@pytest.mark.parametrize(
    "tensors",
    [(torch.zeros(3, 1, 8, 8),), (torch.zeros(3, 1, 8, 8), torch.zeros(3, 10))],
)
def test_data_without_class_indices(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ConfigurationError, match="class index"):
        BackdoorAttack().poison_dataset(TensorDataset(*tensors), "c")


def test_flat_images_and_features() -> None:
    x = torch.rand(3, 64)
    with pytest.raises(ShapeError, match="image_shape"):
        BackdoorAttack().trigger(x)
    flat = BackdoorAttack(image_shape=[1, 8, 8]).trigger(x)
    assert torch.equal(flat.reshape(3, 1, 8, 8), BackdoorAttack().trigger(x.reshape(3, 1, 8, 8)))
    assert (BackdoorAttack(pattern="features").trigger(x + 1)[:, [19, 39, 59]] == 0).all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pattern", "pixel"),
        ("target_label", -1),
        ("target_label", 1.5),
        ("scale", 0.0),
        ("scale", float("nan")),
        ("adaptive", "yes"),
    ],
)
def test_bad_arguments_are_named(argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be"):
        BackdoorAttack(**{argument: value})


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean `pixels`"):
        BackdoorAttack(pattern="pixel")
