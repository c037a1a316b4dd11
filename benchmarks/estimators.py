"""FedRecover's estimators beside each other: each setting is recorded once, and recovered by all.

    OMP_NUM_THREADS=1 FEDREC_DATA=data python benchmarks/estimators.py

Rows that are in the CSV file are kept and skipped, so the same call goes on after an interruption,
in the middle of a recording, too; what is missing is listed at the end. `--table` prints the means
over seeds and does nothing else.

The settings are those of `benchmarks/paper_figures.py` (50 clients, 500 rounds, a hidden layer of
32, 10 clients malicious, trim attack, trimmed mean; and the stand-in for Purchase), the recipes of
the quickstarts and the coffee break, and the paper's CNN with 20 clients. Exactly the malicious
clients are excluded. TER, ASR and ACP are fractions. `ter_late` is the mean of the last five
evaluations, a twentieth of the rounds apart and on 2,000 test images: where the learning rate is at
the edge, the TER of one round is luck. `distance` is that to the weights of training from scratch,
divided by their norm; `fixes` the updates that a client was asked for because its estimate was
abnormal or could not be made; weights are those of the last round. A setting takes
1 to 30 minutes on one core, and up to 3 GB of disk, which its recording gives back unless `--keep`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import paper_figures
import torch

from fedrec.cli.quiet import quiet
from fedrec.federation import Federation
from fedrec.history import LMDBHistory
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe
from fedrec.recipe.schema import Parts, build_parts
from fedrec.recoverers import AnchoredLBFGS, FedRecover, Recoverer, TrainFromScratch

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SMALL = (
    "data.init_args.num_clients=50",
    "federation.malicious=10",
    "model={class_path: MLP, init_args: {in_features: 784, hidden: [32]}}",
    "record.max_rounds=500",
    "record.server_lr=0.0384",
)
PURCHASE = (*paper_figures.PURCHASE, "record.max_rounds=500")
CNN = (
    "data.init_args.num_clients=20",
    "federation.malicious=4",
    "record.max_rounds=500",
    "record.server_lr=0.02",
)
Q = "data.init_args.partitioner.init_args.q"
SETTINGS = {
    "digits": ("quickstart.yaml", ()),
    "digits, backdoor": ("quickstart_backdoor.yaml", ()),
    "trim, 40% malicious": ("paper/base.yaml", (*SMALL, "federation.malicious=20")),
    "trim, q = 0.9": ("paper/base.yaml", (*SMALL, f"{Q}=0.9")),
    "trim": ("paper/base.yaml", SMALL),
    "backdoor, FedAvg": (
        "paper/base.yaml",
        (*SMALL, "attack=BackdoorAttack", "aggregator=FedAvg"),
    ),
    "coffee break": ("mnist/coffee_break_trim.yaml", ()),
    "Purchase stand-in": ("purchase/trimmed_mean_trim.yaml", PURCHASE),
    "CNN": ("mnist/trimmed_mean_trim.yaml", CNN),
}


def anchored(**arguments: Any) -> FedRecover:
    """Return FedRecover with this estimator."""
    return FedRecover(estimator=AnchoredLBFGS(**arguments))


RULES: dict[str, Recoverer] = {
    "scratch": TrainFromScratch(),
    "paired": FedRecover(estimator="paired"),
    "anchored": anchored(),
    "average": FedRecover(estimator="average"),
    "one gain": anchored(common_gain=0.01),  # never more than the client's own
    "K=0.5": anchored(gain=0.5),
    "beta=0": anchored(history_weight=0.0),
    "gamma=0": anchored(curvature_weight=0.0),
    "gamma=1": anchored(curvature_weight=1.0),
}
WEIGHTS = ("history_weight", "curvature_weight")
COLUMNS = (
    *("setting", "seed", "rule", "ter", "ter_late", "distance", "asr", "acp", "fixes"),
    *(*WEIGHTS, "seconds", "commit"),
)
Key = tuple[str, str, str]


def read(path: Path) -> dict[Key, dict[str, str]]:
    """Return the rows of the file by setting, seed and rule."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {(r["setting"], r["seed"], r["rule"]): r for r in csv.DictReader(file)}


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerow({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})


def scratch_of(path: Path) -> Path:
    """Return where the weights are kept that training from scratch gives after a recording."""
    return path.with_name(f"{path.name}_scratch.pt")


