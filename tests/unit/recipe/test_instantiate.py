"""From class_path and init_args to objects; which classes a recipe may name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedrec.aggregators import Aggregator, Median, TrimmedMean
from fedrec.data import DegreeOfNonIID, Digits, FederatedDataModule, Partitioner
from fedrec.exceptions import ConfigurationError
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.instantiate import Instantiator
from fedrec.recipe.loading import UNUSABLE
from fedrec.recoverers import Recoverer

_SOURCE = """
from fedrec.aggregators import Aggregator

class Largest(Aggregator):
    def aggregate(self, updates, client_weights=None, ctx=None):
        return updates.amax(dim=0)

class Median(Largest):
    pass

class Scaled(Aggregator):
    def __init__(self, rule: Aggregator, factor: float = 1.0):
        self.rule, self.factor = rule, factor
    def aggregate(self, updates, client_weights=None, ctx=None):
        return self.factor * self.rule(updates)

class Opening(Largest):
    def __init__(self, path: str, factor: float = 1.0):
        open(path, "w").close()

class Refusing(Largest):
    def __init__(self):
        raise RuntimeError("no strength")
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_rules.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_rules"
    sys.modules.pop("own_rules", None)


def build(node: Any, base: type, allow: tuple[str, ...] = ()) -> tuple[Any, list[str]]:
    make = Instantiator(ClassFinder(allow))
    return make.component(node, "slot", [base]), make.errors


@pytest.mark.parametrize(
    "node",
    [
        {"class_path": "TrimmedMean", "init_args": {"trim": 2}},
        {"class_path": "fedrec.aggregators.TrimmedMean", "init_args": {"trim": 2}},
        {"class_path": "fedrec.aggregators.trimmed_mean.TrimmedMean", "init_args": {"trim": 2}},
    ],
)
def test_builds_by_short_name_and_dotted_path(node: Any) -> None:
    rule, errors = build(node, Aggregator)
    assert errors == []
    assert type(rule) is TrimmedMean
    assert rule.trim == 2


def test_nested_components_are_built_and_checked() -> None:
    inner = {"class_path": "DegreeOfNonIID", "init_args": {"q": 0.5}}
    data, errors = build(
        {"class_path": "Digits", "init_args": {"partitioner": inner}}, FederatedDataModule
    )
    assert errors == []
    assert type(data) is Digits
    assert type(data.partitioner) is DegreeOfNonIID

    inner["init_args"] = {"q": 2}
    _, errors = build(
        {"class_path": "Digits", "init_args": {"partitioner": inner}}, FederatedDataModule
    )
    assert len(errors) == 1
    assert errors[0].startswith("slot.init_args.partitioner.init_args.q: Expected `q` to be")


def test_a_plain_name_stands_for_a_nested_component() -> None:
    data, errors = build(
        {"class_path": "Digits", "init_args": {"partitioner": "IIDPartitioner"}},
        FederatedDataModule,
    )
    assert errors == []
    assert isinstance(data.partitioner, Partitioner)


def test_defaults_are_given_where_the_class_has_them() -> None:
    make = Instantiator(ClassFinder())
    node = {"class_path": "Digits", "init_args": {"num_clients": 3}}
    data = make.component(node, "data", [FederatedDataModule], defaults={"seed": 7, "nothing": 1})
    assert data.seed == 7
    node["init_args"]["seed"] = 8
    assert make.component(node, "data", [FederatedDataModule], defaults={"seed": 7}).seed == 8


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            "TrimedMean",
            "slot: Expected `class_path` to be an Aggregator, but got 'TrimedMean'. Did",
        ),
        ({"class_path": "TrimedMean"}, "slot.class_path: Expected `class_path` to be"),
        (3, "slot: Expected `slot` to be an Aggregator, but got 3."),
        ({"init_args": {}}, "HINT: write a class name, or a mapping with `class_path`"),
        (
            {"class_path": "Median", "trim": 1},
            "slot.trim: Expected `key` to be known, but got 'trim'. Known: class_path, init_args.",
        ),
        (
            {"class_path": "TrimmedMean", "init_args": {"trimm": 1}},
            "to be an argument of TrimmedMean, but got 'trimm'. Did you mean `trim`? Known: trim.",
        ),
        (
            {"class_path": "TrimmedMean", "init_args": {"trim": "1"}},
            "slot.init_args.trim: Expected `trim` to be an integer or a number, but got '1'.",
        ),
        ({"class_path": "TrimmedMean", "init_args": [1]}, "slot.init_args: Expected `init_args`"),
        ({"class_path": "TrimmedMean", "init_args": {"trim": -1}}, "slot.init_args.trim: "),
        ("fedrec.attacks.TrimAttack", "slot: Expected `class_path` to be an Aggregator, but got"),
        ("fedrec.aggregators.Aggregator", "to be an Aggregator that can be used as it is"),
        ("fedrec.aggregators.Medain", "in `fedrec.aggregators`, but got 'Medain'. Did you mean"),
        ("fedrec.nothing.Median", "(No module named 'fedrec.nothing')"),
    ],
)
def test_mistakes_say_where_and_what(node: Any, message: str) -> None:
    built, errors = build(node, Aggregator)
    assert built is UNUSABLE
    assert any(message in error for error in errors), errors


