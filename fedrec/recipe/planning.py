"""Planning a run or a sweep: what is done already, what is left, how much disk it takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrec.federation import fake_ids
from fedrec.history import Forecast, LMDBHistory, ShardedHistory, forecast
from fedrec.parameters import ParameterVector
from fedrec.recipe.folder import RECORD, RunFolder, hash_of, num_shards
from fedrec.recipe.points import Point
from fedrec.recipe.results import excluded_clients, recovery_spec
from fedrec.recipe.runner import is_done
from fedrec.recipe.schema import Recipe, build_parts, label_of

__all__ = ["SweepPlan", "forecast_history", "plan_sweep", "recoveries_there"]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The parts of a sweep, and how many of them are done.

    Args:
        done: For each point in order, whether it is done.
        recordings: Number of recordings that the points need.
        recordings_there: Number of these recordings that need not be made.
        recoveries: Number of recoveries of all points; a shared recovery counts once.
        recoveries_there: Number of these recoveries that are done.
        sizes: Forecast bytes of each history that is to be made; only for histories on disk.
        assumed: Whether a size depends on how well updates compress.
    """

    done: tuple[bool, ...]
    recordings: int
    recordings_there: int
    recoveries: int
    recoveries_there: int
    sizes: tuple[int, ...]
    assumed: bool


def forecast_history(recipe: Recipe) -> Forecast | None:
    """Forecast the size of a recipe's history on disk; `None` if it is a store of another kind.

    Args:
        recipe: A recipe from `load_recipe`.
    """
    parts = build_parts(recipe)
    store, init_args = parts.history
    if not issubclass(store, (LMDBHistory, ShardedHistory)):
        return None
    ids, sampler = list(parts.data.client_ids), parts.record.get("sampler")
    ids += fake_ids(parts.federation.get("fake_clients", 0))
    layout = ParameterVector(parts.model)
    return forecast(
        num_clients=len(ids),
        num_parameters=layout.num_parameters,
        max_rounds=parts.record["max_rounds"],
        codec=init_args.get("codec") or "float32",
        keep=init_args.get("keep"),
        clients_per_round=None if sampler is None else len(sampler.sample(ids, 0, 0)),
        num_buffers=layout.num_buffers if parts.federation.get("buffers") == "average" else 0,
        encrypted=init_args.get("master_key") is not None,
        num_shards=min(num_shards(recipe.config.get("loop") or {}), len(ids)),
    )


def recoveries_there(recipe: Recipe, folders: Sequence[RunFolder]) -> list[bool]:
    """Return, for each recovery of a recipe, whether one of the folders has it.

    Args:
        recipe: A recipe from `load_recipe`.
        folders: Run folders with the recipe's recording.
    """
    config = recipe.config
    detected = [excluded_clients(folder, config) for folder in folders]
    exclude = next((clients for clients in detected if clients is not None), None)
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
    """Return what a sweep consists of, and what of it is done.

    Args:
        points: The sweep's points.
        recordings: The folder of the recordings.
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
            for i, done_already in enumerate(recoveries_there(point.recipe, folders)):
                recoveries[f"{name} {_recovery(point.recipe.config, i)}"] = done_already
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
    """Return a hash that identifies a recovery among those on its recording, before it is made."""
    recover = config.get("recover") or {}
    detected = recover.get("exclude", "detected") == "detected"
    detector = {"detector": config.get("detector") if detected else None}
    return hash_of(detector) + hash_of({"recoverer": config["recoverers"][index], "in": recover})


def _sizes(recipes: Sequence[Recipe]) -> tuple[list[int], bool]:
    """Return the forecast size of every history, and whether one of them is an assumption."""
    known: dict[str, Forecast | None] = {}  # equal histories are forecast once
    forecasts = []
    for recipe in recipes:
        parts = {k: recipe.config.get(k) for k in ("data", "model", "federation", "record")}
        parts["num_shards"] = num_shards(recipe.config.get("loop") or {})
        key = json.dumps({**parts, "history": recipe.config.get("history")}, sort_keys=True)
        if key not in known:
            known[key] = forecast_history(recipe)
        history = known[key]
        if history is not None:
            forecasts.append(history)
    return [f.num_bytes for f in forecasts], any(f.assumed for f in forecasts)
