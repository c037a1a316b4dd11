"""The tables of the page about LightningModules say what the code does, and name tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fedrec.clients.hooks import (
    CALLED,
    CALLED_ONCE,
    DATAMODULE_HOOKS,
    MODULE_HOOKS,
    NOT_CALLED,
    REFUSED,
    WARNED,
)
from fedrec.clients.trainer import LocalTrainer
from fedrec.models import MLP

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "lightning.md").read_text(encoding="utf-8")
SAID = {
    CALLED: "called",
    CALLED_ONCE: "called once",
    NOT_CALLED: "not called",
    WARNED: "not called, with a warning",
    REFUSED: "refused",
}


def rows(title: str) -> list[tuple[list[str], str, str]]:
    """Return names, what is said of them and the test, of each row under a heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    found = [line.strip("|").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    assert all(len(cells) == 3 for cells in found)
    return [(re.findall(r"`(\w+)`", cells[0]), cells[1], cells[2]) for cells in found]


@pytest.mark.parametrize(
    ("title", "hooks"),
    [
        ("Hooks of a LightningModule", MODULE_HOOKS),
        ("Hooks of a LightningDataModule", DATAMODULE_HOOKS),
    ],
)
def test_every_hook_is_told_as_it_is(title: str, hooks: dict[str, str]) -> None:
    told = {name: what for names, what, _ in rows(title) for name in names}
    assert set(told) == set(hooks)
    for name, what in told.items():
        short = re.split(r"[;:]| in | where | when |, (?!with a)", what.strip())[0]
        assert short == SAID[hooks[name]], name


def test_every_attribute_of_the_trainer_is_told() -> None:
    told = {name for names, *_ in rows("Attributes of `self.trainer`") for name in names}
    ways_in = {"attached", "begin", "hiding_optimizers"}
    trainer = LocalTrainer(MLP(in_features=2))
    assert told == {n for n in dir(trainer) if not n.startswith("_")} - ways_in


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", PAGE)
    assert len(named) > 30
    for path, function, parameter in named:
        text = (REPOSITORY / path).read_text(encoding="utf-8")
        functions = {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)}
        assert function in functions
        if parameter:
            assert re.search(rf'^class {parameter}\(|"{parameter}"', text, re.MULTILINE), parameter
    for title in ("Hooks of a LightningModule", "Hooks of a LightningDataModule"):
        assert all("tests/" in test for *_, test in rows(title))
