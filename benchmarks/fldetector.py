"""FLDetector at the scale of its paper: 100 clients, 28 malicious, several seeds; write a CSV.

    python benchmarks/fldetector.py --csv benchmarks/results/fldetector.csv

The clients share 10,000 images of MNIST and train a network with one hidden layer, in mini-batches
or with all their data at once, iid or not. Every recording is watched by two detectors: with the
margin in the gap statistic that the paper has (1 standard error) and with ours (3). What the CSV
already has is kept. Prints a Markdown table of means over the seeds.
"""

from __future__ import annotations

import argparse
import csv
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from detection import verdict
from robustness import LastWeights, read_rows

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import Aggregator, FedAvg, Krum, TrimmedMean
from fedrec.attacks import DBA, Attack, BackdoorAttack, KrumAttack, ModelReplacement, TrimAttack
from fedrec.cli.quiet import quiet
from fedrec.data import MNIST, DegreeOfNonIID
from fedrec.detectors import Ensemble, FLDetector
from fedrec.models import MLP

COLUMNS = (
    "batch", "partition", "attack", "seed", "standard_errors",
    "dacc", "fpr", "fnr", "round", "malicious_score", "benign_score",
)  # fmt: skip
CLIENTS, MALICIOUS, ROUNDS, IMAGES = 100, 28, 35, 10_000
BATCHES = {"32": 32, "full": None}
PARTITIONS = {"iid": 0.1, "q=0.5": 0.5}
# Each attack with the rule that it is made against.
ATTACKS: dict[str, tuple[Attack | None, Aggregator]] = {
    "none": (None, FedAvg()),
    "Trim": (TrimAttack(), TrimmedMean(trim=0.28)),
    "Krum": (KrumAttack(), Krum(num_byzantine=0.28)),
    "scaling": (ModelReplacement(BackdoorAttack(scale=1.0)), FedAvg()),
    "DBA": (ModelReplacement(DBA(scale=1.0)), FedAvg()),
}
MARGINS = (1.0, 3.0)


def measure(batch: int | None, q: float, attack: str, seed: int) -> list[dict[str, Any]]:
    """Record once; return a row per detector."""
    data = MNIST(
        num_clients=CLIENTS, partitioner=DegreeOfNonIID(q=q), seed=seed, max_samples=IMAGES
    )
    torch.manual_seed(seed)
    federation = Federation.from_data(
        data,
        MLP(in_features=784, hidden=[32]),
        malicious=MALICIOUS,
        batch_size=batch,
        seed=seed,
    )
    crafted, rule = ATTACKS[attack]
    detectors = [FLDetector(standard_errors=margin) for margin in MARGINS]
    loop = FederatedLoop(seed=seed, eval_every=ROUNDS, enable_progress_bar=False, logger=False)
    loop.record(
        federation,
        rule,
        LastWeights(),
        max_rounds=ROUNDS,
        server_lr=0.15,
        attack=crafted,
        detector=Ensemble(detectors),
    )
    truth = () if attack == "none" else federation.malicious
    rows = []
    for margin, detector in zip(MARGINS, detectors, strict=True):
        found = detector.result()
        wrong = len(set(found.malicious) ^ set(truth))
        row = {"dacc": 1 - wrong / CLIENTS, **verdict(found, truth), "standard_errors": margin}
        rows.append({key: row[key] for key in COLUMNS if key in row})
    return rows


def table(rows: list[dict[str, str]]) -> str:
    """Return means over the seeds in Markdown."""
    head = ("batch", "partition", "attack", "margin", "DACC", "FPR", "FNR", "rounds")
    lines = [head, ["---"] * len(head)]
    for batch, partition, attack, margin in product(BATCHES, PARTITIONS, ATTACKS, MARGINS):
        some = [
            r
            for r in rows
            if (r["batch"], r["partition"], r["attack"]) == (batch, partition, attack)
            and float(r["standard_errors"]) == margin
        ]
        if not some:
            continue
        figures = [[float(r[name]) for r in some if r[name]] for name in ("dacc", "fpr", "fnr")]
        rounds = sorted({int(r["round"]) for r in some if r["round"]})
        decided = f"{rounds[0]}-{rounds[-1]}" if len(rounds) > 1 else str(*rounds)
        none = sum(not r["round"] for r in some)
        told = [f"{fmean(v):.2f}" if v else "" for v in figures]
        undecided = f"none in {none} of {len(some)}" if none else ""
        when = ", ".join(part for part in (decided, undecided) if part)
        lines.append((batch, partition, attack, f"{margin:g}", *told, when))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run what is missing, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    done = {(r["batch"], r["partition"], r["attack"], int(r["seed"])) for r in rows}
    with quiet(), arguments.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not rows:
            writer.writeheader()
        for seed, partition, batch, attack in product(
            arguments.seeds, PARTITIONS, BATCHES, ATTACKS
        ):
            if (batch, partition, attack, seed) in done:
                continue
            key = {"batch": batch, "partition": partition, "attack": attack, "seed": seed}
            found = measure(BATCHES[batch], PARTITIONS[partition], attack, seed)
            writer.writerows({**key, **row} for row in found)
            file.flush()
            print(*key.values(), *(tuple(row.values()) for row in found), flush=True)
    print(table(read_rows(arguments.csv)))


if __name__ == "__main__":
    main()
