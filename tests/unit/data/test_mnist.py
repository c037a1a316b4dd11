from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.data import MNIST, DegreeOfNonIID, FashionMNIST
from fedrec.exceptions import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[3]
DATA_ROOT = Path(os.environ.get("FEDREC_DATA", REPOSITORY.parent / "shared" / "data"))
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def contents(num_train: int = 30, num_test: int = 12) -> dict[str, np.ndarray]:
    """Image i is filled with the number i, its label is i mod 10."""
    arrays = []
    for count in (num_train, num_test):
        numbers = np.arange(count, dtype=np.uint8)
        arrays += [np.broadcast_to(numbers[:, None, None], (count, 28, 28)), numbers % 10]
    return dict(zip(FILES, arrays, strict=True))


def write(folder: Path, suffix: str = ".gz", **changed: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (contents() | changed).items():
        content = idx(array)
        (folder / f"{name}{suffix}").write_bytes(gzip.compress(content) if suffix else content)
    return folder


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_found_plain_or_gzipped(tmp_path: Path, folder: str, suffix: str) -> None:
    write(tmp_path / folder, suffix)
    data = MNIST(root=tmp_path, num_clients=3)
    images, labels = data.train_dataset.tensors
    assert images.shape == (30, 1, 28, 28)
    assert images.dtype == torch.float32
    assert torch.equal(images[:, 0, 5, 5], torch.arange(30) / 255)
    assert labels.tolist() == [i % 10 for i in range(30)]
    assert len(data.test_dataset) == 12
    assert data.num_classes == 10


def test_fashion_is_not_taken_for_mnist(tmp_path: Path) -> None:
    write(tmp_path / "mnist")
    fashion = contents()[FILES[0]] + np.uint8(100)
    write(tmp_path / "fashion_mnist", **{FILES[0]: fashion})
    first = MNIST(root=tmp_path, num_clients=3).train_dataset.tensors[0][0, 0, 0, 0]
    other = FashionMNIST(root=tmp_path, num_clients=3).train_dataset.tensors[0][0, 0, 0, 0]
    assert float(first) == 0.0
    assert float(other) == np.float32(100) / np.float32(255)


def test_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "mnist")
    data = MNIST(num_clients=3)
    monkeypatch.setenv("FEDREC_DATA", str(tmp_path))
    assert len(data.train_dataset) == 30


def test_root_is_the_folder_data_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "fashion_mnist")
    monkeypatch.delenv("FEDREC_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert len(FashionMNIST(num_clients=3).train_dataset) == 30


def test_missing_files_are_listed_with_the_folder_to_put_them_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as error:
        MNIST(root=tmp_path).client_datasets()
    message = str(error.value)
    assert all(f"{name}.gz" in message for name in FILES)
    assert f"into {tmp_path / 'mnist'}" in message
    assert "FEDREC_DATA" in message


def test_only_the_files_that_are_missing_are_listed(tmp_path: Path) -> None:
    (write(tmp_path / "MNIST/raw") / f"{FILES[3]}.gz").unlink()
    with pytest.raises(ConfigurationError) as error:
        MNIST(root=tmp_path).setup("fit")
    message = str(error.value)
    assert f"put {FILES[3]}.gz (or the same without .gz) into {tmp_path / 'MNIST/raw'}" in message
    assert FILES[0] not in message


def test_max_samples_is_a_seeded_choice_of_training_samples(tmp_path: Path) -> None:
    write(tmp_path)

    def chosen(max_samples: int, seed: int = 0) -> list[int]:
        data = MNIST(root=tmp_path, num_clients=2, max_samples=max_samples, seed=seed)
        images, labels = data.train_dataset.tensors
        numbers = (images[:, 0, 0, 0] * 255).round().long()
        assert torch.equal(numbers % 10, labels)
        assert len(data.test_dataset) == 12
        return numbers.tolist()

    ten = chosen(10)
    assert len(set(ten)) == 10
    assert ten != sorted(ten)
    assert chosen(10) == ten
    assert chosen(15)[:10] == ten
    assert chosen(10, seed=1) != ten
    assert sorted(chosen(1000)) == list(range(30))


def test_labels_that_do_not_match_the_images(tmp_path: Path) -> None:
    write(tmp_path, **{FILES[1]: np.zeros(29, dtype=np.uint8)})
    with pytest.raises(ConfigurationError, match=r"as many images as labels, but got 30 .* and 29"):
        MNIST(root=tmp_path).setup("fit")


@pytest.mark.parametrize(
    ("name", "array", "reason"),
    [
        (FILES[0], np.zeros((30, 27, 28), np.uint8), r"images of shape \(N, 28, 28\)"),
        (FILES[2], np.zeros(12, np.uint8), r"images of shape \(N, 28, 28\)"),
        (FILES[3], np.zeros((12, 1), np.uint8), r"labels of shape \(N,\)"),
        (FILES[1], np.full(30, 10, np.uint8), "labels 0 to 9 .* but got 10"),
    ],
)
def test_files_with_something_else(
    tmp_path: Path, name: str, array: np.ndarray, reason: str
) -> None:
    write(tmp_path, **{name: array})
    with pytest.raises(ConfigurationError, match=reason):
        MNIST(root=tmp_path).setup("fit")


@pytest.mark.parametrize(
    ("argument", "value"), [("max_samples", 0), ("root", 3), ("num_clients", 0), ("seed", 0.5)]
)
def test_arguments_are_checked(argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=argument):
        MNIST(**{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "folder"),
    [
        pytest.param(
            cls,
            folder,
            marks=pytest.mark.skipif(
                not (DATA_ROOT / folder / "train-images-idx3-ubyte.gz").is_file(),
                reason=f"no {folder} files in {DATA_ROOT}",
            ),
        )
        for cls, folder in ((MNIST, "mnist"), (FashionMNIST, "fashion_mnist"))
    ],
)
def test_the_real_files(cls: type[MNIST], folder: str) -> None:
    data = cls(root=DATA_ROOT, num_clients=100, partitioner=DegreeOfNonIID(q=0.5))
    (train, labels), (test, test_labels) = data.train_dataset.tensors, data.test_dataset.tensors
    assert train.shape == (60000, 1, 28, 28)
    assert test.shape == (10000, 1, 28, 28)
    assert (float(train.min()), float(train.max())) == (0.0, 1.0)
    assert torch.equal(test_labels.unique(), torch.arange(10))
    # The mean pixel is a known figure of either data set.
    assert float(train.double().mean()) == pytest.approx(
        {"mnist": 0.1307, "fashion_mnist": 0.2860}[folder], abs=5e-5
    )
    first_label = {"mnist": 5, "fashion_mnist": 9}[folder]
    assert int(labels[0]) == first_label
    sizes = [len(d) for d in data.client_datasets().values()]
    assert sum(sizes) == 60000
    # Groups of 574 to 633 a client on average, give or take a standard deviation of 25.
    assert min(sizes) > 450
    assert max(sizes) < 750
