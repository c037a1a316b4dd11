"""Running a recipe at every point of a grid, each recording once. Points that are done are kept."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedrec._files import write_atomically
from fedrec.exceptions import ConfigurationError, FedrecError, MethodsFailedError, expected
from fedrec.recipe.failures import keep_failure
from fedrec.recipe.folder import DETECTION, RECORD, RunFolder, locked, num_ranks
from fedrec.recipe.measures import is_measured
from fedrec.recipe.points import Point, sweep_points
from fedrec.recipe.results import collect_results, excluded_clients, recovery_spec
from fedrec.recipe.runner import is_done, run
from fedrec.recipe.schema import label_of
from fedrec.recipe.tables import (
    COLUMNS,
    METRIC,
    POISONED,
    UNPOISONED,
    Row,
    figures_of,
    method_rows,
    summarize,
    write_table,
)

__all__ = ["Sweep", "sweep"]

_log = logging.getLogger(__name__)

# Why a point that is done has no figures of a method.
_NOBODY = "Nobody was flagged, so there is nothing to recover from."


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The results of a sweep.

    Args:
        folder: The folder with `results.csv`, `summary.csv` and `sweep.json`.
        keys: The swept keys.
        rows: The rows of `results.csv`.
        summary: The rows of `summary.csv`.
        failures: By the name of a point that failed, the reason.

    Examples:
        >>> done = Sweep(folder=Path("runs/rules"), keys=("aggregator",), rows=[], summary=[])
        >>> done.failures
        {}
    """

    folder: Path
    keys: tuple[str, ...]
    rows: list[Row]
    summary: list[Row]
    failures: dict[str, str] = field(default_factory=dict)


def sweep(
    recipe: str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    repeats: int = 1,
    overrides: Iterable[str] = (),
    allow: Iterable[str] = (),
    output_dir: str | Path = "runs",
    recordings: str | Path | None = None,
    delete_histories: bool = False,
    progress: bool = True,
) -> Sweep:
    """Run a recipe at every point of a grid, and put the results into one table.

    Points that differ only in detection and recovery share a recording, and a recovery that several
    of them have in common is made once. Recordings and points are found again by a hash of
    everything they depend on. So calling `sweep` again does what is missing: after an interruption,
    after a failure, or with more values in the grid.

    If a point fails, the other points run all the same, and so do the other methods if a method
    fails. The next call tries again what failed.

    Args:
        recipe: The YAML file.
        grid: Values by dotted key of the recipe. The last key changes fastest.
        repeats: Runs of each point, with the seed of the recipe and those that follow it.
        overrides: `key=value` texts that hold for all points; `name=...` names the folder.
        allow: Modules the recipe's classes may come from, as in `load_recipe`.
        output_dir: The folder in which the folder of the sweep is made.
        recordings: The folder of the recordings, and of the points made from them; by default it is
            in the folder of the sweep. Several sweeps may share it.
        delete_histories: Remove the history of a recording once all of its points are done. The
            recording is made again if a point that is added later needs it.
        progress: `False` for no progress bars.

    Returns:
        The tables, and the reasons of points that failed.

    Raises:
        RecipeError: With all mistakes of all points, before anything is run.
        ConfigurationError: If the grid has no points or two equal points, one of them is for
            several devices, or the folder is in use or not the folder of a sweep.
        KeyboardInterrupt: After an interrupt; finished steps are kept.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> text = '''
        ... data: {class_path: Digits, init_args: {num_clients: 4}}
        ... model: {class_path: MLP, init_args: {in_features: 64, hidden: [4]}}
        ... federation: {malicious: 1, batch_size: 8}
        ... aggregator: FedAvg
        ... detector: KnownMalicious
        ... record: {max_rounds: 6, server_lr: 0.5}
        ... recoverers:
        ...   - {class_path: FedRecover, init_args: {warmup_rounds: 3, final_rounds: 1}}
        ... '''
        >>> with TemporaryDirectory() as folder:
        ...     _ = Path(folder, "tiny.yaml").write_text(text)
        ...     done = sweep(
        ...         Path(folder, "tiny.yaml"),
        ...         {"recoverers.0.init_args.warmup_rounds": [3, 4]},
        ...         output_dir=folder,
        ...         progress=False,
        ...     )
        >>> [(row["method"], row["exact_warmup"]) for row in done.rows]
        [('Poisoned', None), ('FedRecover', 3.0), ('Poisoned', None), ('FedRecover', 4.0)]
    """
    points = sweep_points(recipe, grid, repeats=repeats, overrides=overrides, allow=allow)
    loops = [point.recipe.config.get("loop") or {} for point in points]
    devices = max(num_ranks(loop) for loop in loops)
    if devices > 1:
        hint = "run points one by one with `fedrec run`, or several sweeps side by side."
        raise ConfigurationError(
            expected("loop.devices", "1 in each point of a sweep", devices, hint=hint)
        )
    folder = Path(output_dir) / points[0].sweep
    if (folder / "recipe.yaml").exists():
        raise ConfigurationError(
            f"Expected `{folder}` to be the folder of a sweep, or a new one, but it is that of a "
            "run. HINT: `name=another-name` puts the sweep elsewhere."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "sweep.lock", folder):
        settings = {
            "recipe": str(recipe),
            "overrides": list(overrides),
            "grid": {key: list(values) for key, values in grid.items()},
            "repeats": repeats,
        }
        where = folder / "recordings" if recordings is None else Path(recordings)
        return _Run(points, tuple(grid), folder, where, settings, delete_histories, progress).do()


