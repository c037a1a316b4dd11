"""What is said to whoever gives fedrec something wrong, word for word.

The tables are the `.txt` files beside this one: an input, and indented below it what is said of it.
Lists of more than six known names are written as `...`. In `recipes.txt` an input is one or more
overrides of the recipe below; in `calls.txt` and `data.txt` it is Python with the names of `NAMES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedrec
import fedrec.aggregators
import fedrec.attacks
import fedrec.data
import fedrec.detectors
import fedrec.history
import fedrec.models
import fedrec.recoverers
from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import FedAvg
from fedrec.data import FederatedDataModule
from fedrec.exceptions import FedrecError, RecipeError
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recipe import load_recipe
from fedrec.recipe.model_fit import check_fit
from fedrec.recipe.schema import build_parts
from fedrec.testing.problems import quadratic_federation

HERE = Path(__file__).parent
RECIPE = """\
data: {class_path: Digits, init_args: {num_clients: 5}}
model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
federation: {malicious: 1, batch_size: 8}
aggregator: Median
attack: TrimAttack
detector: KnownMalicious
record: {max_rounds: 4, server_lr: 0.1}
recoverers: [HistoricalOnly]
"""
X = torch.arange(48.0).reshape(12, 4) / 48
LABELS = torch.arange(12) % 3


class Rows(Dataset[Any]):
    """Samples, as they are given."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Stream(IterableDataset[Any]):
    """Samples that come one after the other."""

    def __iter__(self) -> Any:
        return iter(())


class Own(FederatedDataModule):
    """A data module of a user's own, of two clients."""

    def __init__(self, train: Any, **settings: Any) -> None:
        super().__init__(num_clients=2, **settings)
        self.train = train

    def load(self) -> Any:
        return self.train, None


def client(dataset: Any, **settings: Any) -> LightningClient:
    module = MLP(in_features=4, num_classes=3)
    return LightningClient("a", module, dataset, **{"batch_size": 2, **settings})


def loop(**settings: Any) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu", enable_progress_bar=False, logger=False, default_root_dir=".", **settings
    )


def record(rule: Any = None, history: Any = None, federation: Any = None, **settings: Any) -> Any:
    """Record three rounds of a small problem; return the history."""
    history = MemoryHistory() if history is None else history
    federation = quadratic_federation() if federation is None else federation
    arguments = {"max_rounds": 3, "server_lr": 0.1, **settings}
    loop().record(federation, rule or FedAvg(), history, **arguments)
    return history


def recover(recoverer: Any, exclude: Any = (), federation: Any = None, **settings: Any) -> None:
    """Recover from three rounds of a small problem."""
    federation = quadratic_federation() if federation is None else federation
    loop().recover(federation, record(), recoverer, exclude, **settings)


def train(dataset: Any) -> None:
    """Train one client on a data set for a round."""
    one = client(dataset)
    record(federation=Federation([one], one.module), max_rounds=1)


NAMES: dict[str, Any] = {
    name: getattr(package, name)
    for package in (
        fedrec,
        fedrec.aggregators,
        fedrec.attacks,
        fedrec.data,
        fedrec.detectors,
        fedrec.history,
        fedrec.models,
        fedrec.recoverers,
    )
    for name in package.__all__
}
for made in (Rows, Stream, Own, client, loop, record, recover, train, quadratic_federation):
    NAMES[made.__name__] = made
for given in (DataLoader, TensorDataset):
    NAMES[given.__name__] = given
NAMES |= {"torch": torch, "X": X, "LABELS": LABELS}
NAMES["UPDATES"] = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
NAMES["TRAIN"] = TensorDataset(X, LABELS)


def table(name: str) -> list[Any]:
    """Return inputs and texts of a table, as parameters."""
    entries = (HERE / name).read_text(encoding="utf-8").strip().split("\n\n")
    cases = []
    for entry in entries:
        lines = entry.splitlines()
        wrong = [line for line in lines if not line.startswith("    ")]
        said = [line[4:] for line in lines if line.startswith("    ")]
        assert wrong
        assert said, entry
        cases.append(pytest.param(wrong, said, id=" ".join(wrong)[:60]))
    return cases


def shortened(text: str) -> str:
    return re.sub(r"Known: [^,.]+(, [^,.]+){6,}\.", "Known: ... .", text)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDREC_DATA", raising=False)
    (tmp_path / "small.yaml").write_text(RECIPE)
    mnist = tmp_path / "damaged" / "mnist"
    mnist.mkdir(parents=True)
    (mnist / "train-images-idx3-ubyte").write_bytes(b"nonsense")
    for name in ("train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (mnist / f"{name}-ubyte").write_bytes(b"")


def check(path: str, overrides: list[str]) -> None:
    """Do what `fedrec validate` does with a recipe."""
    recipe = load_recipe(path, overrides)
    data = build_parts(recipe).data
    data.client_datasets()
    check_fit(recipe, data)


def texts(act: Callable[[], object]) -> list[str]:
    with pytest.raises(FedrecError) as caught:
        act()
    error = caught.value
    said = error.errors if isinstance(error, RecipeError) else [str(error)]
    return [shortened(line) for text in said for line in text.splitlines()]


@pytest.mark.parametrize(("overrides", "said"), table("recipes.txt"))
def test_a_wrong_recipe(overrides: list[str], said: list[str]) -> None:
    assert texts(lambda: check("small.yaml", overrides)) == said


@pytest.mark.parametrize(("code", "said"), [*table("calls.txt"), *table("data.txt")])
@pytest.mark.filterwarnings("ignore::fedrec.exceptions.FedrecWarning")
def test_a_wrong_call_or_data_set(code: list[str], said: list[str]) -> None:
    assert texts(lambda: exec("\n".join(code), dict(NAMES))) == said


FILES = {
    "empty": (
        "",
        """\
data: Expected a section `data`, but there is none.
model: Expected a section `model`, but there is none.
aggregator: Expected a section `aggregator`, but there is none.
record: Expected a section `record`, but there is none.
record.max_rounds: Expected `max_rounds` to be an integer, but it is missing.
record.server_lr: Expected `server_lr` to be a number, but it is missing.""",
    ),
    "a list": ("- a\n- b\n", "bad.yaml: Expected keys with values, but got a list."),
    "a tab": (
        "data:\n\tclass_path: Digits\n",
        (
            "bad.yaml, line 2: Expected YAML, but found character that cannot start any token. "
            "HINT: indent with spaces."
        ),
    ),
    "a key twice": (
        RECIPE + "model: CNN\n",
        "bad.yaml, line 9: Expected YAML, but found duplicate key model.",
    ),
    "a bracket that is not closed": (
        "data: {class_path: Digits\n",
        "bad.yaml, line 2: Expected YAML, but did not find expected ',' or '}'.",
    ),
    "itself": (
        "extends: bad.yaml\n" + RECIPE,
        (
            "bad.yaml: extends: Expected `extends` to end somewhere, but it runs in a circle: "
            "bad.yaml -> bad.yaml."
        ),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file(name: str) -> None:
    text, said = FILES[name]
    Path("bad.yaml").write_text(text)
    assert texts(lambda: check("bad.yaml", [])) == said.splitlines()


def test_there_are_enough_of_each_and_none_twice() -> None:
    for name, least in (("recipes.txt", 60), ("calls.txt", 40), ("data.txt", 20)):
        inputs = [tuple(case.values[0]) for case in table(name)]
        assert len(inputs) >= least
        assert len(set(inputs)) == len(inputs)
