"""Reading recipes: extends, overrides, interpolation, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedrec.exceptions import RecipeError
from fedrec.recipe.loading import UNUSABLE, is_usable, merge, read_recipe


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def read(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    errors: list[str] = []
    return read_recipe(path, overrides, errors), errors


def test_plain_values_and_default_name(write: Any) -> None:
    config, errors = read(write("mine.yaml", "a: 9.6e-3\nb: [1, yes]\nc: null\n"))
    assert errors == []
    assert config == {"a": 0.0096, "b": [1, True], "c": None, "name": "mine"}


def test_extends_merges_recursively_relative_to_each_file(write: Any) -> None:
    write("deep/base.yaml", "name: base\na: {x: 1, y: 2}\nl: [1, 2]\n")
    write("deep/middle.yaml", "extends: base.yaml\na: {y: 3}\n")
    path = write("top.yaml", "extends: deep/middle.yaml\na: {z: 4}\nl: [9]\n")
    config, errors = read(path)
    assert errors == []
    assert config == {"a": {"x": 1, "y": 3, "z": 4}, "l": [9], "name": "top"}


def test_extends_a_list_later_ones_win(write: Any) -> None:
    write("a.yaml", "x: 1\ny: 1\n")
    write("b.yaml", "y: 2\n")
    config, _ = read(write("c.yaml", "extends: [a.yaml, b.yaml]\n"))
    assert (config["x"], config["y"]) == (1, 2)


def test_extends_in_a_circle_is_a_mistake(write: Any) -> None:
    write("a.yaml", "extends: b.yaml\nx: 1\n")
    path = write("b.yaml", "extends: a.yaml\n")
    config, errors = read(path)
    assert config["x"] == 1
    assert len(errors) == 1
    assert "circle: b.yaml -> a.yaml -> b.yaml" in errors[0]


def test_another_class_brings_its_own_arguments(write: Any) -> None:
    write("base.yaml", "aggregator: {class_path: TrimmedMean, init_args: {trim: 2}}\n")
    same, _ = read(write("a.yaml", "extends: base.yaml\naggregator: {init_args: {trim: 3}}\n"))
    other, _ = read(write("b.yaml", "extends: base.yaml\naggregator: Median\n"))
    assert same["aggregator"] == {"class_path": "TrimmedMean", "init_args": {"trim": 3}}
    assert other["aggregator"] == {"class_path": "Median"}


def test_merging_arguments_into_a_class_name() -> None:
    assert merge("CNN", {"init_args": {"hidden": 200}}) == {
        "class_path": "CNN",
        "init_args": {"hidden": 200},
    }


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=3", "seed", 3),
        ("a.b.c=1e-6", "a", {"b": {"c": 1e-6}}),
        ("l.1.x=[1, 2]", "l", [{"x": 0}, {"x": [1, 2]}]),
        ("rule=Median", "rule", {"class_path": "Median"}),
        ("rule.class_path=Median", "rule", {"class_path": "Median"}),
        ("model.init_args.hidden=7", "model", {"class_path": "CNN", "init_args": {"hidden": 7}}),
        ("model=null", "model", None),
        ("text=a=b", "text", "a=b"),
    ],
)
def test_overrides(write: Any, override: str, key: str, value: Any) -> None:
    text = (
        "seed: 0\nmodel: CNN\nl: [{x: 0}, {x: 0}]\n"
        "rule: {class_path: TrimmedMean, init_args: {trim: 2}}\n"
    )
    config, errors = read(write("r.yaml", text), [override])
    assert errors == []
    assert config[key] == value


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "seed: Expected an override of the form `key=value`"),
        ("a..b=1", "Expected an override of the form"),
        ("l.5.x=1", "l.5.x: Expected `index` to be an index below 2, but got '5'"),
        ("model.x=1", "but got the value 'CNN'. HINT: `init_args.x` sets an argument."),
        ("seed.x=1", "seed.x: Expected a section to set `x` in, but got the value 0"),
        ("seed=[1", "seed: Expected a YAML value, but got '[1'"),
        ("seed=!!python/name:os.system x", "seed: Expected a YAML value"),
    ],
)
def test_overrides_that_cannot_be(write: Any, override: str, message: str) -> None:
    _, errors = read(write("r.yaml", "seed: 0\nmodel: CNN\nl: [{x: 0}, {x: 0}]\n"), [override])
    assert len(errors) == 1
    assert message in errors[0]


def test_missing_values_are_listed_and_can_be_given(write: Any) -> None:
    path = write("r.yaml", "record:\n  server_lr: ???\n  max_rounds: ???\n")
    config, errors = read(path, ["record.max_rounds=5"])
    assert config["record"] == {"server_lr": UNUSABLE, "max_rounds": 5}
    (error,) = errors
    assert error == (
        "record.server_lr: Expected a value, but it is still missing (`???`). HINT: give it on the "
        "command line: `record.server_lr=...`."
    )


def test_interpolation_of_values_subtrees_and_text(write: Any) -> None:
    text = "n: 20\nm: ${n}\nt: ${l.0.x}-${n}\nl: [{x: '${name}'}]\ncopy: ${l}\n"
    config, errors = read(write("r.yaml", text), ["n=21"])
    assert errors == []
    assert config["m"] == 21
    assert config["t"] == "r-21"
    assert config["copy"] == [{"x": "r"}]


@pytest.mark.parametrize(
    "text",
    [
        "x: ${oc.env:HOME}",
        "x: ${oc.env:HOME,nothing}",
        "x: a${oc.decode:${y}}b\ny: 1",
        "x: ${${y}:HOME}\ny: oc.env",
        "x: ${oc.select:y}\ny: 1",
    ],
)
def test_resolvers_are_off(write: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/secret")
    config, errors = read(write("r.yaml", text))
    assert config["x"] is UNUSABLE
    assert len(errors) == 1
    assert "x: Expected interpolation of the form `${key}`" in errors[0]
    assert "Environment variables and other resolvers are off" in errors[0]
    assert "/secret" not in errors[0]


def test_interpolation_does_not_run_twice(write: Any) -> None:
    # Pieces that would be an environment lookup if the joined text were resolved again.
    config, errors = read(write("r.yaml", "a: '$'\nb: '{oc.env:HOME}'\nx: ${a}${b}\n"))
    assert errors == []
    assert config["x"] == "${oc.env:HOME}"[:1] + "{oc.env:HOME}"


def test_interpolation_in_a_circle_and_of_an_unknown_key(write: Any) -> None:
    config, errors = read(write("r.yaml", "a: ${b}\nb: ${a}\nc: ${seeed}\nseed: 1\n"))
    assert not is_usable(config)
    assert any("runs in a circle" in e for e in errors)
    assert any(e.startswith("c: ") and "Did you mean `seed`?" in e for e in errors)


def test_values_that_multiply_are_refused(write: Any) -> None:
    lines = ["a0: [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: [{', '.join([repr(f'${{a{i - 1}}}')] * 10)}]" for i in range(1, 9)]
    with pytest.raises(RecipeError, match="at most 10000 values"):
        read(write("r.yaml", "\n".join(lines)))


def test_text_that_multiplies_is_refused(write: Any) -> None:
    lines = ["a0: " + "x" * 100] + [f"a{i}: {f'${{a{i - 1}}}' * 10}" for i in range(1, 5)]
    _, errors = read(write("r.yaml", "\n".join(lines)))
    assert errors
    assert "at most 10000 characters" in errors[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "line 3: Expected YAML, but did not find expected"),
        ("a: 1\na: 2\n", "line 2: Expected YAML, but found duplicate key a"),
        ("- 1\n", "Expected keys with values, but got a list"),
        ("a: !!python/object/apply:os.system ['touch canary']\n", "could not determine"),
    ],
)
def test_files_that_are_no_recipe(write: Any, text: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(write("r.yaml", text))
    assert message in str(caught.value)


def test_missing_file_offers_its_neighbours(write: Any, tmp_path: Path) -> None:
    write("quickstart.yaml", "a: 1\n")
    with pytest.raises(RecipeError, match=r"Did you mean `.*quickstart\.yaml`") as caught:
        read(tmp_path / "quickstrat.yaml")
    assert "no such file" in str(caught.value)


def test_a_run_folder_has_its_recipe_in_it(write: Any, tmp_path: Path) -> None:
    inside = write("runs/first/recipe.yaml", "a: 1\n")
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / "runs" / "first")
    assert f"HINT: `{inside}` is that of this run. (is a directory)" in str(caught.value)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not text"):
        read(tmp_path / "r.yaml")


def test_infinite_values_are_refused(write: Any) -> None:
    _, errors = read(write("r.yaml", "a: .inf\n"))
    assert errors == ["a: Expected a finite number, but got inf."]