def test_several_mistakes_in_one_component_are_all_found() -> None:
    node = {
        "class_path": "FedRecover",
        "init_args": {"warmup_rounds": "a", "final_rounds": 1.5, "nothing": 0},
    }
    _, errors = build(node, Recoverer)
    assert [e.partition(":")[0] for e in errors] == [
        "slot.init_args.warmup_rounds",
        "slot.init_args.final_rounds",
        "slot.init_args.nothing",
    ]


def test_what_could_not_be_read_is_not_reported_again() -> None:
    node = {"class_path": "FedRecover", "init_args": {"warmup_rounds": UNUSABLE}}
    assert build(node, Recoverer) == (UNUSABLE, [])


@pytest.mark.parametrize("path", ["os.system", "builtins.eval", "subprocess.Popen", "torchx.Y"])
def test_other_packages_are_refused_and_not_imported(path: str) -> None:
    before = set(sys.modules)
    built, errors = build(path, Aggregator)
    assert built is UNUSABLE
    assert f"--allow {path.partition('.')[0]}" in errors[0]
    assert set(sys.modules) == before


def test_a_class_of_torch_needs_the_base_of_the_slot() -> None:
    layer, errors = build({"class_path": "torch.nn.Tanh"}, nn.Module)
    assert errors == []
    assert type(layer) is nn.Tanh
    _, errors = build("torch.nn.Tanh", Aggregator)
    assert "to be an Aggregator, but got 'torch.nn.Tanh'" in errors[0]


def test_allowed_modules_by_path_and_by_short_name(own_module: str) -> None:
    _, errors = build("own_rules.Largest", Aggregator)
    assert "--allow own_rules" in errors[0]
    for name in ("own_rules.Largest", "Largest"):
        rule, errors = build(name, Aggregator, (own_module,))
        assert errors == []
        assert type(rule).__name__ == "Largest"


def test_an_own_class_takes_components(own_module: str) -> None:
    node = {"class_path": "Scaled", "init_args": {"rule": "Largest", "factor": 2}}
    rule, errors = build(node, Aggregator, (own_module,))
    assert errors == []
    assert type(rule.rule).__name__ == "Largest"
    _, errors = build("Scaled", Aggregator, (own_module,))
    assert errors == [
        "slot.init_args.rule: Expected `rule` to be an Aggregator, but it is missing."
    ]


def test_a_name_that_two_classes_have_is_refused(own_module: str) -> None:
    _, errors = build("Median", Aggregator, (own_module,))
    assert "fedrec.aggregators.median.Median or own_rules.Median" in errors[0]
    rule, errors = build("fedrec.aggregators.Median", Aggregator, (own_module,))
    assert type(rule) is Median
    assert errors == []


def test_an_allowed_module_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="`nowhere_to_be_found` cannot: No module named"):
        ClassFinder(["nowhere_to_be_found"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_there", "No module named 'not_there'. HINT: install `not_there`, which it im"),
        ("1 / 0", "ZeroDivisionError: division by zero. HINT: `python -c 'import own_broken'`"),
        ("def (", r"SyntaxError: invalid syntax \(own_broken.py, line 1\)"),
        ("raise SystemExit(3)", "SystemExit: 3. HINT: "),
    ],
)
def test_an_allowed_module_that_fails(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match=f"but `own_broken` cannot: {message}"):
        ClassFinder(["own_broken"])


def test_constructors_of_any_kind_may_refuse(own_module: str) -> None:
    _, errors = build("Refusing", Aggregator, (own_module,))
    assert errors == ["slot.init_args: no strength"]


def test_no_text_is_made_up_for_a_constructor(
    own_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    _, errors = build(
        {"class_path": "Opening", "init_args": {"factor": 2}}, Aggregator, (own_module,)
    )
    assert errors == ["slot.init_args.path: Expected `path` to be text, but it is missing."]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("buffer_size", [-1, "x"])
def test_what_does_not_fit_to_a_stand_in_is_not_a_mistake(buffer_size: Any) -> None:
    # Two warm-up rounds are too few for the two pairs by default, but not for one pair.
    estimator = {"class_path": "PairedLBFGS", "init_args": {"buffer_size": buffer_size}}
    arguments = {"estimator": estimator, "warmup_rounds": 2, "final_rounds": -3}
    _, errors = build({"class_path": "FedRecover", "init_args": arguments}, Recoverer)
    assert sorted(error.partition(":")[0] for error in errors) == [
        "slot.init_args.estimator.init_args.buffer_size",
        "slot.init_args.final_rounds",
    ]
