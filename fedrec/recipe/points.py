"""The points of a sweep: one recipe each, with hashes that find its results again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedrec._checks import check_int
from fedrec.exceptions import ConfigurationError, RecipeError, expected
from fedrec.recipe.folder import hash_of, recording_part
from fedrec.recipe.grid import grid_points, json_text, short_keys, value_text
from fedrec.recipe.loading import read_recipe
from fedrec.recipe.schema import Recipe, build_parts, load_recipe
from fedrec.recipe.shipped import find_recipe

__all__ = ["Point", "sweep_points"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    Args:
        name: The values of the swept keys, as text for people.
        texts: The same by key, as in `results.csv`.
        seed: Seed of the run.
        repeat: 0 for the recipe's seed, 1 for the next one, and so on.
        recipe: The recipe to run.
        recording_part: The part of the recipe that its recording depends on.
        recording: Hash of `recording_part`.
        key: Hash of everything that the point's figures depend on.
        sweep: Name of the sweep's folder.
    """

    name: str
    texts: Mapping[str, str]
    seed: int
    repeat: int
    recipe: Recipe
    recording_part: Mapping[str, Any]
    recording: str
    key: str
    sweep: str


def sweep_points(
    recipe: str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    repeats: int = 1,
    overrides: Iterable[str] = (),
    allow: Iterable[str] = (),
) -> list[Point]:
    """Return the points of a grid, each as often as it is repeated, all checked like recipes.

    Args:
        recipe: The YAML file, or the name of a recipe that comes with fedrec.
        grid: Values by dotted key.
        repeats: Runs of each point.
        overrides: `key=value` texts that hold for all points.
        allow: Modules the recipe's classes may come from.

    Raises:
        RecipeError: With all mistakes of all points.
        ConfigurationError: If two points are the same experiment, or a point cannot be swept.
    """
    recipe, repeats = find_recipe(recipe), check_int("repeats", repeats, minimum=1)
    overrides, allow = list(overrides), tuple([allow] if isinstance(allow, str) else allow)
    if not grid and repeats == 1:
        hint = "give a key several values, as in `aggregator=FedAvg,Median`, or `--repeats 3`."
        raise ConfigurationError(expected("grid", "more than one point", {**grid}, hint=hint))
    short = short_keys(grid)
    seed = read_recipe(recipe, overrides, []).get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigurationError(expected("seed", "an integer", seed))
    points: list[Point] = []
    errors: dict[str, None] = {}
    for values in grid_points(grid):
        texts = {key: value_text(value) for key, value in values.items()}
        own = [f"{key}={json_text(value)}" for key, value in values.items()]
        try:
            for repeat in range(repeats):
                words = [*overrides, *own, f"seed={seed + repeat}"]
                named = [f"{short[key]}={text}" for key, text in texts.items()]
                if repeats > 1:
                    named.append(f"seed={seed + repeat}")
                loaded = load_recipe(recipe, words, allow)
                points.append(_point(loaded, ", ".join(named), texts, seed + repeat, repeat))
        except RecipeError as error:
            errors.update(dict.fromkeys(error.errors))
    if errors:
        raise RecipeError(list(errors))
    seen: dict[str, str] = {}
    for point in points:
        if point.key in seen:
            raise ConfigurationError(
                f"Expected points that differ in what results depend on, but `{point.name}` and "
                f"`{seen[point.key]}` come out the same. HINT: leave one of the values out."
            )
        seen[point.key] = point.name
    return points


def _point(recipe: Recipe, name: str, texts: Mapping[str, str], seed: int, repeat: int) -> Point:
    config = recipe.config
    if (config.get("loop") or {}).get("fast_dev_run"):
        raise ConfigurationError(
            "Expected runs that are kept, but with `loop.fast_dev_run` nothing is. HINT: "
            "`--dry-run` lists the points; `record.max_rounds=3` makes them short."
        )
    parts = build_parts(recipe)
    if "path" not in inspect.signature(parts.history[0]).parameters:
        requirement = "a history on disk, which several runs can share"
        raise ConfigurationError(expected("history", requirement, parts.history[0].__name__))
    part = recording_part(recipe, parts)
    recording = hash_of(part)
    figures_part = {
        "recording": recording,
        "detector": config.get("detector"),
        "recover": config.get("recover"),
        "recoverers": [hash_of({"recoverer": node}) for node in config.get("recoverers") or []],
    }
    title = re.sub(r"[^\w .,+=-]+", " ", f"{recipe.name}, {name}")[:100].strip()
    return Point(
        name=name,
        texts=texts,
        seed=seed,
        repeat=repeat,
        recipe=replace(recipe, config={**config, "name": title}),
        recording_part=part,
        recording=recording,
        key=hash_of(figures_part),
        sweep=recipe.name,
    )
