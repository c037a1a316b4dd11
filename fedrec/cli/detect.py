"""`fedrec detect RUN --detector ...`: several detectors on one recording, side by side."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import yaml
from rich.console import Console

from fedrec.cli.output import write_json
from fedrec.cli.parser import Options
from fedrec.detectors.base import Detector
from fedrec.exceptions import ConfigurationError
from fedrec.history import LMDBHistory, ShardedHistory
from fedrec.history.base import HistoryStore
from fedrec.history.tools.opening import store_class
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.folder import existing
from fedrec.recipe.instantiate import Instantiator
from fedrec.recipe.schema import build_parts, load_recipe
from fedrec.recipe.step_results import finite
from fedrec.report.table import fraction, print_table

__all__ = ["compare", "compare_run"]


def compare_run(args: Options) -> None:
    """Print a comparison of detectors on a run's recording; the run folder stays as it is."""
    folder = existing(args.target)
    detectors = _build(args.detector, args.allow)
    recipe = load_recipe(folder.recipe_file, args.overrides, args.allow)
    cls, arguments = build_parts(recipe).history
    if cls in (LMDBHistory, ShardedHistory):  # the shards may have been made, or merged, since
        cls = store_class(folder.path / "history")
    if "path" in inspect.signature(cls).parameters:
        arguments = {**arguments, "path": folder.path / "history"}
    with cls(**arguments) as history:
        if history.is_empty:
            raise ConfigurationError(
                f"`{folder.path}` has no recording. HINT: `fedrec record {folder.recipe_file} "
                f"--output-dir {folder.path.parent}` makes one."
            )
        rows = compare(history, detectors)
        truth, rounds = history.manifest.malicious, len(history.rounds())
    if args.json:
        write_json({"truth": list(truth), "rounds": rounds, "detectors": rows})
    else:
        _print(rows, f"{folder.path}: {rounds} rounds, {len(truth)} malicious clients")


def compare(history: HistoryStore, detectors: Sequence[Detector]) -> list[dict[str, Any]]:
    """Return the verdicts of several detectors on a history, one row a detector.

    Args:
        history: The recording.
        detectors: The detectors.

    Returns:
        For each detector: `detector` (its repr), `label` (without default arguments), `malicious`,
        `round`, `precision`, `recall`, `fpr`, `fnr` (`None` where undefined), `scores`,
        `round_scores` and `seconds`.

    Examples:
        >>> from fedrec import FederatedLoop, Federation
        >>> from fedrec.aggregators import FedAvg
        >>> from fedrec.data import Digits
        >>> from fedrec.detectors import ImperfectOracle
        >>> from fedrec.history import MemoryHistory
        >>> from fedrec.models import MLP
        >>> data, model = Digits(num_clients=4), MLP(in_features=64)
        >>> federation = Federation.from_data(data, model, malicious=2, batch_size=8)
        >>> history, loop = MemoryHistory(), FederatedLoop(fast_dev_run=True)
        >>> result = loop.record(federation, FedAvg(), history, max_rounds=3, server_lr=0.1)
        >>> row, = compare(history, [ImperfectOracle(fnr=0.5)])
        >>> row["precision"], row["recall"], row["fpr"], row["fnr"], row["round"]
        (1.0, 0.5, 0.0, 0.5, 0)
    """
    truth = history.manifest.malicious
    rows = []
    for detector in detectors:
        began = time.perf_counter()
        detection = detector.detect(history)
        rows.append(
            {
                "detector": repr(detector),
                "label": _label(detector),
                "malicious": list(detection.malicious),
                "round": detection.round,
                "precision": detection.precision(truth),
                "recall": detection.recall(truth),
                "fpr": detection.false_positive_rate(truth),
                "fnr": detection.false_negative_rate(truth),
                "scores": finite(detection.scores),
                "round_scores": {
                    str(t): finite(scores) for t, scores in detection.round_scores.items()
                },
                "seconds": time.perf_counter() - began,
            }
        )
    return rows


def _label(detector: Detector) -> str:
    """Return a detector as text, with its arguments that differ from the defaults."""
    defaults = inspect.signature(type(detector)).parameters
    given = {k: v for k, v in detector.init_args().items() if v != defaults[k].default}
    arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{type(detector).__name__}({arguments})" if given else type(detector).__name__


def _build(nodes: Sequence[str], allow: Sequence[str]) -> list[Detector]:
    """Build the detectors of the options: each a class name, or a mapping as in a recipe."""
    make = Instantiator(ClassFinder(allow))
    detectors = []
    for node in nodes:
        try:
            value = yaml.safe_load(node)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"--detector: {node!r} is not YAML: {error}") from error
        detectors.append(make.component(value, "--detector", [Detector]))
    if make.errors:
        raise ConfigurationError("\n".join(make.errors))
    return detectors


def _print(rows: Sequence[dict[str, Any]], title: str) -> None:
    headings = ["Detector", "Flagged", "Precision", "Recall", "FPR", "FNR", "Round", "Seconds"]
    cells = []
    for row in rows:
        rates = [fraction(row[key]) for key in ("precision", "recall", "fpr", "fnr")]
        decided = "-" if row["round"] is None else str(row["round"])
        flagged, seconds = str(len(row["malicious"])), f"{row['seconds']:.1f}"
        cells.append([row["label"], flagged, *rates, decided, seconds])
    print_table(Console(), headings, cells, title=title)