@dataclass(eq=False)
class _Run:
    """One call of `sweep`."""

    points: list[Point]
    keys: tuple[str, ...]
    folder: Path
    recordings: Path
    settings: Mapping[str, Any]
    delete_histories: bool
    progress: bool
    failures: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)

    def do(self) -> Sweep:
        groups: dict[str, list[Point]] = {}
        for point in self.points:
            groups.setdefault(point.recording, []).append(point)
        missing: dict[str, list[Point]] = {}
        for name, points in groups.items():
            missing[name] = []
            for point in points:
                if is_done(point.recipe, self._folder(point)):
                    self._measure(point)
                    self._collect(point)
                else:
                    missing[name].append(point)
        num_missing = sum(len(points) for points in missing.values())
        self.clock = _Clock(num_missing, sum(bool(points) for points in missing.values()))
        _log.info(
            "Sweep `%s`: %d of %d points done already, on %d %s.",
            self.folder,
            len(self.points) - num_missing,
            len(self.points),
            len(groups),
            "recording" if len(groups) == 1 else "recordings",
        )
        self._write()
        try:
            for name in groups:
                self._group(name, groups[name], missing[name])
        finally:
            result = self._write()
        return result

    def _folder(self, point: Point) -> Path:
        return self.recordings / point.recording / "points" / point.key

    def _group(self, name: str, points: list[Point], missing: list[Point]) -> None:
        """Make a recording, and its points that are missing."""
        where = self.recordings / name
        if missing:
            self.recordings.mkdir(parents=True, exist_ok=True)
            try:
                with _alone(self.recordings / f"{name}.lock", where):
                    self._record(missing[0], where)
                    for point in missing:
                        self._try(point)
            except Exception as error:  # noqa: BLE001 - it is reported, and other groups go on
                for point in missing:
                    self._failed(point, error, "Recording: ")
                self.clock.skipped(len(missing))
        if self.delete_histories and not any(point.name in self.failures for point in points):
            shutil.rmtree(where / "history", ignore_errors=True)

    def _record(self, point: Point, where: Path) -> None:
        """Make the recording, unless it is done and its history is there."""
        folder, began = RunFolder(where), time.monotonic()
        before = (folder.read(RECORD) or {}).get("result") or {}
        kept = bool(before) and (where / "history").exists()
        if before and not kept:
            (where / RECORD).unlink()
        run(point.recipe, folder=where, steps=["record"], progress=self.progress)
        after = (folder.read(RECORD) or {}).get("result", {})
        self.clock.recorded(None if kept else time.monotonic() - began)
        differ = [
            key
            for key in ("ter", "asr", "rounds", "execution", "versions")
            if before and before[key] != after.get(key)
        ]
        if differ:
            _log.warning(
                "Recording `%s` was made again and came out otherwise (%s): points that were done "
                "before rest on the earlier one. HINT: remove `%s` to make them again.",
                where,
                ", ".join(f"{key}: {before[key]} then, {after.get(key)} now" for key in differ),
                where / "points",
            )

    def _try(self, point: Point) -> None:
        """Run a point on its recording; a failure is noted, not raised."""
        began = time.monotonic()
        try:
            self._prepare(point)
            run(point.recipe, folder=self._folder(point), progress=self.progress)
        except Exception as error:  # noqa: BLE001 - it is reported, and other points go on
            self._failed(point, error)
            return
        finally:
            self.clock.did(time.monotonic() - began)
        self._collect(point)
        self._write()
        _log.info(
            "[%d/%d] %s: done in %s%s.",
            len(self.rows),
            len(self.points),
            point.name,
            _time_text(time.monotonic() - began),
            self.clock.left(),
        )

    def _prepare(self, point: Point) -> None:
        """Make the run folder of a point, with the recording and with what other points have done.

        The point shares the history by a link. The detection and recoveries that are the same in
        other points are copied.
        """
        recording = RunFolder(self.recordings / point.recording)
        folder = RunFolder(self._folder(point))
        folder.open(point.recipe, point.recording_part, overwrite=False)
        for name in ("record/metrics.csv", RECORD):
            if (recording.path / name).exists():
                write_atomically(folder.path / name, (recording.path / name).read_bytes())
        history = folder.path / "history"
        if not history.is_symlink():
            history.symlink_to(Path("..", "..", "history"), target_is_directory=True)
        others = [RunFolder(p) for p in sorted(recording.path.glob("points/*")) if p != folder.path]
        config = point.recipe.config
        spec = {"detector": config.get("detector")}
        for other in (recording, *others):
            if folder.result(DETECTION, spec) is None and other.result(DETECTION, spec) is not None:
                folder.write_detection(other.read(DETECTION) or {})
        nodes = config.get("recoverers") or []
        if nodes and others and excluded_clients(folder, config) is None:
            run(point.recipe, folder=folder.path, steps=["detect"], progress=self.progress)
        exclude = excluded_clients(folder, config) or []
        for i, node in enumerate(nodes):
            name, spec = folder.recovery_file(label_of(node)), recovery_spec(config, i, exclude)
            have = [other for other in others if other.result(name, spec) is not None]
            if have and folder.result(name, spec) is None:
                _copy((have[0].path / name).parent, (folder.path / name).parent)

    def _measure(self, point: Point) -> None:
        """Measure the models of a point that is done, if the recipe has new metrics."""
        folder = self._folder(point)
        if not is_measured(RunFolder(folder), point.recipe.config):
            try:
                run(point.recipe, folder=folder, progress=self.progress)
            except FedrecError as error:
                _log.warning("%s was not measured again: %s", point.name, error)

    def _failed(self, point: Point, error: Exception, what: str = "") -> None:
        file = f"failures/{point.key}.txt"
        reason = keep_failure(error, self.folder / file, file)
        self.failures[point.name] = what + reason
        self.rows.pop(point.key, None)
        # Rows of the methods that did not fail, if the point has results at all.
        with suppress(ConfigurationError, FileNotFoundError):
            self.rows[point.key] = self._rows(point)
        reasons = error.failures if isinstance(error, MethodsFailedError) else {}
        self._account_for_missing(point, reasons, what + reason)
        _log.warning("%s failed: %s%s", point.name, what, reason)

    def _own(self, point: Point) -> Row:
        """Return the columns that all rows of a point have in common."""
        folder = os.path.relpath(self._folder(point), self.folder)
        return {**point.texts, "seed": point.seed, "repeat": point.repeat, "folder": folder}

    def _collect(self, point: Point) -> None:
        self.rows[point.key] = self._rows(point)
        self._account_for_missing(point, {}, _NOBODY)

    def _rows(self, point: Point) -> list[Row]:
        results = collect_results(RunFolder(self._folder(point)))
        return [{**self._own(point), **row} for row in method_rows(results)]

    def _account_for_missing(
        self, point: Point, reasons: Mapping[str, str], otherwise: str
    ) -> None:
        """Add a row for every method without figures, so that means over repeats do not hide it.

        Args:
            point: The point.
            reasons: Why a method has no figures, by method.
            otherwise: The reason for methods that are not in `reasons`.
        """
        rows = self.rows.setdefault(point.key, [])
        done = {row["method"] for row in rows}
        nodes = point.recipe.config.get("recoverers") or []
        labels = [label_of(node) for node in nodes] or ([] if done else [POISONED])
        for label in labels:
            if label not in done:
                text = " ".join(reasons.get(label, otherwise).split())
                own = {**dict.fromkeys(COLUMNS), **self._own(point)}
                rows.append({**own, "method": label, "failure": text})
        order = [POISONED, UNPOISONED, *labels]
        rows.sort(key=lambda row: order.index(row["method"]))

    def _write(self) -> Sweep:
        """Write the tables of all rows so far, in the order of the grid."""
        rows = [row for point in self.points for row in self.rows.get(point.key, [])]
        summary = summarize(rows, self.keys)
        metrics = [name for name in figures_of(rows) if name.startswith(METRIC)]
        write_table(self.folder / "results.csv", rows, [*self.keys, *COLUMNS, *metrics])
        columns = list(summary[0]) if summary else [*self.keys, "method", "repeats"]
        write_table(self.folder / "summary.csv", summary, columns)
        state = {
            **self.settings,
            "points": [
                {
                    "name": point.name,
                    "folder": os.path.relpath(self._folder(point), self.folder),
                    "done": point.key in self.rows and point.name not in self.failures,
                    "failure": self.failures.get(point.name),
                }
                for point in self.points
            ],
        }
        write_atomically(self.folder / "sweep.json", (json.dumps(state, indent=2) + "\n").encode())
        return Sweep(
            folder=self.folder,
            keys=self.keys,
            rows=rows,
            summary=summary,
            failures=dict(self.failures),
        )


