"""A small real federation that counts the calls of its clients in a file."""

from collections.abc import Callable
from pathlib import Path

import torch

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import Digits
from fedrec.detectors import FLDetector
from fedrec.history import HistoryStore
from fedrec.models import MLP
from fedrec.recoverers import FedRecover
from fedrec.types import RunResult

ROUNDS = 60
CLIENTS = 6


class CountingClient(LightningClient):
    """Writes one byte per call, so that calls of killed processes count too, and says so."""

    log: Path
    say: Callable[[object], None]

    def local_update(self, global_weights, ctx):
        with self.log.open("ab") as file:
            file.write(b".")
        type(self).say("call")
        return super().local_update(global_weights, ctx)


def federation() -> Federation:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = MLP(in_features=64, hidden=(8,))
    data = Digits(num_clients=CLIENTS)
    clients = [
        CountingClient(client_id, module, samples, batch_size=8)
        for client_id, samples in data.client_datasets().items()
    ]
    ids = [c.client_id for c in clients]
    return Federation(clients, module, test_dataset=data.test_dataset, malicious=ids[:1])


def loop(folder: Path | None) -> FederatedLoop:
    return FederatedLoop(
        accelerator="cpu",
        enable_progress_bar=False,
        default_root_dir=folder,
        checkpoint_every=0.0,
        seed=3,
    )


def record(history: HistoryStore, folder: Path | None) -> RunResult:
    return loop(folder).record(
        federation(),
        TrimmedMean(trim=1),
        history,
        max_rounds=ROUNDS,
        server_lr=0.2,
        attack=TrimAttack(),
        detector=FLDetector(),
        resume=True,
    )


def recover(history: HistoryStore, folder: Path | None) -> RunResult:
    clients = federation()
    recoverer = FedRecover(
        warmup_rounds=5, correction_period=3, final_rounds=3, tolerance_rate=1e-3
    )
    return loop(folder).recover(
        clients,
        history,
        recoverer,
        clients.malicious,
        attack=TrimAttack(),
        resume=folder is not None,
    )
