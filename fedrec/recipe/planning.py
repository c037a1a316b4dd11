"""What a recipe or a sweep will take, and what of it is there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.federation import fake_ids
from fedrec.history import Forecast, LMDBHistory, forecast
from fedrec.parameters import ParameterVector
from fedrec.recipe.folder import RECORD, RunFolder, hash_of
from fedrec.recipe.points import Point
from fedrec.recipe.results import excluded_clients, recovery_spec
from fedrec.recipe.runner import is_done
from fedrec.recipe.schema import Recipe, build_parts, label_of

__all__ = ["SweepPlan", "forecast_history", "plan_sweep", "recoveries_there"]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """What a sweep consists of.

    Args:
        done: Which of the points are done, in their order.
        recordings: How many recordings the points rest on.
        recordings_there: How many of these need not be made.
        recoveries: How many recoveries the points consist of, shared ones once.
        recoveries_there: How many of these are there.
        sizes: Bytes on disk of each history that is to be made, as far as that can be told.
        assumed: Whether a size depends on the numbers in the updates.
    """

    done: tuple[bool, ...]
    recordings: int
    recordings_there: int
    recoveries: int
    recoveries_there: int
    sizes: tuple[int, ...]
    assumed: bool


def forecast_history(recipe: Recipe) -> Forecast | None:
    """Tell how much room the history of a recipe will take on disk, if it is kept there.

    Args:
        recipe: From `load_recipe`.
    """
    parts = build_parts(recipe)
    store, given = parts.history
    if not issubclass(store, LMDBHistory):
        return None
    ids, sampler = list(parts.data.client_ids), parts.record.get("sampler")
    ids += fake_ids(parts.federation.get("fake_clients", 0))
    layout = ParameterVector(parts.model)
    return forecast(
        num_clients=len(ids),
        num_parameters=layout.num_parameters,
        max_rounds=parts.record["max_rounds"],
        codec=given.get("codec") or "float32",
        keep=given.get("keep"),
        clients_per_round=None if sampler is None else len(sampler.sample(ids, 0, 0)),
        num_buffers=layout.num_buffers if parts.federation.get("buffers") == "average" else 0,
        encrypted=given.get("master_key") is not None,
    )


def recoveries_there(recipe: Recipe, folders: Sequence[RunFolder]) -> list[bool]:
    """Return of each recovery of a recipe whether one of the folders has it.

    Args:
        recipe: From `load_recipe`.
        folders: Run folders with the recipe's recording.
    """
    config = recipe.config
    verdicts = [excluded_clients(folder, config) for folder in folders]
    exclude = next((verdict for verdict in verdicts if verdict is not None), None)
    if exclude is None:
        return [False for _ in config.get("recoverers") or []]
    return [
        any(
            folder.result(folder.recovery_file(label_of(node)), recovery_spec(config, i, exclude))
            is not None
            for folder in folders
        )
        for i, node in enumerate(config.get("recoverers") or [])
    ]


def plan_sweep(points: Sequence[Point], recordings: Path) -> SweepPlan:
    """Tell what a sweep will do.

    Args:
        points: Its points.
        recordings: Where recordings lie.
    """
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.recording, []).append(point)
    done = {p.key: is_done(p.recipe, recordings / p.recording / "points" / p.key) for p in points}
    recoveries: dict[str, bool] = {}
    to_make: list[Recipe] = []
    for name, group in groups.items():
        where = recordings / name
        there = (RunFolder(where).read(RECORD) or {}).get("result") is not None
        if not all(done[p.key] for p in group) and not (there and (where / "history").exists()):
            to_make.append(group[0].recipe)
        folders = [RunFolder(path) for path in (where, *sorted(where.glob("points/*")))]
        folders = [folder for folder in folders if folder.recipe_file.exists()]
        for point in group:
            found = recoveries_there(point.recipe, folders)
            for i, has in enumerate(found):
                recoveries[f"{name} {_recovery(point.recipe.config, i)}"] = has
    sizes, assumed = _sizes(to_make)
    return SweepPlan(
        done=tuple(done[point.key] for point in points),
        recordings=len(groups),
        recordings_there=len(groups) - len(to_make),
        recoveries=len(recoveries),
        recoveries_there=sum(recoveries.values()),
        sizes=tuple(sizes),
        assumed=assumed,
    )


def _recovery(config: Any, index: int) -> str:
    """Return what tells a recovery from the others on its recording, before it is made."""
    recover = config.get("recover") or {}
    detected = recover.get("exclude", "detected") == "detected"
    verdict = {"detector": config.get("detector") if detected else None}
    return hash_of(verdict) + hash_of({"recoverer": config["recoverers"][index], "in": recover})


def _sizes(recipes: Sequence[Recipe]) -> tuple[list[int], bool]:
    """Forecast every history, those that are alike once."""
    known: dict[str, Forecast | None] = {}
    found = []
    for recipe in recipes:
        parts = {k: recipe.config.get(k) for k in ("data", "model", "federation", "record")}
        key = json.dumps({**parts, "history": recipe.config.get("history")}, sort_keys=True)
        if key not in known:
            known[key] = forecast_history(recipe)
        told = known[key]
        if told is not None:
            found.append(told)
    return [told.num_bytes for told in found], any(told.assumed for told in found)
