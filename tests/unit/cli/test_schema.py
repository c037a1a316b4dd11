"""The JSON Schema of recipes: it takes what runs, and refuses what is mistyped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf

from fedrec.cli.families import FAMILIES
from fedrec.cli.listing import find
from fedrec.cli.main import main
from fedrec.cli.schema import recipe_schema
from fedrec.recipe.shipped import SCHEMA, shipped_folder, shipped_recipes

_OWN = """
from collections.abc import Callable, Sequence
from typing import Literal
from fedrec import Aggregator, Attack

class Largest(Aggregator):
    "The largest entries."
    def __init__(
        self, *, pair: tuple[int, float] = (1, 0.5), mode: Literal["up", "down"] = "up",
        rule: Aggregator | None = None, call: Callable[[int], int] | None = None, **rest
    ):
        "Nothing is kept."
    def aggregate(self, updates, client_weights=None, ctx=None):
        return updates.amax(dim=0)

class Open(Attack):
    def __init__(self, level: "NotImported" = 3, wanted: Sequence[Sequence[str]] | None = None):
        "Nothing is kept."
"""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return recipe_schema()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "own_rules.py").write_text(_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_rules"
    sys.modules.pop("own_rules", None)


def read(text: str) -> Any:
    """Read YAML as recipes are read, so that `1e-3` is a number."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def refusals(schema: dict[str, Any], text: str) -> list[tuple[str, str]]:
    """Return the dotted keys that are refused, with what is said of each."""
    errors = Draft202012Validator(schema).iter_errors(read(text))
    return [(".".join(map(str, error.absolute_path)), error.message) for error in errors]


def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    Draft202012Validator.check_schema(schema)


def test_the_file_beside_the_recipes_is_this_schema(schema: dict[str, Any]) -> None:
    file = shipped_folder() / SCHEMA
    stored = json.loads(file.read_text(encoding="utf-8"))
    again = f"fedrec schema -o {file}"
    assert stored == json.loads(json.dumps(schema)), f"classes or docs have changed: {again}"


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_names_the_schema_and_fits(name: str, schema: dict[str, Any]) -> None:
    path = shipped_recipes()[name]
    text = path.read_text(encoding="utf-8")
    start, _, target = text.splitlines()[0].partition("=")
    assert start == "# yaml-language-server: $schema"
    assert (path.parent / target).resolve() == shipped_folder() / SCHEMA
    assert refusals(schema, text) == []


def test_every_class_is_there_with_its_arguments(schema: dict[str, Any]) -> None:
    for family, classes in find().items():
        for cls in classes:
            assert f"{family}.{cls.__name__}" in schema["$defs"]
    fedrecover = schema["$defs"]["recoverers.FedRecover"]["properties"]
    assert fedrecover["warmup_rounds"] == {
        "type": ["integer", "string"],
        "pattern": r"\$\{.+\}|^\?\?\?$",
        "default": 20,
        "description": (
            "$T_w$, at least 1, and with L-BFGS more than the pairs per client $s$ "
            "(`buffer_size` of the estimator)."
        ),
    }
    assert "path" not in schema["$defs"]["histories.LMDBHistory"]["properties"]
    assert "aggregator" not in schema["properties"]["record"]["properties"]
    assert all(entry["description"] for entry in schema["properties"].values())


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("agregator: Median", "", "('agregator' was unexpected)"),
        ("aggregator: Medain", "aggregator", "'Medain' is not valid"),
        ("aggregator: {class_path: Medain}", "aggregator.class_path", "'Medain' is not valid"),
        ("aggregator: FLDetector", "aggregator", "'FLDetector' is not valid"),
        ("aggregator: {class_path: Krum, init_arg: {}}", "aggregator", "('init_arg' was unexpe"),
        (
            "aggregator: {class_path: TrimmedMean, init_args: {trm: 1}}",
            "aggregator.init_args",
            "('trm' was unexpected)",
        ),
        (
            "recoverers: [{class_path: FedRecover, init_args: {warmup_rounds: many}}]",
            "recoverers.0.init_args.warmup_rounds",
            "'many' does not match",
        ),
        (
            "recoverers: [{class_path: FedRecover, init_args: {warmup_rounds: 2.5}}]",
            "recoverers.0.init_args.warmup_rounds",
            "2.5 is not of type 'integer', 'string'",
        ),
        (
            "data: {class_path: Digits, init_args: {partitioner: Dirichelt}}",
            "data.init_args.partitioner",
            "'Dirichelt' is not valid",
        ),
        (
            (
                "data: {class_path: Digits, init_args: {partitioner: {class_path: Dirichlet, "
                "init_args: {alpah: 1}}}}"
            ),
            "data.init_args.partitioner.init_args",
            "('alpah' was unexpected)",
        ),
        ("record: {max_round: 3}", "record", "('max_round' was unexpected)"),
        ("federation: {collate_fn: x}", "federation", "('collate_fn' was unexpected)"),
        ("recover: {exclude: detectd}", "recover.exclude", "'detectd' does not match"),
        ("recoverers: FedRecover", "recoverers", "'FedRecover' is not of type 'array', 'null'"),
        ("loop: {callbacks: [Timer]}", "loop.callbacks", "is not valid"),
        ("attack: {class_path: Krum, label: x}", "attack", "('label' was unexpected)"),
        ("seed: -1", "seed", "-1 is less than the minimum of 0"),
        ("history: {class_path: LMDBHistory, init_args: {path: x}}", "history.init_args", "'path'"),
    ],
)
def test_a_typing_mistake_is_refused(
    text: str, key: str, said: str, schema: dict[str, Any]
) -> None:
    found = refusals(schema, text)
    assert any(where == key and said in message for where, message in found), found


