"""Run by several processes: a recording or a recovery on disk, in which something may go wrong.

    python ranks_run.py DEVICES FOLDER STEP [FAULT RANK ROUND]

STEP is `record`, `recover` or `record,recover`; FAULT, in the last step, is `kill`, `hang` or
`raise`; `write` or `remove` for a kill before the rank's part of the checkpoint before ROUND is
written, or that of the one before is removed; or, in all, `guard` for data that only the rank of
their client may read. What a step comes to is written to FOLDER/STEP.txt.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from fedrec import FederatedLoop, Federation, LightningClient
from fedrec.aggregators import TrimmedMean
from fedrec.callbacks import Callback
from fedrec.data import Digits
from fedrec.history import ShardedHistory
from fedrec.loop import recovery
from fedrec.loop.checkpoint import ShardFiles
from fedrec.models import MLP
from fedrec.recoverers import FedRecover

ROUNDS = 12


class _Fault(Callback):
    """Kills, or stops, this process before a round."""

    def __init__(self, fault: str, at_round: int) -> None:
        self.fault, self.at_round = fault, at_round

    def on_round_start(self, loop, ctx):
        if ctx.round == self.at_round:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1)


class _KilledSaving(ShardFiles):
    """Files of shards; before a checkpoint's are written, or others are removed, it ends."""

    at_round = -1
    at_step = ""
    saving = -1

    def write(self, states, next_round):
        self.saving = next_round
        self._end("write")
        return super().write(states, next_round)

    def remove(self, all_but=None):
        self._end("remove")
        super().remove(all_but)

    def _end(self, step):
        if step == self.at_step and self.saving == self.at_round:
            time.sleep(1)  # others are done with theirs
            os.kill(os.getpid(), signal.SIGKILL)


class _Failing(LightningClient):
    at_round = -1

    def local_update(self, global_weights, ctx):
        if ctx.round == self.at_round:
            raise ValueError("the data are gone")
        return super().local_update(global_weights, ctx)


class _Guarded(Dataset):
    """Samples that can be read where they belong."""

    def __init__(self, samples, is_here):
        self.samples, self.is_here = samples, is_here

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        assert self.is_here, "data of another rank's client were read"
        return self.samples[index]


def _arm(
    loop: FederatedLoop, clients: list[_Failing], fault: str, rank: int, at_round: int
) -> None:
    if fault == "raise":
        clients[-1].at_round = at_round  # of the last shard, and so of the last rank
    elif fault in ("write", "remove") and loop.runtime.ranks.rank == rank:
        _KilledSaving.at_step, _KilledSaving.at_round = fault, at_round
        recovery.ShardFiles = _KilledSaving
    elif fault in ("kill", "hang") and loop.runtime.ranks.rank == rank:
        loop.callbacks.append(_Fault(fault, at_round))


def main(devices: int, folder: Path, step: str, fault: str, rank: int, at_round: int) -> None:
    loop = FederatedLoop(
        accelerator="cpu", devices=devices, num_shards=4, logger=False, enable_progress_bar=False,
        eval_every=6, timeout=5, checkpoint_every=0, default_root_dir=folder / "run",
    )  # fmt: skip
    torch.manual_seed(0)
    data, module = Digits(num_clients=8), MLP(in_features=64)
    clients = [
        _Failing(client_id, module, samples, batch_size=8)
        for client_id, samples in data.client_datasets().items()
    ]
    if fault == "guard":
        half, first = len(clients) // 2, loop.is_global_zero
        for i, client in enumerate(clients):
            client.dataset = _Guarded(client.dataset, (i < half) == first)
    federation = Federation(clients, module, test_dataset=data.test_dataset, malicious=["client-0"])
    history = ShardedHistory(folder / "history")
    steps = step.split(",")
    for each in steps:
        if each == steps[-1]:
            _arm(loop, clients, fault, rank, at_round)
        if each == "record":
            rule = TrimmedMean(trim=0.2)
            result = loop.record(
                federation, rule, history, max_rounds=ROUNDS, server_lr=0.2, resume=True
            )
        else:
            method = FedRecover(warmup_rounds=3, correction_period=4, final_rounds=1)
            result = loop.recover(federation, history, method, federation.malicious, resume=True)
        if loop.is_global_zero:
            digest = hashlib.sha256(result.global_weights.numpy().tobytes()).hexdigest()
            (folder / f"{each}.txt").write_text(digest, encoding="utf-8")
    history.close()


if __name__ == "__main__":
    given = [*sys.argv[1:], *["", "-1", "-1"][len(sys.argv) - 4 :]]
    main(int(given[0]), Path(given[1]), given[2], given[3], int(given[4]), int(given[5]))
