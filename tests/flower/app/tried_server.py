"""The server of the tests: records or recovers, and writes what came out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from tried_client import make_module

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.flower import FlowerExecutor
from fedrec.history import LMDBHistory
from fedrec.recoverers import FedRecover

app = ServerApp()
METHOD = FedRecover(warmup_rounds=3, correction_period=3, final_rounds=1)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Record or recover."""
    config = context.run_config
    folder = Path(str(config["folder"]))
    (folder / "server.pid").write_text(str(os.getpid()))
    keys = json.loads((folder / "keys.json").read_text())
    executor = FlowerExecutor(
        grid,
        timeout=float(config["timeout"]),
        reconnect=float(config["reconnect"]),
        keys=keys,
    )
    module = make_module()
    clients = executor.join(module, client_ids=str(config["clients"]).split("+"), timeout=1200)
    federation = Federation(clients, module)
    loop = FederatedLoop(executor=executor, default_root_dir=folder, enable_progress_bar=False)
    with LMDBHistory(folder / "history") as history:
        if config["mode"] == "record":
            result = loop.record(
                federation,
                FedAvg(),
                history,
                max_rounds=int(config["rounds"]),
                server_lr=0.5,
                on_bad_update="drop",
                resume=True,
            )
        else:
            excluded = [c for c in history.manifest.clients if c not in federation.client_ids]
            result = loop.recover(
                federation, history, METHOD, excluded, on_bad_update="drop", resume=True
            )
    torch.save(result.global_weights, folder / f"{config['mode']}.pt")
