"""The HAR part of the paper's main grid, at the paper's scale: 3 rules, 2 attacks, 4 methods.

    OMP_NUM_THREADS=1 python benchmarks/har_grid.py --seeds 0 --work runs/har_grid \
        --csv benchmarks/results/har_grid.csv

30 clients, 6 of them malicious and all known, 1,000 rounds, batches of 32, server learning rate
9.6e-3, trimming 0.2, backdoor of scale 5 with every 20th feature at 0 and target 0: the recipes
`recipes/har/trimmed_mean_{trim,backdoor}.yaml` with other rules, and both without an attack. One
configuration takes about 4 minutes on one core and 6.3 GB of disk, which its recording gives back
once its results are in.

Configurations that are in the CSV file are kept and skipped; an interrupted one goes on where it
was. TER, ASR and ACP are fractions. `fixes` are the rounds in which a client was
asked for an exact update because its estimate was abnormal or could not be made (`fallback`).
Without an attack, ASR is that of the backdoor's trigger on a model that never saw it. `samples`
tells the data apart: the official files have 10,299; files with features recomputed from the raw
signals have another number, and their figures are not those of the official ones.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from fedrec.cli.quiet import quiet
from fedrec.data import HAR
from fedrec.federation import Federation
from fedrec.history import LMDBHistory
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe, run
from fedrec.recipe.schema import build_parts, folder_name

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "har"
RULES = {
    "FedAvg": "aggregator=FedAvg",
    "Median": "aggregator=Median",
    "TrimmedMean": "aggregator={class_path: TrimmedMean, init_args: {trim: 0.2}}",
}
COLUMNS = (
    *("samples", "seed", "rule", "attack", "method", "ter", "asr", "acp"),
    *("fixes_mean", "fixes_min", "fixes_max", "fallbacks_mean", "seconds", "history_bytes"),
)


def fixes(ledger: Path, remaining: int) -> dict[str, float]:
    """Return how often clients were asked on their own account, from a recovery's ledger."""
    with ledger.open(newline="") as file:
        asked = [(row["client_id"], row["reason"]) for row in csv.DictReader(file)]
    own = Counter(client for client, reason in asked if reason in ("abnormality", "fallback"))
    counts = [*own.values(), *[0] * (remaining - len(own))]
    return {
        "fixes_mean": statistics.fmean(counts),
        "fixes_min": min(counts),
        "fixes_max": max(counts),
        "fallbacks_mean": sum(r == "fallback" for _, r in asked) / remaining,
    }


def attacked(recipe: Path, overrides: list[str], work: Path) -> list[dict[str, Any]]:
    """Record, recover by every method, and return the recording's row and one per method."""
    results = run(load_recipe(recipe, overrides), output_dir=work, progress=False)
    folder = work / results["recipe"]["name"]
    size = results["history"]["bytes"]
    remaining = results["history"]["clients"] - len(results["detection"]["malicious"])
    poisoned = {key: results["poisoned"][key] for key in ("ter", "asr")}
    rows = [{"method": "poisoned", **poisoned, "history_bytes": size}]
    for method in results["methods"]:
        ledger = folder / "recover" / folder_name(method["name"]) / "ledger.csv"
        figures = {key: method[key] for key in ("ter", "asr", "acp", "seconds")}
        rows.append({"method": method["name"], **figures, **fixes(ledger, remaining)})
    shutil.rmtree(folder)
    return rows


def honest(overrides: list[str], work: Path) -> list[dict[str, Any]]:
    """Train with all clients honest, and return the row of the model."""
    parts = build_parts(load_recipe(RECIPES / "trimmed_mean_backdoor.yaml", overrides))
    federation = Federation.from_data(parts.data, parts.model, **parts.federation)
    loop = FederatedLoop(**parts.loop, logger=False, enable_progress_bar=False)
    # No recovery will read it: the updates of one round are enough.
    with LMDBHistory(work / "honest", codec="int8+zstd", keep={"last": 1}) as history:
        arguments = {**parts.record, "resume": True}
        result = loop.record(federation, parts.aggregator, history, **arguments)
    figures = loop.test(federation, result.global_weights, attack=parts.attack)
    shutil.rmtree(work / "honest")
    return [{"method": "trained", **figures, "seconds": result.seconds}]


def _rounded(value: Any) -> Any:
    return round(value, 5) if isinstance(value, float) else value


def main() -> None:
    """Run what is missing, and append it to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=Path("runs/har_grid"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/har_grid.csv"))
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    done = set()
    if arguments.csv.exists():
        with arguments.csv.open(newline="") as file:
            done = {(row["seed"], row["rule"], row["attack"]) for row in csv.DictReader(file)}
    data = HAR()
    samples = len(data.train_dataset) + len(data.test_dataset)
    points = [
        (seed, rule, attack)
        for seed in arguments.seeds
        for attack in ("trim", "backdoor", "none")
        for rule in RULES
    ]
    for seed, rule, attack in points:
        if (str(seed), rule, attack) in done:
            continue
        name = f"{rule}-{attack}-{seed}"
        overrides = [
            RULES[rule],
            *(f"seed={seed}", f"name={name}", f"record.max_rounds={arguments.rounds}"),
            *("loop.accelerator=cpu", "loop.num_threads=1"),
        ]
        if attack == "none":
            rows = honest(overrides, arguments.work)
        else:
            rows = attacked(RECIPES / f"trimmed_mean_{attack}.yaml", overrides, arguments.work)
        is_new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            point = {"samples": samples, "seed": seed, "rule": rule, "attack": attack}
            writer.writerows(point | {key: _rounded(v) for key, v in r.items()} for r in rows)
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    with quiet():
        main()
