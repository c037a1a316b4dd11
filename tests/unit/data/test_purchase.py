from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.data import Digits, IIDPartitioner, Purchase, PurchaseSynthetic
from fedrec.exceptions import ConfigurationError

# Record i of the eight: the binary digits of i + 1 in its first features; class 12 i.
FEATURES = np.zeros((8, 600), dtype=np.uint8)
FEATURES[:, :4] = (np.arange(1, 9)[:, None] >> np.arange(4)) & 1
LABELS = np.arange(8) * 12


def lines(features: np.ndarray = FEATURES, labels: np.ndarray = LABELS, quote: str = "") -> str:
    return "".join(
        f"{quote}{label + 1}{quote},{','.join(map(str, row))}\n"
        for label, row in zip(labels, features.tolist(), strict=True)
    )


def numbers(features: torch.Tensor) -> list[int]:
    return (features[:, :4] @ torch.tensor([1.0, 2.0, 4.0, 8.0]) - 1).long().tolist()


@pytest.mark.parametrize("form", ["lines", "quoted", "numbers", "one-hot"])
def test_all_forms_give_the_same_records(tmp_path: Path, form: str) -> None:
    folder = tmp_path / ("." if form == "quoted" else "purchase")
    folder.mkdir(exist_ok=True)
    if form == "numbers":
        np.savez(folder / "purchase100.npz", features=FEATURES.astype(float), labels=LABELS)
    elif form == "one-hot":
        np.savez(folder / "purchase100.npz", features=FEATURES, labels=np.eye(100)[LABELS])
    else:
        name = "dataset_purchase" if form == "lines" else "dataset_purchase.csv"
        (folder / name).write_text(lines(quote='"' if form == "quoted" else ""))
    data = Purchase(root=tmp_path, num_clients=3, num_train=6)
    held = [dataset.tensors for dataset in data.client_datasets().values()]
    assert [len(labels) for _, labels in held] == [2, 2, 2]
    everything = [*held, data.test_dataset.tensors]
    for features, labels in everything:
        assert features.dtype == torch.float32
        assert features.shape[1:] == (600,)
        assert labels.tolist() == [12 * i for i in numbers(features)]
        assert not features[:, 4:].any()
    assert sorted(i for features, _ in everything for i in numbers(features)) == list(range(8))
    assert data.num_classes == 100
    assert not data.synthetic


def test_the_server_and_the_pooled_loader_get_numbers_to_compute_with(tmp_path: Path) -> None:
    (tmp_path / "dataset_purchase").write_text(lines())
    data = Purchase(root=tmp_path, num_clients=2, num_train=6, server_samples=2)
    assert data.server_dataset is not None
    server = data.server_dataset.tensors[0]
    (batch, _), *more = data.train_dataloader()
    assert not more
    assert server.dtype == batch.dtype == torch.float32
    assert not set(numbers(server)) & set(numbers(batch))
    assert len(numbers(server) + numbers(batch)) == 6
    # Bytes are what the pool is kept as.
    assert data.train_dataset.tensors[0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lines()[:-3] + "\n", "in line 8"),
        (lines().replace(",0,", ",0.5,", 1), "in line 1"),
        (lines().replace("13,", "thirteen,", 1), "thirteen.* in line 2"),
        (lines(labels=LABELS + 20), "classes 20 to 104, counted from 0"),
        (lines(FEATURES * 2), "but got a 2"),
        ("", "but got no record"),
    ],
)
def test_other_files(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "dataset_purchase").write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        Purchase(root=tmp_path, num_clients=2, num_train=6).setup("fit")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"features": FEATURES}, "no arrays `features` and `labels`"),
        ({"features": FEATURES[:, :4], "labels": LABELS}, r"features \(8, 4\)"),
        ({"features": FEATURES, "labels": LABELS[:5]}, r"labels \(5,\)"),
        ({"features": FEATURES / 2, "labels": LABELS}, "neither 0 nor 1"),
        ({"features": FEATURES.astype(str), "labels": LABELS}, "features of <U"),
    ],
)
def test_other_archives(tmp_path: Path, arrays: dict[str, np.ndarray], reason: str) -> None:
    np.savez(tmp_path / "purchase100.npz", **arrays)
    with pytest.raises(ConfigurationError, match=reason):
        Purchase(root=tmp_path, num_clients=2, num_train=6).setup("fit")


def test_a_missing_file_and_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"`dataset_purchase` or .*PurchaseSynthetic"):
        Purchase(root=tmp_path).setup("fit")
    (tmp_path / "dataset_purchase").write_text(lines())
    with pytest.raises(ConfigurationError, match=r"num_train.* fewer than the 8 records"):
        Purchase(root=tmp_path, num_train=8).setup("fit")
    with pytest.raises(ConfigurationError, match="num_records"):
        PurchaseSynthetic(num_records=1)
    with pytest.raises(ConfigurationError, match="root"):
        Purchase(root=3)  # type: ignore[arg-type]


# -- the stand-in ----------------------------------------------------------------------------------


def test_the_stand_in_says_what_it_is() -> None:
    data = PurchaseSynthetic(num_clients=2, num_train=4, num_records=6)
    assert data.synthetic
    assert repr(data).startswith("PurchaseSynthetic(")
    assert not Digits().synthetic
    whole = PurchaseSynthetic()
    assert (whole.num_records, whole.num_train, whole.num_clients) == (197_324, 180_000, 100)
    assert repr(whole.partitioner) == repr(IIDPartitioner())


def test_the_stand_in_is_the_same_every_time_and_for_every_seed() -> None:
    features, labels = PurchaseSynthetic(num_records=300).records()
    others, more = PurchaseSynthetic(num_records=400, seed=5).records()
    assert np.array_equal(features, others[:300])
    assert np.array_equal(labels, more[:300])
    tests = [
        PurchaseSynthetic(num_clients=2, num_train=200, num_records=300, seed=seed).test_dataset
        for seed in (0, 0, 1)
    ]
    assert torch.equal(tests[0].tensors[0], tests[1].tensors[0])
    assert not torch.equal(tests[0].tensors[1], tests[2].tensors[1])


def test_the_stand_in_follows_its_formula() -> None:
    """Features of a class are independent, and classes differ by as much as is said."""
    features, labels = PurchaseSynthetic(num_records=20_000).records()
    assert set(np.unique(features)) == {0, 1}
    sizes = np.bincount(labels, minlength=100)
    assert sizes.min() > 0
    assert np.log(sizes).std() == pytest.approx(0.6, abs=0.15)  # 100 draws, and rounding
    # The mean of sigma(N(-1.5, 1 + 0.45^2)), by quadrature.
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-(z**2) / 2)
    expected = (density / (1 + np.exp(1.5 - np.sqrt(1.2025) * z))).sum() / density.sum()
    assert features.mean() == pytest.approx(expected, abs=0.02)
    largest = features[labels == sizes.argmax()].astype(float)
    rates = largest.mean(axis=0)
    # Number of features of a record: a sum of independent draws with these probabilities.
    assert largest.sum(axis=1).var() == pytest.approx((rates * (1 - rates)).sum(), rel=0.25)
