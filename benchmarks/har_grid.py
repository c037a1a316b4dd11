"""The HAR part of the paper's main grid, at the paper's scale: 3 rules, 2 attacks, 6 methods.

    OMP_NUM_THREADS=1 python benchmarks/har_grid.py --seeds 0 1 2 --work runs/har_grid

30 clients, 6 of them malicious and all known, 1,000 rounds, batches of 32, server learning rate
9.6e-3, trimming 0.2, backdoor of scale 5 with every 20th feature at 0 and target 0: the recipes
`recipes/har/trimmed_mean_{trim,backdoor}.yaml` with other rules, and both without an attack. One
configuration takes about 4 minutes on one core and 6.3 GB of disk, which its recording gives back
once its results are in.

Rows that are in the CSV file are kept and not computed again; an interrupted configuration goes on
where it was. `--table` prints means and deviations over seeds and does nothing else. TER, ASR and
ACP are fractions. `fixes` are the rounds in which a client was asked for an exact update because
its estimate was abnormal or could not be made (`fallback`). Without an attack, ASR is that of the
backdoor's trigger on a model that never saw it. `samples` tells the data apart: the official files
have 10,299; files with features recomputed from the raw signals have another number, and their
figures are not those of the official ones.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
from collections import Counter, defaultdict
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
ATTACKS = ("trim", "backdoor", "none")
METHODS: dict[str, dict[str, Any]] = {
    "TrainFromScratch": {"class_path": "TrainFromScratch"},
    "paired": {"class_path": "FedRecover", "init_args": {"estimator": "paired"}},
    "anchored": {"class_path": "FedRecover", "init_args": {"estimator": "anchored"}},
    "average": {"class_path": "FedRecover", "init_args": {"estimator": "average"}},
    "HistoricalOnly": {"class_path": "HistoricalOnly"},
    "without estimates": {"class_path": "FedRecover", "init_args": {"estimator": "none"}},
}
COLUMNS = (
    *("samples", "seed", "rule", "attack", "method", "ter", "asr", "acp", "fixes_mean"),
    *("fixes_min", "fixes_max", "fallbacks_mean", "seconds", "history_bytes", "commit"),
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


def methods_of(attack: str) -> list[str]:
    """Return the names of a configuration's rows."""
    return ["trained"] if attack == "none" else ["poisoned", *METHODS]


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table: TER, then ASR, with ACP and fixes; mean and deviation over seeds."""
    methods = ["trained", "poisoned", *METHODS]
    found = defaultdict(list)
    for row in rows:
        found[row["attack"], row["rule"], row["method"]].append(row)

    def figure(rows: list[dict[str, str]], name: str, scale: float = 100) -> str:
        values = [scale * float(row[name]) for row in rows if row[name]]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}" if values else ""

    def cell(rows: list[dict[str, str]]) -> str:
        text = " / ".join(filter(None, (figure(rows, "ter"), figure(rows, "asr"))))
        cost = figure(rows, "acp")
        return f"{text} ({cost}; {figure(rows, 'fixes_mean', 1)})" if cost else text

    lines = [["attack", "rule", "seeds", *methods], ["---"] * (3 + len(methods))]
    for attack in ATTACKS:
        for rule in RULES:
            cells = [found[attack, rule, method] for method in methods]
            seeds = sorted({len(rows) for rows in cells if rows})
            lines.append([attack, rule, "/".join(map(str, seeds)), *map(cell, cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run what is missing, and append it to the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--work", type=Path, default=Path("runs/har_grid"))
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/har_grid.csv"))
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--table", action="store_true", help="print the table of what is done")
    arguments = parser.parse_args()
    if arguments.table:
        print(summary(read(arguments.csv)))
        return
    arguments.work.mkdir(parents=True, exist_ok=True)
    done = {(r["seed"], r["rule"], r["attack"], r["method"]) for r in read(arguments.csv)}
    commit = subprocess.run(
        ("git", "describe", "--always", "--dirty"), capture_output=True, text=True, check=True
    ).stdout.strip()
    data = HAR()
    samples = len(data.train_dataset) + len(data.test_dataset)
    points = [
        (seed, rule, attack)
        for seed in arguments.seeds
        for attack in arguments.attacks
        for rule in RULES
    ]
    for seed, rule, attack in points:
        asked = {"trained", "poisoned", *arguments.methods}
        missing = [
            method
            for method in methods_of(attack)
            if method in asked and (str(seed), rule, attack, method) not in done
        ]
        if not missing:
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
            nodes = [METHODS[m] | {"label": m} for m in missing if m in METHODS]
            overrides.append(f"recoverers={json.dumps(nodes)}")
            rows = attacked(RECIPES / f"trimmed_mean_{attack}.yaml", overrides, arguments.work)
        is_new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            if is_new:
                writer.writeheader()
            point = {"samples": samples, "seed": seed, "rule": rule, "attack": attack}
            point["commit"] = commit
            for row in rows:
                if row["method"] in missing:
                    writer.writerow(point | {key: _rounded(v) for key, v in row.items()})
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    with quiet():
        main()
