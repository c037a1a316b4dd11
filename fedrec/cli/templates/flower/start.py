"""Try everything on this machine: a SuperLink and five SuperNodes over TLS, one an attacker.

Records a training, finds the attacker, recovers the model, and says what that has cost the clients.
Then does the same without Flower, in one process: the models are equal, bit for bit.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from my_project import TRAINING, make_data, make_module  # noqa: E402
from my_project_server import METHOD, SERVER_LR  # noqa: E402

from fedrec import FederatedLoop, Federation  # noqa: E402
from fedrec.aggregators import FedAvg  # noqa: E402
from fedrec.attacks import LabelFlip  # noqa: E402
from fedrec.flower import LocalFederation  # noqa: E402
from fedrec.history import MemoryHistory  # noqa: E402
from fedrec.recoverers import TrainFromScratch  # noqa: E402

CLIENTS = [f"client-{i}" for i in range(5)]
ATTACKER = "client-3"


def main() -> int:
    """Record, detect, recover, compare."""
    parser = argparse.ArgumentParser(description="Record and recover on this machine.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the training")
    parser.add_argument("--folder", default="runs", help="where everything is written")
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
    simulated = simulate(options.rounds, found)
    results = {name: read(folder / f"{name}.json") for name in ("record", "recover")}
    console.print(quality(results, simulated, options.rounds))
    console.print(spent(results["recover"]["costs"]["by_client"], options.rounds))
    traffic = sum(run["network-traffic"]["total-bytes"] for run in runs)
    console.print(f"Flower's own count of all traffic of both runs: {traffic / 1e6:.1f} MB.")
    equal = True
    for name in ("record", "recover"):
        live = torch.load(folder / f"{name}.pt", weights_only=True)
        same = torch.equal(live, simulated[name].global_weights)
        equal = equal and same
        verdict = "equal, bit for bit" if same else "DIFFERENT"
        console.print(f"{name}: the model of Flower and that of one process are {verdict}.")
    return 0 if equal else 1


def simulate(num_rounds: int, excluded: Sequence[str]) -> dict[str, Any]:
    """Do the same in one process, and train from scratch."""
    federation = Federation.from_data(make_data(), make_module(), malicious=[ATTACKER], **TRAINING)
    loop = FederatedLoop(executor="sequential", logger=False, enable_progress_bar=False)
    history, attack = MemoryHistory(), LabelFlip(num_classes=10)
    recorded = loop.record(
        federation, FedAvg(), history, max_rounds=num_rounds, server_lr=SERVER_LR, attack=attack
    )
    results = {"record": recorded}
    for name, method in (("recover", METHOD), ("scratch", TrainFromScratch())):
        results[name] = loop.recover(federation, history, method, excluded)
    scratch = loop.test(federation, results["scratch"].global_weights)
    return {**results, "scratch_ter": scratch["ter"]}


def quality(results: Mapping[str, Any], simulated: Mapping[str, Any], num_rounds: int) -> Table:
    """Return the table of the models, and what the remaining clients did for them."""
    costs = results["recover"]["costs"]["by_client"]
    requests, size, seconds = (sum(c[k] for c in costs.values()) for k in range(3))
    scratch = len(costs) * num_rounds
    table = Table(title="Models")
    for column in ("model", "TER, %", "requests", "MB", "client seconds", "saved, %"):
        table.add_column(column, justify="left" if column == "model" else "right")
    each = (size / requests, seconds / requests)
    for name, ter, number in (
        ("poisoned", results["record"]["ter"], None),
        ("FedRecover", results["recover"]["ter"], requests),
        ("train from scratch *", simulated["scratch_ter"], scratch),
    ):
        cells = [""] * 4
        if number is not None:
            cells = [str(number), f"{number * each[0] / 1e6:.2f}", f"{number * each[1]:.1f}"]
            cells.append(f"{100 * (1 - number / scratch):.0f}")
        table.add_row(name, f"{100 * ter:.1f}", *cells)
    table.caption = "* computed in one process; its costs from what a request has cost here"
    return table


def spent(by_client: Mapping[str, Any], num_rounds: int) -> Table:
    """Return the table of what the recovery has cost each client."""
    table = Table(title="The recovery, by client")
    for column in ("client", "rounds asked", "kB", "seconds"):
        table.add_column(column, justify="left" if column == "client" else "right")
    for client_id, (requests, size, seconds) in by_client.items():
        table.add_row(
            client_id, f"{requests} of {num_rounds}", f"{size / 1e3:.0f}", f"{seconds:.2f}"
        )
    return table


def read(path: Path) -> Any:
    """Return the JSON in a file."""
    return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
