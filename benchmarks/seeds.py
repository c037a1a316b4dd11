"""Run one recipe with several seeds and print a table, one row per seed and method.

    python benchmarks/seeds.py recipes/quickstart.yaml --seeds 0 1 2 3 4

A seed decides the partition, who is malicious, the initial weights, every batch and the attack.
The rows also go to a CSV file (`--csv`), from which the tables in the documentation are made. What
the file has is kept: only missing seeds, and missing methods of a seed, are computed.
"""

from __future__ import annotations

import argparse
import csv
import json
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
    lines += [
        [m, *(cell(found[m, seed]) if (m, seed) in found else "" for seed in seeds)]
        for m in methods
    ]
    verdicts = [found["poisoned", seed] for seed in seeds]
    lines.append(["detection", *(f"{v['malicious']}, round {v['round']}" for v in verdicts)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return the rows of the file, with numbers as numbers."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["seed"] = int(row["seed"])
        for key in ("ter", "asr", "acp"):
            row[key] = float(row[key]) if row[key] else None
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def name_of(node: str | dict[str, Any]) -> str:
    """Return the name of a recipe's recoverer in tables."""
    return node if isinstance(node, str) else node.get("label", node["class_path"])


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    rows = read(arguments.csv)
    methods = load_recipe(arguments.recipe, arguments.overrides).config["recoverers"]
    order = ["poisoned", *map(name_of, methods)]
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for seed in arguments.seeds:
            done = {row["method"] for row in rows if row["seed"] == seed}
            missing = [node for node in methods if name_of(node) not in done]
            if missing:
                overrides = [f"seed={seed}", f"name=seed-{seed}"]
                overrides.append(f"recoverers={json.dumps(missing)}")
                recipe = load_recipe(arguments.recipe, [*arguments.overrides, *overrides])
                results = run(recipe, output_dir=arguments.keep or folder, progress=False)
                found = {row["method"]: row for row in rows_of(seed, results)}
                for row in rows:
                    if row["seed"] == seed and row["method"] == "poisoned":
                        # Rows of one recording only: another one means other code.
                        now = found["poisoned"]["ter"]
                        assert abs(row["ter"] - now) < 1e-6, f"poisoned: {row['ter']}, now {now}"
                rows += [row for method, row in found.items() if method not in done]
            rows.sort(key=lambda row: (row["seed"], order.index(row["method"])))
            if arguments.csv is not None:
                write(arguments.csv, rows)
            print(f"seed {seed} done", flush=True)
    print("TER % / ASR % where there is one / ACP %\n")
    print(table(rows))


if __name__ == "__main__":
    main()
