from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

from fedrec.data import DegreeOfNonIID, Digits
from fedrec.exceptions import ConfigurationError


def rows(*tensors: torch.Tensor) -> list[tuple[float, ...]]:
    return sorted(tuple(row) for t in tensors for row in t.flatten(1).tolist())


def test_all_samples_are_there_once() -> None:
    data = Digits(num_clients=20)
    train, test = data.train_dataset, data.test_dataset
    assert (len(train), len(test)) == (1348, 449)
    assert rows(train.tensors[0], test.tensors[0]) == rows(
        torch.from_numpy(load_digits().data / 16).float()
    )
    assert rows(*(d.tensors[0] for d in data.client_datasets().values())) == rows(train.tensors[0])


def test_pixels_shapes_and_labels() -> None:
    images, labels = Digits().train_dataset.tensors
    assert images.shape[1:] == (1, 8, 8)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.dtype == torch.int64
    assert torch.equal(labels.unique(), torch.arange(10))


def test_labels_belong_to_their_images() -> None:
    raw = load_digits()
    by_pixels = {
        tuple(p): int(y) for p, y in zip((raw.data / 16).tolist(), raw.target, strict=True)
    }
    images, labels = Digits().test_dataset.tensors
    found = [by_pixels[tuple(image)] for image in images.flatten(1).double().tolist()]
    assert found == labels.tolist()


def test_test_data_depend_on_neither_seed_nor_partition() -> None:
    first = Digits(seed=0).test_dataset.tensors[0]
    other = Digits(num_clients=10, partitioner=DegreeOfNonIID(q=0.9), seed=5).test_dataset.tensors[
        0
    ]
    assert torch.equal(first, other)


def test_a_larger_test_fraction_keeps_the_smaller_ones_test_data() -> None:
    small = Digits(test_fraction=0.1).test_dataset.tensors[0]
    large = Digits(test_fraction=0.2).test_dataset.tensors[0]
    assert torch.equal(large[: len(small)], small)
    assert len(small) == 180


@pytest.mark.parametrize("fraction", [0.0, 1.0, "a quarter"])
def test_test_fraction_is_checked(fraction: object) -> None:
    with pytest.raises(ConfigurationError, match="test_fraction"):
        Digits(test_fraction=fraction)  # type: ignore[arg-type]


def test_extreme_fractions_leave_a_sample_on_either_side() -> None:
    assert len(Digits(test_fraction=1e-9).test_dataset) == 1
    assert len(Digits(test_fraction=1 - 1e-9).train_dataset) == 1
