"""Whether a model fits the data: what is taken for a sample, and that a trial leaves no trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrec.exceptions import ConfigurationError, RecipeError
from fedrec.loop.checkpoint import load_state
from fedrec.recipe import load_recipe, run
from fedrec.recipe.model_fit import check_fit
from fedrec.recipe.schema import build_parts

_OWN = """
import random
import numpy as np
import torch
from torch.utils.data import TensorDataset
from fedrec.data import FederatedDataModule
from fedrec.models import MLP

class Bytes(TensorDataset):
    "Stores bytes, and gives them as numbers of twice as many features."
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return torch.cat([x, x]) / 255, y

class Coins(FederatedDataModule):
    def load(self):
        x = torch.arange(64, dtype=torch.uint8).reshape(16, 4)
        return (Bytes(x, torch.arange(16) % 2),) * 2

class Drawing(MLP):
    "Moves every random number generator on that a test moves on."
    def forward(self, x):
        random.random(), np.random.rand()
        return super().forward(x) + 0 * torch.rand(1)

class Silent(MLP):
    forward = torch.nn.Module.forward

class Single(MLP):
    def forward(self, x):
        return super().forward(x)[:, :1]

class Numbers(FederatedDataModule):
    "The target is twice the sum."
    def load(self):
        x = torch.arange(24.0).reshape(12, 2) / 24
        return (TensorDataset(x, 2 * x.sum(dim=1, keepdim=True)),) * 2

class Line(MLP):
    def forward(self, x):
        return super().forward(x)[:, :1]
    def training_step(self, batch, batch_idx):
        return ((self(batch[0]) - batch[1]) ** 2).mean()

class Named(MLP):
    def forward(self, x):
        return {"logits": super().forward(x)}
"""
_RECIPE = """
data: {class_path: Coins, init_args: {num_clients: 2}}
model: {class_path: MLP, init_args: {in_features: 8, hidden: [4], num_classes: 2}}
aggregator: FedAvg
record: {max_rounds: 1, server_lr: 0.5}
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_fitting.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "coins.yaml"
    path.write_text(_RECIPE)
    yield path
    sys.modules.pop("own_fitting", None)


def check(path: Path, *overrides: str) -> None:
    recipe = load_recipe(path, overrides, ["own_fitting"])
    check_fit(recipe, build_parts(recipe).data)


def test_samples_are_those_that_the_data_set_gives(recipe_file: Path) -> None:
    check(recipe_file)
    with pytest.raises(RecipeError, match=r"`in_features` to be 8 for these data, but got 4"):
        check(recipe_file, "model.init_args.in_features=4")


def test_no_random_number_generator_moves_on(recipe_file: Path) -> None:
    def states() -> list[str]:
        return [str(random.getstate()), str(np.random.get_state()), str(torch.get_rng_state())]  # noqa: NPY002

    recipe = load_recipe(
        recipe_file,
        ["model.class_path=Drawing", "model.init_args={in_features: 8, num_classes: 2}"],
        ["own_fitting"],
    )
    data, before = build_parts(recipe).data, states()
    check_fit(recipe, data)
    assert states() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Silent",
            r'model: .* cannot take samples of shape \(8,\) \(.*missing the required "forward"',
        ),
        ("Named", r"`Named.forward` to give logits of shape \(2, 2\) for 2 samples, but got dict"),
    ],
)
def test_models_whose_forward_gives_no_logits(recipe_file: Path, name: str, message: str) -> None:
    arguments = "model.init_args={in_features: 8, num_classes: 2}"
    with pytest.raises(RecipeError, match=message):
        check(recipe_file, f"model.class_path={name}", arguments)


def test_a_target_label_that_no_output_stands_for(recipe_file: Path) -> None:
    trigger = "pattern: {class_path: FeatureTrigger, init_args: {k: 2}}"
    attack = f"attack={{class_path: BackdoorAttack, init_args: {{target_label: 1, {trigger}}}}}"
    check(recipe_file, attack)
    with pytest.raises(RecipeError, match="attack: Expected `target_label` to be below 2"):
        check(recipe_file, attack.replace("target_label: 1", "target_label: 2"))


def test_one_logit_fits_two_classes(recipe_file: Path) -> None:
    check(recipe_file, "model.class_path=Single", "model.init_args={in_features: 8}")


def test_regression_needs_metrics(recipe_file: Path, tmp_path: Path) -> None:
    overrides = [
        "data={class_path: Numbers, init_args: {num_clients: 2}}",
        "model={class_path: Line, init_args: {in_features: 2, hidden: []}}",
    ]
    recipe = load_recipe(recipe_file, overrides, ["own_fitting"])
    with pytest.raises(ConfigurationError, match="`metrics` in a recipe"):
        run(recipe, folder=tmp_path / "without", progress=False)
    assert not (tmp_path / "without" / "history").exists()
    measured = [*overrides, "metrics=[torchmetrics.MeanSquaredError]", "detector=KnownMalicious"]
    measured += ["federation.malicious=[client-0]", "recoverers=[HistoricalOnly]"]
    recipe = load_recipe(recipe_file, measured, ["own_fitting"])
    method = run(recipe, folder=tmp_path / "with", progress=False)["methods"][0]
    assert method["ter"] is None
    weights = load_state(tmp_path / "with" / "recover/HistoricalOnly/checkpoint.npz")["weights"]
    x = torch.arange(24.0).reshape(12, 2) / 24
    found = x @ weights[:2] + weights[20]  # of the first of ten outputs: weights, then its bias
    by_hand = float(((found - 2 * x.sum(dim=1)) ** 2).mean())
    assert method["metrics"]["MeanSquaredError"] == pytest.approx(by_hand, rel=1e-5)
