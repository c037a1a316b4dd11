"""Recover while attackers that were not detected go on attacking; write a CSV.

    python benchmarks/recovery_attacks.py --csv benchmarks/results/recovery_attacks.csv

Settings are those of a recipe (`--recipe`), in which attack and rule are replaced. Half of the
malicious clients are detected and excluded. The others attack in every round in which the recovery
asks them: those who did so while it was recorded (`always`), and those who were honest then, since
they know the schedule of a recovery (`recovery`). Rows that are in the CSV are kept, and only
methods that are missing are computed, so that an interrupted run goes on. `--table` prints what
there is, and does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from robustness import ATTACKS, RECIPE, TRIMMED, load_data, node, read_rows
from torch import Tensor
from torch.utils.data import Dataset

from fedrec import FederatedLoop, Federation
from fedrec.attacks import Attack, AttackContext, AttackWrapper
from fedrec.cli.quiet import quiet
from fedrec.exceptions import FedrecError
from fedrec.history import MemoryHistory
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import FedRecover, Recoverer, TrainFromScratch, UpdateFilter

COLUMNS = ("rule", "attack", "undetected", "method", "ter", "asr", "acp", "note")
UNDETECTED = ("none", "always", "recovery")
SETTINGS = {"warmup_rounds": 10, "correction_period": 10, "final_rounds": 5, "tolerance_rate": 1e-6}
METHODS: dict[str, Recoverer] = {"TrainFromScratch": TrainFromScratch()} | {
    f"FedRecover{name}{filtered}": FedRecover(
        **SETTINGS, estimator=estimator, update_filter=UpdateFilter() if filtered else None
    )
    for estimator, name in (("anchored", ""), ("average", ", average"), ("paired", ", paired"))
    for filtered in ("", ", filtered")
}
RULES = {"TrimmedMean": TRIMMED, "FedAvg": node("FedAvg")}
ADAPTIVE = node("BackdoorAttack", scale=5.0, adaptive=True)
CHOSEN: dict[str, Any] = {
    name: ATTACKS[name]
    for name in (
        *("SignFlip", "LabelFlip", "TrimAttack", "TrimAttack (partial)", "KrumAttack"),
        *("ALIE (z=1.5)", "IPM (epsilon=5)", "MinMax", "MinSum", "Mimic"),
    )
} | {
    "MPAF (scale=10)": node("MPAF", scale=10.0),
    "PoisonedFL": ATTACKS["PoisonedFL"],
    "Backdoor, adaptive": ADAPTIVE,
    "DBA": ATTACKS["DBA"],
    "EdgeCaseBackdoor": ATTACKS["EdgeCaseBackdoor"],
    "Neurotoxin, adaptive": node("Neurotoxin", attack=ADAPTIVE),
}


class Sleeping(AttackWrapper):
    """An attack in which some malicious clients stay honest.

    Args:
        attack: What the others do.
        asleep: The honest ones.
    """

    def __init__(self, attack: Attack, asleep: Sequence[str]) -> None:
        super().__init__(attack)
        self.asleep = tuple(asleep)

    @property
    def crafts_updates(self) -> bool:
        """Whether the wrapped attack crafts updates."""
        return self.attack.crafts_updates

    def poison_dataset(self, dataset: Dataset[Any], client_id: str) -> Dataset[Any]:
        """Poison the data of those who are awake."""
        return (
            dataset if client_id in self.asleep else self.attack.poison_dataset(dataset, client_id)
        )

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Craft what those send who are awake."""
        awake = torch.tensor([c not in self.asleep for c in ctx.client_ids])
        return self.attack.craft(updates, malicious & awake.to(malicious.device), ctx)


def methods_of(undetected: str) -> list[str]:
    """Return the names of a setting's rows; nothing is filtered where nobody attacks."""
    return [
        "(poisoned)",
        *(m for m in METHODS if undetected != "none" or not m.endswith("filtered")),
    ]


