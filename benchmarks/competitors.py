"""Every way to recover on the same recordings: what it reaches, what it costs, what it needs.

    python benchmarks/competitors.py --csv benchmarks/results/competitors.csv

Runs `recipes/benchmarks/competitors.yaml` (backdoor, FedAvg) and the same with the trim attack and
the trimmed mean. TER, ASR and ACP are fractions. Client rounds and bytes are what remaining clients
were asked for in all, bytes both ways; server seconds are those in which no client was computing.
History is the updates that a method reads at least once, in float32: what a server has to keep for
it.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import table, write_csv

from fedrec import recoverers
from fedrec.cli.quiet import quiet
from fedrec.history import LMDBHistory
from fedrec.loop import FederatedLoop
from fedrec.recipe import load_recipe, run
from fedrec.recipe.schema import folder_name
from fedrec.types import RoundRecord, RunResult

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "benchmarks" / "competitors.yaml"
TRIM = ("attack=TrimAttack", "aggregator={class_path: TrimmedMean, init_args: {trim: 0.2}}")
ATTACKS = {"backdoor": ("server_lr=0.03", ()), "trim": ("server_lr=0.02", TRIM)}
HEADERS = (
    *("attack", "method", "TER", "ASR", "ACP", "client rounds", "local steps", "client MB"),
    *("server s", "history MB", "server data"),
)


def note_reads(read: dict[str, set[tuple[int, str]]]) -> None:
    """Have the rounds and clients that each recovery reads written down, by its name."""
    recover, read_round = FederatedLoop.recover, LMDBHistory.read_round
    current: set[tuple[int, str]] = set()

    def noted_recover(*args: Any, name: str, **kwargs: Any) -> RunResult:
        nonlocal current
        current = read[name] = set()
        return recover(*args, name=name, **kwargs)

    def noted_read(
        self: LMDBHistory, t: int, client_ids: Sequence[str] | None = None
    ) -> RoundRecord:
        record = read_round(self, t, client_ids)
        current.update((t, client_id) for client_id in record.client_ids)
        return record

    FederatedLoop.recover, LMDBHistory.read_round = noted_recover, noted_read  # type: ignore


def row(
    attack: str, method: dict[str, Any], folder: Path, num_read: int, num_parameters: int
) -> list[object]:
    """Return what is known of one recovery."""
    name = method["name"]
    cls = getattr(recoverers, name.split(",")[0].split()[0])
    with (folder / "recover" / folder_name(name) / "ledger.csv").open(newline="") as file:
        asked = list(csv.DictReader(file))
    return [
        *(attack, name, f"{method['ter']:.4f}"),
        "" if method["asr"] is None else f"{method['asr']:.4f}",
        "" if method["acp"] is None else f"{method['acp']:.3f}",
        *(len(asked), sum(int(line["local_steps"]) for line in asked)),
        f"{method['client_bytes'] / 1e6:.0f}",
        f"{method['seconds'] - sum(method['client_seconds'].values()):.1f}",
        f"{num_read * num_parameters * 4 / 1e6:.0f}",
        "yes" if cls.needs_server_data else "no",
    ]


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    read: dict[str, set[tuple[int, str]]] = {}
    note_reads(read)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for attack, (server_lr, changes) in ATTACKS.items():
            overrides = [f"name={attack}", f"record.{server_lr}", *changes, *arguments.overrides]
            results = run(load_recipe(RECIPE, overrides), output_dir=folder, progress=False)
            path = Path(folder) / attack
            size = results["history"]["bytes"] / 1e9
            rows.append(
                [
                    attack,
                    "poisoned",
                    *(
                        f"{v:.4f}" if v is not None else ""
                        for v in (results["poisoned"]["ter"], results["poisoned"]["asr"])
                    ),
                    *[""] * 7,
                ]
            )
            with LMDBHistory(path / "history") as history:
                d = history.manifest.num_parameters
            rows += [
                row(attack, method, path, len(read[folder_name(method["name"])]), d)
                for method in results["methods"]
            ]
            print(f"{attack}: a history of {size:.1f} GB")
    table(rows, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