@pytest.mark.parametrize(
    "text",
    [
        "aggregator: {init_args: {anything: 3}}",  # the class is that of the recipe it extends
        "aggregator: my_rules.Own",
        "aggregator: {class_path: my_rules.deep.Own, init_args: {anything: [1]}}",
        (
            "metrics: [{class_path: torchmetrics.classification.MulticlassF1Score, "
            "init_args: {num_classes: 10}, label: F1}]"
        ),
        "attack:",
        "record: {max_rounds: '???', server_lr: 1e-3}",
        "record: {max_rounds: '${seed}'}",
        "federation: {malicious: [client-0]}",
        "recover: {exclude: [client-0], max_rounds: 3}",
        "loop: {logger: false, callbacks: RichProgressBar}",
        "loop: {logger: [CSVLogger, {class_path: TensorBoardLogger, init_args: {name: x}}]}",
        "extends: [a.yaml, b.yaml]",
    ],
)
def test_what_is_right_is_not_refused(text: str, schema: dict[str, Any]) -> None:
    assert refusals(schema, text) == []


def test_classes_of_ones_own_are_added(own: str, schema: dict[str, Any]) -> None:
    assert refusals(schema, "aggregator: Largest") != []
    mine = recipe_schema([own])
    good = "{pair: [2, 1], mode: down, rule: {class_path: Krum, init_args: {}}, call: 3, more: 4}"
    assert refusals(mine, f"aggregator: {{class_path: Largest, init_args: {good}}}") == []
    for init_args in ("{pair: [2]}", "{pair: [2, x]}", "{mode: left}", "{rule: Largst}"):
        text = f"aggregator: {{class_path: Largest, init_args: {init_args}}}"
        assert len(refusals(mine, text)) == 1, init_args
    # An annotation that cannot be resolved takes anything.
    text = "attack: {class_path: Open, init_args: {level: [1], wanted: [[a], [b]]}}"
    assert refusals(mine, text) == []
    assert mine["$defs"]["aggregators.Largest"]["description"] == "The largest entries."


def test_the_command_writes_it(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], schema: dict[str, Any]
) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema))
    file = tmp_path / "mine.json"
    assert main(["schema", "--allow", own, "-o", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert "aggregators.Largest" in json.loads(file.read_text())["$defs"]


def test_families_are_those_of_the_schema(schema: dict[str, Any]) -> None:
    assert set(FAMILIES) <= set(schema["$defs"])