def run(
    recipe: Path,
    overrides: tuple[str, ...],
    attack: str,
    rule: str,
    undetected: str,
    methods: Collection[str],
) -> Iterator[dict[str, Any]]:
    """Record once and recover by these methods; yield a row's measurements each."""
    swaps = [f"aggregator={json.dumps(RULES[rule])}", f"attack={json.dumps(CHOSEN[attack])}"]
    parts = build_parts(load_recipe(recipe, [*overrides, *swaps]))
    data = load_data(recipe, overrides)
    federation = Federation.from_data(data, parts.model, **parts.federation)
    rarely = {"eval_every": parts.record["max_rounds"], "enable_progress_bar": False}
    loop, history = FederatedLoop(**{**parts.loop, **rarely}), MemoryHistory()
    malicious = federation.malicious
    found = malicious if undetected == "none" else malicious[: len(malicious) // 2]
    hidden = malicious[len(found) :]
    acting = Sleeping(parts.attack, hidden) if undetected == "recovery" else parts.attack
    result = loop.record(federation, parts.aggregator, history, attack=acting, **parts.record)
    for name in methods:
        row: dict[str, Any] = {"method": name}
        if name == "(poisoned)":
            figures = loop.test(federation, result.global_weights, attack=parts.attack)
            yield {**row, **figures}
            continue
        try:
            recovered = loop.recover(federation, history, METHODS[name], found, attack=parts.attack)
        except FedrecError as error:
            yield {**row, "note": type(error).__name__}
            continue
        figures = loop.test(federation, recovered.global_weights, attack=parts.attack)
        yield {**row, **figures, "acp": recovered.ledger.acp() if recovered.ledger else None}


def table(rows: list[dict[str, Any]], rule: str, figure: str, estimator: str) -> str:
    """Return a Markdown table in percent: an attack a line, with recoveries by one estimator."""
    one = f"FedRecover{estimator}"
    columns = {
        "poisoned": ("none", "(poisoned)"),
        "all excluded: scratch": ("none", "TrainFromScratch"),
        "FedRecover": ("none", one),
        "always: scratch": ("always", "TrainFromScratch"),
        " FedRecover": ("always", one),
        "filtered": ("always", f"{one}, filtered"),
        "recovery: FedRecover": ("recovery", one),
        " filtered": ("recovery", f"{one}, filtered"),
    }
    found = {
        (row["attack"], row["undetected"], row["method"]): 100 * float(row[figure])
        for row in rows
        if row["rule"] == rule and row[figure]
    }
    lines = [["", *map(str.strip, columns)], ["---"] * (1 + len(columns))]
    for attack in CHOSEN:
        cells = [found.get((attack, *key)) for key in columns.values()]
        if any(cell is not None for cell in cells):
            lines.append([attack, *("" if cell is None else f"{cell:.1f}" for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[], help="of the recipe, key=value")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--attacks", nargs="+", choices=CHOSEN, default=list(CHOSEN))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--undetected", nargs="+", choices=UNDETECTED, default=list(UNDETECTED))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--table", action="store_true", help="print what there is")
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    if arguments.table:
        for rule, figure in product(RULES, ("ter", "asr")):
            for estimator in ("", ", average", ", paired"):
                print(f"\n{rule}, {figure.upper()}, FedRecover{estimator}\n")
                print(table(rows, rule, figure, estimator))
        return
    done = {(row["rule"], row["attack"], row["undetected"], row["method"]) for row in rows}
    todo = product(arguments.rules, arguments.attacks, arguments.undetected)
    asked = {"(poisoned)", *arguments.methods}
    with quiet(), arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for rule, attack, undetected in todo:
            key = {"rule": rule, "attack": attack, "undetected": undetected}
            missing = [
                m for m in methods_of(undetected) if m in asked and (*key.values(), m) not in done
            ]
            if not missing:
                continue
            overrides = tuple(arguments.overrides)
            for row in run(arguments.recipe, overrides, attack, rule, undetected, missing):
                shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({**key, **shown})
                file.flush()
                print(*{**key, **shown}.values(), flush=True)


if __name__ == "__main__":
    main()
