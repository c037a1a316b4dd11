"""Run one recipe with several seeds and print a table, one row per seed and method.

    python benchmarks/seeds.py recipes/quickstart.yaml --seeds 0 1 2 3 4

A seed decides the partition, who is malicious, the initial weights, every batch and the attack.
The rows also go to a CSV file (`--csv`), from which the tables in the documentation are made.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from pathlib import Path
from typing import Any

from fedrec.cli.quiet import quiet
from fedrec.recipe import load_recipe, run

COLUMNS = ("seed", "method", "ter", "asr", "acp", "seconds", "detected", "malicious", "round")


def rows_of(seed: int, results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recording's row, then one per method."""
    detection = results["detection"]
    found = {
        "detected": len(detection["malicious"]),
        "malicious": f"fnr={detection['fnr']:g} fpr={detection['fpr']:g}",
        "round": detection["round"],
    }
    poisoned = {key: results["poisoned"][key] for key in ("ter", "asr")}
    first = {"seed": seed, "method": "poisoned", **poisoned, **found}
    rest = [
        {"seed": seed, "method": m["name"], **{k: m[k] for k in ("ter", "asr", "acp", "seconds")}}
        for m in results["methods"]
    ]
    return [first, *rest]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: methods down, seeds across."""
    seeds = sorted({row["seed"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["method"], row["seed"]): row for row in rows}

    def cell(row: dict[str, Any]) -> str:
        parts = [f"{100 * row['ter']:.1f}"]
        if row["asr"] is not None:
            parts.append(f"{100 * row['asr']:.1f}")
        if row.get("acp") is not None:
            parts.append(f"{100 * row['acp']:.1f}")
        return " / ".join(parts)

    head = ["", *(f"seed {seed}" for seed in seeds)]
    lines = [head, ["---"] * len(head)]
    lines += [[m, *(cell(found[m, seed]) for seed in seeds)] for m in methods]
    verdicts = [found["poisoned", seed] for seed in seeds]
    lines.append(["detection", *(f"{v['malicious']}, round {v['round']}" for v in verdicts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            overrides = [*arguments.overrides, f"seed={seed}", f"name=seed-{seed}"]
            recipe = load_recipe(arguments.recipe, overrides)
            results = run(recipe, output_dir=arguments.keep or folder, progress=False)
            rows += rows_of(seed, results)
            print(f"seed {seed} done", flush=True)
    print("TER % / ASR % where there is one / ACP %\n")
    print(table(rows))
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
