"""Record under every attack, show the recording to every detector; write a CSV, draw heatmaps.

    python benchmarks/detection.py --csv benchmarks/results/detection.csv --svg docs/assets

Settings are those of a recipe (`--recipe`), in which attack, partition and seed are replaced. What
the CSV already has is kept, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from heatmap import draw
from robustness import ATTACKS, load_data, read_rows

from fedrec import FederatedLoop, Federation
from fedrec.cli.quiet import quiet
from fedrec.detectors import (
    Auror,
    CosineOutlier,
    CrossRoundConsistency,
    Detector,
    FLDetector,
    Mahalanobis,
    NormOutlier,
    Spectral,
    SybilSimilarity,
    UpdateAutoencoder,
)
from fedrec.history import MemoryHistory
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.types import Detection

RECIPE = Path(__file__).parents[1] / "recipes" / "benchmarks" / "detection.yaml"
COLUMNS = (
    "partition", "seed", "attack", "detector",
    "precision", "recall", "fpr", "fnr", "round", "malicious_score", "benign_score",
)  # fmt: skip
PARTITIONS = {"iid": 0.1, "q=0.5": 0.5}
DETECTORS: dict[str, Callable[[], Detector]] = {
    "FLDetector": FLDetector,
    "CrossRoundConsistency": CrossRoundConsistency,
    "NormOutlier": NormOutlier,
    "CosineOutlier": CosineOutlier,
    "Spectral": Spectral,
    "Mahalanobis": Mahalanobis,
    "Auror": Auror,
    "SybilSimilarity": SybilSimilarity,
    "UpdateAutoencoder": UpdateAutoencoder,
}


def record(recipe: Path, overrides: tuple[str, ...], attack: str) -> MemoryHistory:
    """Train under an attack; return the history."""
    swap = f"attack={json.dumps(ATTACKS[attack])}"
    parts = build_parts(load_recipe(recipe, [*overrides, swap]))
    federation = Federation.from_data(load_data(recipe, overrides), parts.model, **parts.federation)
    rarely = {"eval_every": parts.record["max_rounds"], "enable_progress_bar": False}
    loop, history = FederatedLoop(**{**parts.loop, **rarely}), MemoryHistory()
    loop.record(federation, parts.aggregator, history, attack=parts.attack, **parts.record)
    return history


def verdict(found: Detection, truth: Sequence[str]) -> dict[str, Any]:
    """Return how good a verdict is, and the mean scores of both kinds of clients."""

    def mean_score(malicious: bool) -> float | None:
        chosen = [s for c, s in found.scores.items() if (c in truth) == malicious]
        return round(fmean(chosen), 4) if chosen else None

    return {
        "precision": found.precision(truth),
        "recall": found.recall(truth),
        "fpr": found.false_positive_rate(truth),
        "fnr": found.false_negative_rate(truth),
        "round": found.round,
        "malicious_score": mean_score(True),
        "benign_score": mean_score(False),
    }


def mean(rows: list[dict[str, Any]], figure: str) -> float | None:
    """Return the mean over seeds in percent, where any seed has the figure."""
    values = [100 * float(row[figure]) for row in rows if row[figure] != ""]
    return fmean(values) if values else None


def main() -> None:
    """Run what is missing, draw all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], help="of the recipe, key=value")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--svg", type=Path, help="folder for the heatmaps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--partitions", nargs="+", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--detectors", nargs="+", choices=DETECTORS, default=list(DETECTORS))
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    done = {(r["partition"], int(r["seed"]), r["attack"], r["detector"]) for r in rows}
    with quiet(), arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for seed, partition, attack in product(
            arguments.seeds, arguments.partitions, arguments.attacks
        ):
            missing = [d for d in arguments.detectors if (partition, seed, attack, d) not in done]
            if not missing:
                continue
            own = (
                f"seed={seed}",
                f"data.init_args.partitioner.init_args.q={PARTITIONS[partition]}",
            )
            history = record(arguments.recipe, (*arguments.overrides, *own), attack)
            # Without an attack nobody is malicious, whoever was drawn to be.
            truth = () if attack == "none" else history.manifest.malicious
            for name in missing:
                found = verdict(DETECTORS[name]().detect(history, truth), truth)
                where = {"partition": partition, "seed": seed, "attack": attack, "detector": name}
                writer.writerow({**where, **found})
                print(*where.values(), *found.values(), flush=True)
            file.flush()
    if arguments.svg is not None:
        rows = read_rows(arguments.csv)
        for partition in PARTITIONS:
            for figure in ("recall", "fpr"):
                attacks = [a for a in ATTACKS if a != "none" or figure == "fpr"]
                cells = {
                    (d, a): [
                        r
                        for r in rows
                        if (r["partition"], r["detector"], r["attack"]) == (partition, d, a)
                    ]
                    for d in DETECTORS
                    for a in attacks
                }
                draw(
                    [[mean(cells[d, a], figure) for a in attacks] for d in DETECTORS],
                    rows=list(DETECTORS),
                    columns=attacks,
                    title=f"{figure.upper() if figure == 'fpr' else figure}, %, {partition}",
                    path=arguments.svg / f"detection_{figure}_{partition.replace('=0.', '0')}.svg",
                    good="low" if figure == "fpr" else "high",
                )


if __name__ == "__main__":
    main()
