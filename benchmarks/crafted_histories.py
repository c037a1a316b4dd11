"""How good estimates are along the training that a recovery should repeat, attack by attack.

    python benchmarks/crafted_histories.py --csv benchmarks/results/crafted_histories.csv

The settings are those of `benchmarks/recovery_attacks.py` with all malicious clients excluded. The
recovery asks everybody in every round, so it follows training from scratch. In the rounds that
`FedRecover` would estimate in, several estimators are asked what they would have said, and learn
from the others. So their errors are errors of single rounds at a good model, and none is the
consequence of an earlier one.

A row is an attack, a seed and an estimator. `error` and `cosine` compare the estimate with the
exact update, client by client; `error_of_mean` compares the trimmed means of both, which is the
step. All are medians over the rounds (and clients), errors as multiples of the exact length.
`apart` is how far the recorded model is from the recovered one, as a multiple of how far the
recovered one is from where both began; `length` how long recorded updates of the remaining clients
are as a multiple of the exact ones, and `counterweight` the same of their trimmed means. What was
aggregated in the recording differs from that mean by what the attackers added: `balance` is the
cosine of the two.
`poisoned` is the recorded model's TER at the end. `--table` prints means over the seeds that are
there, and does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from recovery_attacks import CHOSEN, RULES, SETTINGS
from robustness import RECIPE, load_data, read_rows
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import TrimmedMean
from fedrec.cli.quiet import quiet
from fedrec.history import MemoryHistory
from fedrec.history.view import HistoryView
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import build_parts
from fedrec.recoverers import (
    AnchoredLBFGS,
    Estimates,
    Estimator,
    FedRecover,
    HistoricalUpdate,
    PairedLBFGS,
)
from fedrec.types import RoundRecord

ESTIMATORS = {
    "history": HistoricalUpdate,
    "paired": PairedLBFGS,
    "anchored": AnchoredLBFGS,
}
RULE = TrimmedMean(trim=0.2)
FIGURES = ("error", "cosine", "error_of_mean", "apart", "length", "counterweight", "balance")
COLUMNS = ("attack", "seed", "estimator", *FIGURES, "beta", "gamma", "poisoned")


class Questioned(Estimator):
    """Asks estimators for estimates that are not used, and compares them with exact updates.

    Args:
        schedule: Which rounds have estimates.
        max_rounds: How many there are.
    """

    def __init__(self, schedule: FedRecover, max_rounds: int) -> None:
        self.schedule = schedule
        self.max_rounds = max_rounds
        self.estimators: dict[str, Estimator] = {n: make() for n, make in ESTIMATORS.items()}
        self.found: dict[str, list[list[float]]] = {name: [] for name in ESTIMATORS}
        self.first: Tensor | None = None

    def start(self, history: HistoryView, rounds: range) -> None:
        """Begin."""
        for estimator in self.estimators.values():
            estimator.start(history, rounds)

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> None:
        """Let them learn, or answer."""
        if self.first is None:
            self.first = global_weights.clone()
        due = self.schedule.exact_reason(record.round, self.max_rounds)
        if due is not None:
            for estimator in self.estimators.values() if due != "final" else ():
                statistics = estimator.observe(record, exact, global_weights, due)
                if statistics is not None:
                    estimator.pool([statistics])
            return
        recorded, right = RULE(record.updates), RULE(exact)
        far = (record.global_weights - global_weights).norm()
        added = record.aggregate - recorded
        for name, estimator in self.estimators.items():
            rows = estimator.estimate(record, global_weights).updates
            self.found[name].append(
                [
                    float(((rows - exact).norm(dim=1) / exact.norm(dim=1)).median()),
                    float(cosine_similarity(rows, exact).median()),
                    float((RULE(rows) - right).norm() / right.norm()),
                    float(far / (global_weights - self.first).norm()),
                    float((record.updates.norm(dim=1) / exact.norm(dim=1)).median()),
                    float(recorded.norm() / right.norm()),
                    float(cosine_similarity(recorded, added, dim=0)),
                ]
            )

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Never asked: the recovery has no estimated rounds."""
        raise NotImplementedError


def run(attack: str, seed: int) -> list[dict[str, Any]]:
    """Record once, follow training from scratch, and return a row per estimator."""
    overrides = (f"seed={seed}",)
    swaps = [f"aggregator={json.dumps(RULES['TrimmedMean'])}"]
    swaps.append(f"attack={json.dumps(CHOSEN[attack])}")
    parts = build_parts(load_recipe(RECIPE, [*overrides, *swaps]))
    federation = Federation.from_data(load_data(RECIPE, overrides), parts.model, **parts.federation)
    rounds = parts.record["max_rounds"]
    rarely = {"eval_every": rounds, "enable_progress_bar": False}
    loop, history = FederatedLoop(**{**parts.loop, **rarely}), MemoryHistory()
    result = loop.record(federation, parts.aggregator, history, attack=parts.attack, **parts.record)
    poisoned = loop.test(federation, result.global_weights)["ter"]
    asked = Questioned(FedRecover(**SETTINGS), rounds)
    always = FedRecover(warmup_rounds=rounds, final_rounds=0, estimator=asked)
    loop.recover(federation, history, always, federation.malicious)
    rows = []
    for name, found in asked.found.items():
        figures = torch.tensor(found).median(dim=0).values.tolist()
        learnt = asked.estimators[name].diagnostics()
        rows.append(
            {
                "estimator": name,
                **dict(zip(FIGURES, figures, strict=True)),
                "beta": learnt.get("history_weight"),
                "gamma": learnt.get("curvature_weight"),
                "poisoned": poisoned,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: an attack a line; means over seeds."""
    head = ["attack", "seeds", "poisoned, %", "apart", "length", "counterweight", "balance"]
    head += [f"{name}: error, cosine; of the mean" for name in ESTIMATORS]
    lines = [[*head, "beta"], ["---"] * (len(head) + 1)]

    def mean(found: list[dict[str, Any]], figure: str, scale: float = 1) -> str:
        values = [scale * float(row[figure]) for row in found if row[figure] != ""]
        return f"{fmean(values):.2f}" if values else ""

    for attack in dict.fromkeys(row["attack"] for row in rows):
        of = {
            n: [r for r in rows if (r["attack"], r["estimator"]) == (attack, n)] for n in ESTIMATORS
        }
        line = [attack, str(len(of["anchored"])), mean(of["anchored"], "poisoned", 100)]
        line += [mean(of["anchored"], figure) for figure in FIGURES[3:]]
        for found in of.values():
            error, cosine, of_mean = (mean(found, figure) for figure in FIGURES[:3])
            line.append(f"{error}, {cosine}; {of_mean}")
        lines.append([*line, mean(of["anchored"], "beta")])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--attacks",
        nargs="+",
        choices=CHOSEN,
        default=["ALIE (z=1.5)", "MinMax", "MinSum", "TrimAttack", "SignFlip", "Mimic"],
    )
    parser.add_argument("--table", action="store_true", help="print what there is")
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    if arguments.table:
        print(table(rows))
        return
    done = {(row["attack"], int(row["seed"])) for row in rows}
    with quiet(), arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for seed in arguments.seeds:
            for attack in arguments.attacks:
                if (attack, seed) in done:
                    continue
                for row in run(attack, seed):
                    shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                    writer.writerow({"attack": attack, "seed": seed, **shown})
                    print(attack, seed, *shown.values(), flush=True)
                file.flush()


if __name__ == "__main__":
    main()
