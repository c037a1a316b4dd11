"""Run by a test: records in Flower's simulation, and says whether one process does the same."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.flower import FlowerExecutor, make_client_app
from fedrec.history import MemoryHistory
from fedrec.recoverers import FedRecover

sys.path.insert(0, str(Path(__file__).parent / "app"))
from tried_client import make_data, make_module

METHOD = FedRecover(warmup_rounds=3, correction_period=2, final_rounds=1)
app = make_client_app(make_module, make_data, batch_size=32)
server_app = ServerApp()


def run(executor: FlowerExecutor | str, federation: Federation) -> list[torch.Tensor]:
    """Record and recover; return the weights of both."""
    loop = FederatedLoop(executor=executor, logger=False, enable_progress_bar=False)
    history = MemoryHistory()
    recorded = loop.record(federation, FedAvg(), history, max_rounds=6, server_lr=0.5)
    recovered = loop.recover(federation, history, METHOD, ["client-5"])
    return [recorded.global_weights, recovered.global_weights]


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Do the same with Flower's clients and without."""
    executor, module = FlowerExecutor(grid), make_module()
    clients = executor.join(module, num_clients=6)
    live = run(executor, Federation(clients, module))
    here = run("sequential", Federation.from_data(make_data(), make_module(), batch_size=32))
    sys.stdout.write(f"{[torch.equal(a, b) for a, b in zip(live, here, strict=True)]}\n")


if __name__ == "__main__":
    quiet = {"init_args": {"log_to_driver": False, "logging_level": "error"}}
    run_simulation(server_app, app, num_supernodes=6, backend_config=quiet)
