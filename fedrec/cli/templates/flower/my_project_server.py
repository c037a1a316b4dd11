"""The server's side: records the training, or recovers from the recording."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from my_project import make_data, make_module

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.detectors import CosineOutlier
from fedrec.flower import FlowerExecutor
from fedrec.history import LMDBHistory
from fedrec.recoverers import FedRecover
from fedrec.report import write_costs
from fedrec.types import RunResult

app = ServerApp()

SERVER_LR = 0.5
METHOD = FedRecover(warmup_rounds=4, correction_period=10, final_rounds=1)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Record the training and look for attackers, or recover without them."""
    config: dict[str, Any] = dict(context.run_config)
    folder = Path(config["folder"])
    keys = json.loads(Path(config["keys"]).read_text()) if config["keys"] else None
    executor = FlowerExecutor(grid, timeout=config["timeout"], keys=keys)
    loop = FederatedLoop(
        executor=executor,
        default_root_dir=folder,
        enable_progress_bar=False,
    )
    work = {"record": record, "recover": recover}[config["mode"]]
    with LMDBHistory(folder / "history", master_key=config["master-key"] or None) as history:
        result = work(loop, executor, history, config)
        torch.save(result.global_weights, folder / f"{config['mode']}.pt")


def record(
    loop: FederatedLoop, executor: FlowerExecutor, history: LMDBHistory, config: dict[str, Any]
) -> RunResult:
    """Train and record; at the end, look for attackers."""
    module = make_module()
    clients = executor.join(module, num_clients=config["num-clients"])
    federation = Federation(clients, module, test_dataset=make_data().test_dataset)
    result = loop.record(
        federation,
        FedAvg(),
        history,
        max_rounds=config["num-rounds"],
        server_lr=SERVER_LR,
        on_bad_update="drop",  # a client that is away or fails misses the round
        resume=True,
    )
    detection = CosineOutlier().detect(history)
    write(config, "detection", {"malicious": list(detection.malicious), "scores": detection.scores})
    report(config, loop, federation, "record", result)
    return result


def recover(
    loop: FederatedLoop, executor: FlowerExecutor, history: LMDBHistory, config: dict[str, Any]
) -> RunResult:
    """Recover without the clients that were found."""
    found = json.loads((Path(config["folder"]) / "detection.json").read_text())
    excluded = found["malicious"]
    module = make_module()
    remaining = [c for c in history.manifest.clients if c not in excluded]
    clients = executor.join(module, client_ids=remaining)
    federation = Federation(clients, module, test_dataset=make_data().test_dataset)
    result = loop.recover(federation, history, METHOD, excluded, on_bad_update="drop", resume=True)
    report(config, loop, federation, "recover", result)
    if result.ledger is not None:
        write_costs(result.ledger, Path(config["folder"]) / "costs.html")
    return result


def report(
    config: dict[str, Any],
    loop: FederatedLoop,
    federation: Federation,
    name: str,
    result: RunResult,
) -> None:
    """Write what came out."""
    tested = loop.test(federation, result.global_weights)
    write(config, name, {"ter": tested["ter"], "rounds": result.rounds})


def write(config: dict[str, Any], name: str, value: dict[str, Any]) -> None:
    """Write a file of results."""
    (Path(config["folder"]) / f"{name}.json").write_text(json.dumps(value, indent=1))