def _alone(lock: Path, what: Path) -> AbstractContextManager[None]:
    """Keep other sweeps out of a folder."""
    return locked(
        lock,
        f"`{what}` is in use by another sweep. HINT: wait until that is done, and call this one "
        "again: what is done by then is kept.",
    )


def _copy(source: Path, target: Path) -> None:
    """Copy the folder of a finished recovery."""
    temporary = target.with_name(target.name + ".copy")
    for path in (temporary, target):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("*.tmp"))
    temporary.rename(target)


@dataclass(eq=False)
class _Clock:
    """Estimates how long the rest of a sweep takes, from how long its parts have taken so far.

    Args:
        points: Number of points that are still to do.
        recordings: Number of recordings that these points still need.
    """

    points: int
    recordings: int
    _point_seconds: list[float] = field(default_factory=list)
    _recording_seconds: list[float] = field(default_factory=list)

    def recorded(self, seconds: float | None) -> None:
        """Note that a recording is done; `None` if it was there already."""
        self.recordings -= 1
        self._recording_seconds += [] if seconds is None else [seconds]

    def skipped(self, points: int) -> None:
        """Note that a recording failed, and with it its points."""
        self.recordings -= 1
        self.points -= points

    def did(self, seconds: float) -> None:
        """Note that a point is done."""
        self.points -= 1
        self._point_seconds.append(seconds)

    def left(self) -> str:
        """Return how long the rest takes, as the end of a sentence; empty if no point is left."""
        parts = (
            (self._point_seconds, self.points),
            (self._recording_seconds, self.recordings),
        )
        left = sum(sum(seconds) / len(seconds) * number for seconds, number in parts if seconds)
        return f", about {_time_text(left)} left" if self.points else ""


def _time_text(seconds: float) -> str:
    """Write a time in the unit that people would choose.

    Examples:
        >>> _time_text(3.2), _time_text(600), _time_text(9000)
        ('3 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
