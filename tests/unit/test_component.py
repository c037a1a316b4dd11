"""Components describe themselves, and are rebuilt from the description."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.attacks import BackdoorAttack
from fedrec.attacks.base import Attack
from fedrec.component import Component, build, subclasses
from fedrec.detectors import KnownMalicious
from fedrec.exceptions import ConfigurationError


class Nested(Component):
    def __init__(self, value: Any = None) -> None:
        self.value = value


def cell(base: type[Aggregator], number: int) -> type[Aggregator]:
    """Define a class, as a notebook cell does that may be run again."""

    class Rule(base):  # type: ignore[misc, valid-type]
        version = number

    return Rule


@pytest.mark.parametrize("bases", [(FedAvg, FedAvg), (FedAvg, Median), (Median, FedAvg)])
def test_a_class_defined_again_replaces_the_one_before(bases: tuple[type, type]) -> None:
    first, second = (cell(base, number) for number, base in enumerate(bases))
    path = first().spec()["class_path"]
    assert path == second().spec()["class_path"]
    assert subclasses(Aggregator)[path] is second
    spec = {"class_path": path, "init_args": {}}
    assert type(build(spec, Aggregator, "aggregator")) is second


class Keywords(Component):
    def __init__(self, strength: int = 1, **options: int) -> None:
        self.strength = strength
        self.options = options


class Positional(Component):
    def __init__(self, *values: int) -> None:
        self.values = values


class Forgetful(Component):
    def __init__(self, size: int = 1, kept: int = 2) -> None:
        self.kept = kept
        self._size = size


@pytest.mark.parametrize(
    ("component", "named"),
    [
        (Keywords(2, other=3), r"Keywords.*`\*\*options: \S+`\. HINT"),
        (Positional(1, 2), r"Positional.*`\*values: \S+`\. HINT"),
        (Forgetful(), r"Forgetful.*for `size: \S+ = 1`\. HINT"),
    ],
)
def test_arguments_that_are_not_stored_by_name(component: Component, named: str) -> None:
    with pytest.raises(ConfigurationError, match="every constructor argument under its own name"):
        component.spec()
    with pytest.raises(ConfigurationError, match=named):
        component.init_args()


@pytest.mark.parametrize(
    "component",
    [
        KnownMalicious(ids=("a", "b")),
        BackdoorAttack(image_shape=(1, 8, 8)),
        Nested(({"a": (1, [2, (3,)])}, None, "x")),
        Nested([TrimmedMean(trim=2), {"rule": Nested((Median(),))}]),
    ],
    ids=lambda component: type(component).__name__,
)
def test_a_description_equals_itself_after_json(component: Component) -> None:
    spec = component.spec()
    read = json.loads(json.dumps(spec))
    assert read == spec
    rebuilt = build(read, Component, "component")
    assert type(rebuilt) is type(component)
    assert rebuilt.spec() == spec


def test_tuples_and_components_are_described_at_any_depth() -> None:
    trimmed = {
        "class_path": "fedrec.aggregators.trimmed_mean.TrimmedMean",
        "init_args": {"trim": 2},
    }
    spec = Nested({"rules": (TrimmedMean(trim=2), (1, 2))}).spec()
    assert spec["init_args"] == {"value": {"rules": [trimmed, [1, 2]]}}
    rule, numbers = build(spec, Component, "component").value["rules"]
    assert repr(rule) == "TrimmedMean(trim=2)"
    assert numbers == [1, 2]


def test_only_loaded_classes_of_the_family_are_built() -> None:
    with pytest.raises(ConfigurationError, match=r"Attack that is loaded.*FedAvg"):
        build(FedAvg().spec(), Attack, "attack")
