from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.data import HAR, IIDPartitioner
from fedrec.exceptions import ConfigurationError

REPOSITORY = Path(__file__).resolve().parents[3]
DATA_ROOT = Path(os.environ.get("FEDREC_DATA", REPOSITORY.parent / "shared" / "data"))
NAME = "UCI HAR Dataset"
OUTER = "human+activity+recognition+using+smartphones.zip"

# Sample i of the twelve: its first feature is i / 16 - 0.5, the others 0.
PEOPLE = np.array([2, 2, 10, 2, 10, 10, 2, 10, 2, 10, 2, 2])
LABELS = np.arange(12) % 6 + 1
NUM_TRAIN = 7


def contents(**changed: str) -> dict[str, str]:
    """What the six files hold: the first seven samples are those of the original training set."""
    files = {}
    for part, chosen in (("train", slice(None, NUM_TRAIN)), ("test", slice(NUM_TRAIN, None))):
        numbers = np.arange(12)[chosen]
        rows = [f"  {i / 16 - 0.5:.7e}" + " 0.0000000e+000" * 560 for i in numbers]
        files[f"{part}/X_{part}.txt"] = "\n".join(rows) + "\n"
        files[f"{part}/y_{part}.txt"] = "".join(f"{y}\n" for y in LABELS[chosen])
        files[f"{part}/subject_{part}.txt"] = "".join(f"{p}\n" for p in PEOPLE[chosen])
    return files | {name.replace("__", "/") + ".txt": text for name, text in changed.items()}


def write(folder: Path, **changed: str) -> Path:
    for name, text in contents(**changed).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def archive(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for name, text in contents().items():
            target.writestr(f"{NAME}/{name}", text)
    return file


def numbers(inputs: torch.Tensor) -> list[int]:
    return ((inputs[:, 0] + 0.5) * 16).round().long().tolist()


@pytest.mark.parametrize("form", ["zip", "root zip", "nested zip", "folder", "bare", "root bare"])
def test_every_person_is_split_three_to_one(tmp_path: Path, form: str) -> None:
    if form == "nested zip":
        inner = archive(tmp_path / "inner.zip")
        (tmp_path / "har").mkdir()
        with zipfile.ZipFile(tmp_path / "har" / OUTER, "w") as outer:
            outer.write(inner, f"{NAME}.zip")
    elif form in ("zip", "root zip"):
        archive(tmp_path / ("har" if form == "zip" else ".") / f"{NAME}.zip")
    else:
        write(tmp_path / {"folder": f"har/{NAME}", "bare": "har", "root bare": "."}[form])
    data = HAR(root=tmp_path, num_clients=2)
    clients = data.client_datasets()
    assert list(clients) == ["client-0", "client-1"]
    held = [numbers(dataset.tensors[0]) for dataset in clients.values()]
    # Person 2 has 7 samples, of which ceil(5.25) = 6 train; person 10 has 5, of which ceil(3.75).
    assert [len(h) for h in held] == [6, 4]
    assert [set(PEOPLE[h]) for h in held] == [{2}, {10}]
    test, test_labels = data.test_dataset.tensors
    assert sorted(numbers(test) + held[0] + held[1]) == list(range(12))
    for inputs, labels in (*(d.tensors for d in clients.values()), (test, test_labels)):
        assert inputs.shape[1:] == (561,)
        assert inputs.dtype == torch.float32
        assert labels.tolist() == [i % 6 for i in numbers(inputs)]
        assert torch.equal(inputs[:, 0] * 16 + 8, torch.tensor(numbers(inputs)).float())
    assert data.num_classes == 6


def test_the_seed_decides_who_trains_on_what(tmp_path: Path) -> None:
    write(tmp_path)
    found = {
        seed: tuple(numbers(HAR(root=tmp_path, num_clients=2, seed=seed).test_dataset.tensors[0]))
        for seed in range(8)
    }
    again = HAR(root=tmp_path, num_clients=2, seed=3).test_dataset.tensors[0]
    assert tuple(numbers(again)) == found[3]
    assert len(set(found.values())) > 1


def test_other_partitions(tmp_path: Path) -> None:
    write(tmp_path)
    alone = HAR(root=tmp_path, num_clients=1)
    assert len(alone.client_datasets()["client-0"]) == 10
    iid = HAR(root=tmp_path, num_clients=5, partitioner=IIDPartitioner())
    assert [len(d) for d in iid.client_datasets().values()] == [2] * 5
    with pytest.raises(ConfigurationError, match="`num_clients=2` makes every user a client"):
        HAR(root=tmp_path, num_clients=3).client_datasets()


def test_the_server_gets_samples_of_the_clients(tmp_path: Path) -> None:
    write(tmp_path)
    data = HAR(root=tmp_path, num_clients=2, server_samples=2)
    held = [numbers(d.tensors[0]) for d in data.client_datasets().values()]
    assert data.server_dataset is not None
    server = numbers(data.server_dataset.tensors[0])
    assert (len(server), len(held[0]) + len(held[1]), len(data.test_dataset)) == (2, 8, 2)
    assert not set(server) & {*held[0], *held[1]}


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"put `UCI HAR Dataset\.zip` .* into .*har"):
        HAR(root=tmp_path).setup("fit")
    (write(tmp_path / "har") / "test" / "y_test.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"6 files of HAR, but there is no test/y_test\.t"):
        HAR(root=tmp_path).setup("fit")


@pytest.mark.parametrize("name", [f"{NAME}.zip", OUTER])
def test_a_damaged_archive(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PK nothing")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        HAR(root=tmp_path).setup("fit")
    file = archive(tmp_path / name)  # an archive in which bytes have changed, or without another
    content = bytearray(file.read_bytes())
    content[100:140] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(ConfigurationError, match="HINT"):
        HAR(root=tmp_path).setup("fit")


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("train/X_train", "0.5 0.25\n" * NUM_TRAIN, r"line of 561 finite numbers .* \(7, 2\)"),
        ("train/X_train", ("nan" + " 0" * 560 + "\n") * NUM_TRAIN, "numbers that are not finite"),
        ("train/X_train", "0 one 2\n", "line of 561 finite numbers"),
        ("train/X_train", "", r"as many lines .* but got 0, 7 and 7"),
        ("train/y_train", "1\n2\n", r"as many lines .* but got 7, 2 and 7"),
        ("test/y_test", "1\n2\n3\n4\n7\n", "labels 1 to 6 .* but got 1 to 7"),
        ("test/y_test", "1\n2\n0\n4\n5\n", "labels 1 to 6 .* but got 0 to 5"),
        ("test/subject_test", "1.5\n" * 5, "line of 1 finite number for every sample"),
    ],
)
def test_files_with_something_else(tmp_path: Path, file: str, text: str, reason: str) -> None:
    write(tmp_path, **{file.replace("/", "__"): text})
    with pytest.raises(ConfigurationError, match=reason):
        HAR(root=tmp_path, num_clients=2).setup("fit")


