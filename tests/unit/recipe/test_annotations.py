"""Whether YAML values fit type annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import pytest

from fedrec.aggregators import Aggregator, Median
from fedrec.recipe.annotations import MisfitError, describe, fit, parameter_types

if TYPE_CHECKING:
    from nowhere import Unknown


def component(node: Any, bases: Sequence[type]) -> Any:
    return node, list(bases)


@pytest.mark.parametrize(
    ("value", "annotation", "fitted"),
    [
        (1, int, 1),
        (1, float, 1),
        (0.5, int | float, 0.5),
        (None, int | None, None),
        (None, Optional[int], None),  # noqa: UP045 - users write it
        ("a", str, "a"),
        ("a", Path, Path("a")),
        (True, bool | int, True),
        ("a", Literal["a", "b"], "a"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1, 2], Sequence[int], [1, 2]),
        ([1, 2], int | Sequence[int], [1, 2]),
        ({"a": 1}, Mapping[str, int], {"a": 1}),
        ({"a": 1}, Any, {"a": 1}),
        ("anything", Callable[[int], int], "anything"),
        ("Median", Aggregator, ("Median", [Aggregator])),
        ({"class_path": "X"}, Aggregator | None, ({"class_path": "X"}, [Aggregator])),
        ("auto", str | Aggregator, "auto"),
        ([{"class_path": "X"}], Sequence[Aggregator], [({"class_path": "X"}, [Aggregator])]),
    ],
)
def test_fits(value: Any, annotation: Any, fitted: Any) -> None:
    assert fit(value, annotation, component) == fitted


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (True, int),
        (True, float),
        (1.5, int),
        ("1", int),
        ([1], int),
        (1, str),
        (None, str),
        (1, bool),
        ("c", Literal["a", "b"]),
        ("ab", Sequence[str]),
        ([1, "a"], Sequence[int]),
        ([1, 2, 3], tuple[int, str]),
        ([1], Mapping[str, int]),
        (3, Aggregator),
    ],
)
def test_misfits(value: Any, annotation: Any) -> None:
    with pytest.raises(MisfitError):
        fit(value, annotation, component)


def test_a_name_for_type_checkers_only_does_not_hide_the_others() -> None:
    def function(a: int, b: Unknown, c: str | None = None) -> None: ...

    assert parameter_types(function) == {"a": int, "c": str | None, "return": type(None)}


def test_types_of_an_inherited_constructor() -> None:
    class Base:
        def __init__(self, path: Path) -> None: ...

    class Child(Base): ...

    assert parameter_types(Child)["path"] is Path
    assert parameter_types(Median) == {}


def test_descriptions() -> None:
    assert describe(Aggregator | None) == "an Aggregator or null"
    assert describe(Literal["a", "b"]) == "one of 'a', 'b'"
    assert describe(bool) == "true or false"
    assert describe(Mapping[str, int]) == "a mapping"
