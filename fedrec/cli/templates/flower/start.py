"""Try everything on this machine: a SuperLink and five SuperNodes over TLS, one an attacker.

Records a training, finds the attacker, recovers the model, and says what that has cost the clients.
Then does the same without Flower, as `fedrec run my_project.yaml` does: all numbers are equal.

    python start.py
"""

from __future__ import annotations

import argparse
import json
import logging
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from fedrec.flower import LocalFederation
from fedrec.history import LMDBHistory
from fedrec.metrics import CostLedger
from fedrec.recipe import load_recipe, run
from fedrec.report import print_costs

HERE = Path(__file__).resolve().parent
CLIENTS = [f"client-{i}" for i in range(5)]
ATTACKER = "client-3"


def main() -> int:
    """Record, detect, recover, compare."""
    parser = argparse.ArgumentParser(description="Record and recover on this machine.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the training")
    parser.add_argument("--folder", default="runs/live", help="where everything is written")
    options = parser.parse_args()
    logging.getLogger("fedrec").setLevel(logging.ERROR)
    folder, console = Path(options.folder).resolve(), Console()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - began:4.0f} s] {text}", highlight=False, markup=False)

    (folder / "master.key").write_text(f"{secrets.token_hex(32)}\n")
    (folder / "master.key").chmod(0o600)
    say("Starting a SuperLink and five SuperNodes (TLS, node authentication) ...")
    with LocalFederation(folder / "federation") as federation:
        for client_id in CLIENTS:
            federation.start_node(client_id, {"flip-labels": client_id == ATTACKER})
        (folder / "keys.json").write_text(json.dumps(federation.keys, indent=1))
        settings = {
            "folder": str(folder),
            "keys": str(folder / "keys.json"),
            "master-key": f"file:{folder / 'master.key'}",
            "num-rounds": options.rounds,
        }
        say(f"Recording {options.rounds} rounds ...")
        runs = [federation.run(HERE, {**settings, "mode": "record"})]
        found = read(folder / "detection.json")["malicious"]
        say(f"Detected: {', '.join(found) or 'nobody'}. Recovering ...")
        runs.append(federation.run(HERE, {**settings, "mode": "recover"}))
    say("Doing the same in one process, to compare ...")
    changes = [f"record.max_rounds={options.rounds}", f"recover.exclude={json.dumps(found)}"]
    recipe = load_recipe(HERE / "my_project.yaml", changes)
    rehearsed = run(recipe, folder=folder / "rehearsal", progress=False)
    ters = {
        "poisoned": read(folder / "record.json")["ter"],
        "FedRecover": read(folder / "recover.json")["ter"],
        "train from scratch": rehearsed["methods"][1]["ter"],
    }
    console.print(quality(ters))
    remaining = [client_id for client_id in CLIENTS if client_id not in found]
    ledger = CostLedger.from_csv(
        folder / "recover/FedRecover/ledger.csv", dict.fromkeys(remaining, options.rounds)
    )
    title = "What the recovery has cost the clients, and what training from scratch would have"
    print_costs(ledger, console, title=title)
    traffic = sum(run["network-traffic"]["total-bytes"] for run in runs)
    console.print(f"Flower's own count of all traffic of both runs: {traffic / 1e6:.1f} MB.")
    equal = {
        "What the clients sent": same_recording(folder, settings["master-key"]),
        "The recovered models": same_model(folder),
    }
    for what, is_equal in equal.items():
        verdict = "equal, bit for bit" if is_equal else "DIFFERENT"
        console.print(f"{what} with Flower and in one process: {verdict}.")
    return 0 if all(equal.values()) else 1


def same_recording(folder: Path, master_key: str) -> bool:
    """Return whether every update of every round is the same with Flower and without."""
    with (
        LMDBHistory(folder / "history", master_key=master_key) as live,
        LMDBHistory(folder / "rehearsal" / "history") as rehearsed,
    ):
        pairs = [(live.read_round(t), rehearsed.read_round(t)) for t in rehearsed.rounds()]
        return len(live.rounds()) == len(pairs) and all(
            a.client_ids == b.client_ids and torch.equal(a.updates, b.updates) for a, b in pairs
        )


def same_model(folder: Path) -> bool:
    """Return whether the recovered model is the same with Flower and without."""
    files = [where / "recover/FedRecover/model.ckpt" for where in (folder, folder / "rehearsal")]
    a, b = (torch.load(file, weights_only=True)["state_dict"] for file in files)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def quality(ters: Mapping[str, float]) -> Table:
    """Return the table of the models' test error rates (TER)."""
    table = Table("model", Column("TER, %", justify="right"))
    for name, ter in ters.items():
        table.add_row(name, f"{100 * ter:.1f}")
    return table


def read(path: Path) -> Any:
    """Return the JSON in a file."""
    return json.loads(path.read_text())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # all processes have ended
        sys.exit(130)