def test_what_it_says_of_itself(tmp_path: Path) -> None:
    write(tmp_path)
    data = HAR(root=tmp_path, num_clients=2, seed=1)
    assert repr(data) == "HAR(num_clients=2, partitioner=None, seed=1)"
    data.client_datasets()
    assert repr(data) == "HAR(num_clients=2, partitioner=None, seed=1)"
    assert "IIDPartitioner()" in repr(HAR(partitioner=IIDPartitioner()))
    with pytest.raises(ConfigurationError, match="root"):
        HAR(root=3)  # type: ignore[arg-type]


@pytest.mark.skipif(
    not (DATA_ROOT / "har" / f"{NAME}.zip").is_file(), reason=f"no HAR files in {DATA_ROOT}"
)
def test_the_real_files() -> None:
    with zipfile.ZipFile(DATA_ROOT / "har" / f"{NAME}.zip") as source:
        names = [f"{NAME}/{part}/subject_{part}.txt" for part in ("train", "test")]
        people = np.array([int(n) for name in names for n in source.read(name).split()])
    counts = np.bincount(people)[1:]
    data = HAR(root=DATA_ROOT)
    sizes = [len(dataset) for dataset in data.client_datasets().values()]
    assert sizes == np.ceil(counts * 0.75).tolist()
    assert len(sizes) == 30
    assert len(data.test_dataset) == np.floor(counts * 0.25).sum()
    inputs, labels = data.train_dataset.tensors
    assert (float(inputs.min()), float(inputs.max())) == (-1.0, 1.0)
    assert labels.unique().tolist() == [0, 1, 2, 3, 4, 5]
