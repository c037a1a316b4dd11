from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset, TensorDataset

import fedrec.attacks
from fedrec.attacks import (
    ALIE,
    IPM,
    MPAF,
    Attack,
    BackdoorAttack,
    GaussianNoise,
    KrumAttack,
    LabelFlip,
    MinMax,
    MinSum,
    ModelReplacement,
    Neurotoxin,
    SignFlip,
    TrimAttack,
)
from fedrec.exceptions import ConfigurationError
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.instantiate import Instantiator


@pytest.mark.parametrize(
    ("attack", "argument", "value"),
    [
        (SignFlip, "scale", 0.0),
        (GaussianNoise, "std", -1.0),
        (GaussianNoise, "additive", 1),
        (ALIE, "z", "1"),
        (ALIE, "sign", 0),
        (ALIE, "full_knowledge", None),
        (IPM, "epsilon", 0),
        (MinMax, "perturbation", "stdev"),
        (MinSum, "full_knowledge", "yes"),
        (KrumAttack, "threshold", 0.0),
        (TrimAttack, "full_knowledge", 0),
        (MPAF, "scale", float("inf")),
        (LabelFlip, "num_classes", 1),
        (LabelFlip, "pairs", [3]),
        (LabelFlip, "pairs", [(1, 2), (1, 3)]),
        (LabelFlip, "pairs", [(1, -2)]),
        (LabelFlip, "pairs", []),
    ],
)
def test_bad_arguments_are_named(attack: Any, argument: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"Expected `{argument}` to be"):
        attack(**{argument: value})


def test_defaults_are_those_of_the_papers() -> None:
    assert MPAF().scale == 1e6
    assert GaussianNoise().std == 200
    assert GaussianNoise().additive is False
    assert TrimAttack().b_max == 2
    assert KrumAttack().threshold == 1e-5
    assert ALIE().z is None
    assert MinMax().perturbation == MinSum().perturbation == "std"


def test_bad_arguments_of_attacks_around_others_are_named() -> None:
    for make in (
        lambda: Neurotoxin(BackdoorAttack(), top_fraction=1.0),
        lambda: Neurotoxin("BackdoorAttack"),  # type: ignore[arg-type]
        lambda: ModelReplacement(BackdoorAttack(), local_lr=0.0),
    ):
        with pytest.raises(ConfigurationError, match="Expected `"):
            make()


def test_label_flip_wants_classes_or_pairs() -> None:
    for arguments in ({}, {"num_classes": 10, "pairs": [(1, 2)]}):
        with pytest.raises(ConfigurationError, match="Expected `num_classes`"):
            LabelFlip(**arguments)  # type: ignore[arg-type]


def test_every_attack_can_be_named_in_a_recipe() -> None:
    known = ClassFinder().known([Attack])
    concrete = {
        name
        for name in fedrec.attacks.__all__
        if issubclass(getattr(fedrec.attacks, name), Attack)
        and name not in ("Attack", "AttackWrapper")
    }
    assert set(known) == concrete
    assert len(concrete) == 18
    for name in concrete:
        assert ClassFinder().find(name, [Attack]) is getattr(fedrec.attacks, name)


def test_recipe_lines_of_the_documentation() -> None:
    page = Path(__file__).parents[3] / "docs" / "api" / "attacks" / "index.md"
    lines = re.findall(
        r"^\| \[`(\w+)`\]\[[\w.]+\] \| `(\{.*\})` \|$", page.read_text(), re.MULTILINE
    )
    instantiator = Instantiator(ClassFinder())
    for name, line in lines:
        node = OmegaConf.to_container(OmegaConf.create(f"attack: {line}"))["attack"]
        attack = instantiator.component(node, "attack", [Attack])
        assert instantiator.errors == []
        assert type(attack) is getattr(fedrec.attacks, name)
        arguments = attack.spec()["init_args"]
        for argument, value in node["init_args"].items():
            if argument != "attack":
                assert arguments[argument] == value
    assert {name for name, _ in lines} == set(ClassFinder().known([Attack]))


def test_flipped_labels_keep_their_type() -> None:
    class Samples(Dataset[Any]):
        def __init__(self, label: Any) -> None:
            self.label = label

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return np.zeros(2), self.label

    flip = LabelFlip(num_classes=4)
    poisoned: Any = flip.poison_dataset(Samples(1), "c")
    assert isinstance(poisoned[0][1], int)
    assert poisoned[0][1] == 2
    poisoned = flip.poison_dataset(Samples(torch.tensor(1, dtype=torch.int32)), "c")
    assert poisoned[0][1].dtype == torch.int32
    assert poisoned[0][1].item() == 2
    with pytest.raises(IndexError):
        poisoned[1]
    with pytest.raises(ConfigurationError, match="class index"):
        flip.poison_dataset(TensorDataset(torch.zeros(2, 3)), "c")


def test_what_attackers_know() -> None:
    assert {a: (a.full_knowledge, a.colludes) for a in (SignFlip, GaussianNoise, MPAF)} == {
        SignFlip: (False, False),
        GaussianNoise: (False, False),
        MPAF: (False, False),
    }
    for attack in (ALIE(), MinMax(full_knowledge=False), KrumAttack(full_knowledge=False)):
        assert (attack.full_knowledge, attack.colludes) == (False, True)
    for attack in (IPM(), MinMax(), MinSum(), KrumAttack(), TrimAttack()):
        assert attack.full_knowledge
    assert ModelReplacement(MinMax()).full_knowledge
    assert Neurotoxin(ALIE()).colludes
