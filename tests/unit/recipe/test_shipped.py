"""Recipes by name, and copies of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedrec.exceptions import ConfigurationError
from fedrec.recipe import load_recipe
from fedrec.recipe.shipped import (
    about,
    copy_recipe,
    find_recipe,
    shipped_folder,
    shipped_recipes,
)

SHIPPED = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_of_the_repository_has_a_name_and_says_what_it_is() -> None:
    assert shipped_folder() == SHIPPED
    assert set(shipped_recipes().values()) == set(SHIPPED.rglob("*.yaml"))
    for path in shipped_recipes().values():
        assert 30 < len(about(path)) < 250


def test_a_name_is_a_recipe_of_fedrec_unless_a_file_is_here(here: Path) -> None:
    assert find_recipe("mnist/base") == SHIPPED / "mnist" / "base.yaml"
    assert load_recipe("mnist/base").name == "base"
    (here / "mnist").mkdir()
    own = here / "mnist" / "base.yaml"
    own.write_text("seed: 1\n")
    assert find_recipe("mnist/base") == Path("mnist/base.yaml")
    assert find_recipe("mnist/base.yaml") == Path("mnist/base.yaml")
    own.rename(here / "mnist" / "base")  # a file without a suffix, as it is written
    assert find_recipe("mnist/base") == Path("mnist/base")


def test_a_folder_of_the_same_name_hides_nothing(here: Path) -> None:
    (here / "quickstart").mkdir()
    assert find_recipe("quickstart") == SHIPPED / "quickstart.yaml"


@pytest.mark.parametrize("recipe", ["./quickstart", "quickstart.yaml", Path("quickstart")])
def test_what_can_only_be_a_file_is_no_name(recipe: str | Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^Expected `RECIPE` to be a YAML file"):
        find_recipe(recipe)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("quickstrat", "Did you mean `quickstart` or `quickstart_backdoor`? HINT: `fedrec ls re"),
        ("quickstart.yaml", "Did you mean `quickstart`? HINT"),
        ("coffee_break_trim", "Did you mean `mnist/coffee_break_trim`? HINT"),
        ("har", "Did you mean `har/base` or `har/trimmed_mean_backdoor` or `har/trimmed_mean_t"),
        ("mien.yaml", "Did you mean `mine.yaml`? HINT"),
        ("folder", "but got 'folder', a folder. HINT: it holds folder/inside.yaml."),
        ("runs/one", "but got 'runs/one', a folder. HINT: `runs/one/recipe.yaml` is the recipe o"),
        ("xyzzy", "but got 'xyzzy'. HINT: `fedrec ls recipes` lists"),
    ],
)
def test_no_such_recipe(here: Path, recipe: str, said: str) -> None:
    for name in ("mine.yaml", "folder/inside.yaml", "runs/one/recipe.yaml"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("seed: 1\n")
    with pytest.raises(ConfigurationError) as caught:
        find_recipe(recipe)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["quickstart", "quickstart_backdoor", "paper/main_grid_purchase"])
def test_a_copy_is_the_same_recipe(here: Path, name: str) -> None:
    copied = copy_recipe(name, "copies")
    assert copied[0] == Path("copies") / f"{name}.yaml"
    assert load_recipe(copied[0]).config == load_recipe(name).config
    # It reads nothing of fedrec's folder any more.
    assert all(path.resolve().is_relative_to(here) for path in copied)
    os.chdir("copies")
    assert find_recipe(name) == Path(f"{name}.yaml")


def test_copies_extend_the_same_copies(here: Path) -> None:
    names = [str(path) for path in copy_recipe("paper/base")]
    assert names == ["paper/base.yaml", "mnist/base.yaml", "recipe.schema.json"]
    # What is there as it should be is left alone; only what is missing is written.
    assert [str(path) for path in copy_recipe("paper/main_grid")] == ["paper/main_grid.yaml"]
    assert copy_recipe("paper/main_grid") == []


def test_a_copy_overwrites_nothing(here: Path) -> None:
    (here / "mnist").mkdir()
    (here / "mnist" / "base.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigurationError, match=r"write `mnist/base.yaml`, but another file"):
        copy_recipe("mnist/coffee_break_trim")
    assert [path.name for path in here.iterdir()] == ["mnist"]
    assert [path.name for path in (here / "mnist").iterdir()] == ["base.yaml"]
    with pytest.raises(ConfigurationError, match=r"`mnist/base\.yaml` is a file"):
        copy_recipe("quickstart", "mnist/base.yaml")
    with pytest.raises(ConfigurationError, match="Did you mean `quickstart`"):
        copy_recipe("quickstart.yaml")
