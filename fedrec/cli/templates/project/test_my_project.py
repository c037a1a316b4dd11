"""The rule does what it says, is what a rule has to be, and the recipe recovers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from my_project import MedianLength

from fedrec.recipe import load_recipe, run
from fedrec.testing import AggregatorContract


class TestMedianLength(AggregatorContract):
    """What every aggregation rule has to pass."""

    def make(self) -> MedianLength:
        """Return the rule to test."""
        return MedianLength()


def test_long_updates_are_shortened_to_the_median_length() -> None:
    """Lengths are 1, 2 and 10: the last one counts as if it were 2 long."""
    updates = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 10.0]])
    assert torch.allclose(MedianLength()(updates), torch.tensor([1.0, 2 / 3]))


def test_a_factor_below_1_is_refused() -> None:
    """It would shorten most of the updates."""
    with pytest.raises(ValueError, match="`factor` to be a number of at least 1"):
        MedianLength(factor=0.5)


def test_the_recipe_recovers(tmp_path: Path) -> None:
    """The attack does harm, and without the attackers the model is as good as it can be."""
    file = Path(__file__).with_name("my_project.yaml")
    recipe = load_recipe(file, allow=["my_project"])
    results = run(recipe, output_dir=tmp_path, progress=False)
    recovered, scratch = results["methods"]
    assert results["poisoned"]["ter"] > scratch["ter"] + 0.1
    assert recovered["ter"] <= scratch["ter"] + 0.05