def recover(
    loop: FederatedLoop, parts: Parts, federation: Federation, path: Path, rule: str
) -> dict[str, Any]:
    """Recover by one rule, and return its row."""
    began = time.perf_counter()
    scratch = scratch_of(path)
    with LMDBHistory(path) as history:
        result = loop.recover(federation, history, RULES[rule], federation.malicious)
    if rule == "scratch":
        torch.save(result.global_weights, scratch)
    reference = torch.load(scratch)
    figures = loop.test(federation, result.global_weights, attack=parts.attack)
    own = sum(e.reason in ("abnormality", "fallback") for e in result.ledger.entries)
    return {
        **{key: figures.get(key) for key in ("ter", "asr")},
        "ter_late": statistics.fmean(point["ter"] for point in result.curve[-5:]),
        "distance": float((result.global_weights - reference).norm() / reference.norm()),
        "acp": result.ledger.acp(),
        "fixes": own / (len(federation.clients) - len(federation.malicious)),
        **{key: result.diagnostics.get(key) for key in WEIGHTS},
        "seconds": time.perf_counter() - began,
    }


def study(setting: str, seed: int, rules: Collection[str], path: Path, table: Path) -> None:
    """Record the setting, unless that is done, and add a row for each of the rules."""
    recipe, overrides = SETTINGS[setting]
    parts = build_parts(load_recipe(RECIPES / recipe, [*overrides, f"seed={seed}"]))
    federation = Federation.from_data(parts.data, parts.model, **parts.federation)
    options = {**parts.loop, "accelerator": "cpu", "num_threads": 1}
    loop = FederatedLoop(**options, enable_progress_bar=False, logger=False)
    with LMDBHistory(path, codec="int8+zstd") as history:
        arguments = {**parts.record, "resume": True}
        if len(history.rounds()) < arguments["max_rounds"]:
            loop.record(federation, parts.aggregator, history, attack=parts.attack, **arguments)
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), capture_output=True, text=True, check=True
    )
    needed = [] if scratch_of(path).exists() else ["scratch"]
    for rule in dict.fromkeys([*needed, *rules]):
        row = recover(loop, parts, federation, path, rule)
        if rule not in rules:
            continue
        key = {"setting": setting, "seed": seed, "rule": rule}
        append(table, {**key, **row, "commit": commit.stdout.strip()})
        print(setting, seed, rule, f"{100 * row['ter']:.1f}", flush=True)


def summary(rows: dict[Key, dict[str, str]]) -> str:
    """Return a Markdown table: mean TER over seeds, in percent; rules down, settings across."""
    ters = defaultdict(list)
    for (setting, _, rule), row in rows.items():
        ters[setting, rule].append(100 * float(row["ter"]))
    settings = [s for s in SETTINGS if any(setting == s for setting, _ in ters)]

    def cell(values: list[float]) -> str:
        if not values:
            return "missing"
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread} ({len(values)})"

    lines = [["", *settings], ["---"] * (1 + len(settings))]
    lines += [[rule, *(cell(ters[s, rule]) for s in settings)] for rule in RULES]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Do what is missing, and say what still is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--work", type=Path, default=Path("runs/estimators"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/estimators.csv"))
    parser.add_argument("--keep", action="store_true", help="keep the recordings")
    parser.add_argument("--table", action="store_true", help="print the table of what is done")
    arguments = parser.parse_args()
    for seed in arguments.seeds if not arguments.table else []:
        for setting in arguments.settings:
            done = read(arguments.csv)
            rules = [r for r in arguments.rules if (setting, str(seed), r) not in done]
            path = arguments.work / f"{setting} {seed}".replace(",", "").replace(" ", "_")
            if rules:
                study(setting, seed, rules, path, arguments.csv)
            if not arguments.keep:
                shutil.rmtree(path, ignore_errors=True)
                scratch_of(path).unlink(missing_ok=True)
    done = read(arguments.csv)
    print(summary(done))
    for setting in arguments.settings:
        for seed in arguments.seeds:
            missing = [r for r in arguments.rules if (setting, str(seed), r) not in done]
            if missing:
                print(f"missing: {setting}, seed {seed}: {', '.join(missing)}")


if __name__ == "__main__":
    with quiet():
        main()
