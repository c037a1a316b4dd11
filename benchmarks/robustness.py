"""Train under every attack with every aggregation rule; write a CSV and draw heatmaps.

    python benchmarks/robustness.py --csv benchmarks/results/robustness.csv --svg docs/assets

Settings are those of a recipe (`--recipe`), in which attack and rule are replaced. Pairs that are
in the CSV are kept, so that an interrupted run goes on. Nothing is stored but the last weights.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

from heatmap import draw
from torch import Tensor

from fedrec import FederatedLoop, Federation
from fedrec.cli.quiet import quiet
from fedrec.data import FederatedDataModule
from fedrec.exceptions import FedrecError
from fedrec.history import MemoryHistory
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.types import RoundRecord

RECIPE = Path(__file__).parents[1] / "recipes" / "benchmarks" / "robustness.yaml"
COLUMNS = ("attack", "rule", "ter", "asr", "rounds", "seconds", "note")


def node(class_path: str, **init_args: Any) -> dict[str, Any]:
    """Return a component as a recipe writes it."""
    return (
        {"class_path": class_path, "init_args": init_args}
        if init_args
        else {"class_path": class_path}
    )


# With 4 of 20 clients malicious, this is `ModelReplacement` of a backdoor, bit for bit.
BACKDOOR = node("BackdoorAttack", scale=5.0)
ATTACKS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "GaussianNoise": node("GaussianNoise", std=1.0),
    "SignFlip": node("SignFlip", scale=5.0),
    "LabelFlip": node("LabelFlip", num_classes=10),
    "TrimAttack": node("TrimAttack"),
    "TrimAttack (partial)": node("TrimAttack", full_knowledge=False),
    "KrumAttack": node("KrumAttack"),
    "ALIE": node("ALIE"),
    "ALIE (z=1.5)": node("ALIE", z=1.5),
    "IPM": node("IPM"),
    "IPM (epsilon=5)": node("IPM", epsilon=5.0),
    "MinMax": node("MinMax"),
    "MinSum": node("MinSum"),
    "MPAF": node("MPAF"),
    "Mimic": node("Mimic"),
    "Backdoor": BACKDOOR,
    "DBA": node("DBA", scale=5.0),
    "Neurotoxin": node("Neurotoxin", attack=BACKDOOR),
    "EdgeCaseBackdoor": node("EdgeCaseBackdoor", scale=5.0),
    "PoisonedFL": node("PoisonedFL", period=10),
}
F = {"num_byzantine": 0.2}
TRIMMED = node("TrimmedMean", trim=0.2)
RULES: dict[str, dict[str, Any]] = {
    "FedAvg": node("FedAvg"),
    "NormClipping": node("NormClipping"),
    "Median": node("Median"),
    "TrimmedMean": TRIMMED,
    "MeanAroundMedian": node("MeanAroundMedian", **F),
    "GeometricMedian": node("GeometricMedian"),
    "Krum": node("Krum", **F),
    "MultiKrum": node("MultiKrum", **F),
    "Bulyan": node("Bulyan", **F),
    "CenteredClipping": node("CenteredClipping", tau=1.0),
    "CAF": node("CAF", **F),
    "DnC": node("DnC", **F),
    "SignGuard": node("SignGuard"),
    "FLAME": node("FLAME"),
    "FoolsGold": node("FoolsGold"),
    "RLR": node("RLR", rule=node("FedAvg"), threshold=0.4),
    "NNM + TrimmedMean": node("NearestNeighborMixing", rule=TRIMMED, **F),
    "Bucketing + Krum": node("Bucketing", rule=node("Krum", num_byzantine=3)),
    "Bucketing + GeometricMedian": node("Bucketing", rule=node("GeometricMedian")),
    "ARC + GeometricMedian": node("ARC", rule=node("GeometricMedian"), **F),
    "FLTrust": node("FLTrust"),
    "AlignIns": node("AlignIns"),
    "LASA": node("LASA"),
    "MultiMetrics": node("MultiMetrics", local_lr=0.15),
    "RFLBAT": node("RFLBAT"),
    "DeepSight": node("DeepSight", input_shape=[1, 28, 28], local_lr=0.15),
}
# What a rule needs besides: data at the server; a sum is as many times as long as a mean.
OVERRIDES = {
    "FLTrust": ["data.init_args.server_samples=100"],
    "FoolsGold": ["record.server_lr=0.0075"],
}


class LastWeights(MemoryHistory):
    """Keeps nothing of a round but the weights it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.weights: Tensor | None = None

    def write_round(self, record: RoundRecord) -> None:
        """Count."""
        self.count += 1
        self.weights = record.global_weights

    def rounds(self) -> range:
        """Return how many were counted."""
        return range(self.count)


@cache
def load_data(recipe: Path, overrides: tuple[str, ...]) -> FederatedDataModule:
    """Return the data of a recipe, loaded and partitioned once."""
    return build_parts(load_recipe(recipe, overrides)).data


def run_pair(
    recipe: Path,
    overrides: tuple[str, ...],
    attack: dict[str, Any] | None,
    rule: dict[str, Any],
) -> dict[str, Any]:
    """Train once; return a row's measurements."""
    swaps = [f"aggregator={json.dumps(rule)}", f"attack={json.dumps(attack)}"]
    parts = build_parts(load_recipe(recipe, [*overrides, *swaps]))
    federation = Federation.from_data(load_data(recipe, overrides), parts.model, **parts.federation)
    rarely = {"eval_every": parts.record["max_rounds"], "enable_progress_bar": False}
    loop = FederatedLoop(**{**parts.loop, **rarely})
    history, note = LastWeights(), ""
    began = time.perf_counter()
    try:
        result = loop.record(
            federation, parts.aggregator, history, attack=parts.attack, **parts.record
        )
        weights = result.global_weights
    except FedrecError as error:
        if history.weights is None:
            raise
        weights, note = history.weights, type(error).__name__
    seconds = time.perf_counter() - began
    figures = loop.test(federation, weights, attack=parts.attack)
    return {**figures, "rounds": history.count, "seconds": round(seconds, 2), "note": note}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the CSV; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def percent(row: dict[str, Any], figure: str) -> float | None:
    """Return a figure in percent, where the row has it."""
    return 100 * float(row[figure]) if row[figure] not in ("", None) else None


def main() -> None:
    """Run what is missing, draw all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], help="of the recipe, key=value")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--svg", type=Path, help="folder for the heatmaps")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    done = {(row["attack"], row["rule"]) for row in rows}
    todo = [(a, r) for r in arguments.rules for a in arguments.attacks if (a, r) not in done]
    with quiet(), arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for attack, rule in todo:
            overrides = (*arguments.overrides, *OVERRIDES.get(rule, ()))
            found = run_pair(arguments.recipe, overrides, ATTACKS[attack], RULES[rule])
            row = {"attack": attack, "rule": rule, **found}
            writer.writerow(row)
            file.flush()
            print(" ".join(str(value) for value in row.values() if value is not None), flush=True)
    if arguments.svg is not None:
        rows = read_rows(arguments.csv)
        for figure in ("ter", "asr"):
            cells = {(r["attack"], r["rule"]): percent(r, figure) for r in rows}
            attacks = [a for a in ATTACKS if any(cells.get((a, r)) is not None for r in RULES)]
            draw(
                [[cells.get((a, r)) for a in attacks] for r in RULES],
                rows=list(RULES),
                columns=attacks,
                title=f"{figure.upper()}, %",
                path=arguments.svg / f"robustness_{figure}.svg",
            )


if __name__ == "__main__":
    main()
