"""Draw test error by round for every method of a run, as a small SVG.

python benchmarks/figure.py runs/quickstart docs/assets/quickstart.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

from fedrec.loop.logs import read_metrics
from fedrec.recipe.schema import folder_name

COLOURS = ("#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9")


def main() -> None:
    """Read the run folder, draw, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("svg", type=Path)
    parser.add_argument("--figure", choices=("ter", "asr"), default="ter")
    arguments = parser.parse_args()
    results = json.loads((arguments.run / "results.json").read_text())
    mpl.rcParams.update({"svg.hashsalt": "fedrec", "font.size": 9})
    figure, axes = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
    curves = [("poisoned", arguments.run / "record" / "metrics.csv", "0.55", ":")]
    for method, colour in zip(results["methods"], COLOURS, strict=False):
        path = arguments.run / "recover" / folder_name(method["name"]) / "metrics.csv"
        style = "--" if method["name"] == "TrainFromScratch" else "-"
        curves.append((method["name"], path, colour, style))
    for label, path, colour, style in curves:
        rows = [row for row in read_metrics(path) if arguments.figure in row]
        xs, ys = zip(
            *((row["round"] + 1, 100 * row[arguments.figure]) for row in rows), strict=True
        )
        axes.plot(xs, ys, style, color=colour, label=label, linewidth=1.6)
    axes.set(
        xlabel="round", ylabel=f"{arguments.figure.upper()}, %", ylim=(0, None), xlim=(0, None)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    arguments.svg.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()
