"""A paper exercise, a million clients x 100 rounds x ResNet-20, and the slopes it rests on.

    python benchmarks/million.py --csv benchmarks/results/million.csv

Federations of up to 10,000 clients, a hundredth of whom take part in a round, are recorded here,
and what grows with clients and with updates is measured: memory and seconds to set up, bytes of the
manifest, seconds and bytes of an update that is recorded. The exercise multiplies these.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import table, write_csv
from workloads import Clusters

from fedrec.aggregators import FedAvg
from fedrec.federation import ClientSampler, Federation
from fedrec.history import LMDBHistory
from fedrec.loop import FederatedLoop
from fedrec.models import MLP

CLIENTS = (2_500, 5_000, 10_000)
CODECS = ("float32", "float16", "int8", "sign")
HEADERS = (
    "clients", "codec", "parameters", "updates_a_round", "set_up_seconds", "kilobytes_a_client",
    "manifest_bytes_a_client", "milliseconds_an_update", "bytes_an_update",
)  # fmt: skip
#: A CIFAR-10 ResNet-20 (He et al., 2016): parameters, and FLOPs of a forward pass of one image.
RESNET20_PARAMETERS, RESNET20_FLOPS = 272_474, 41e6


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e3


def measure(num_clients: int, codec: str, rounds: int) -> dict[str, float]:
    """Record a federation, and return what it took."""
    data = Clusters((64,), 10, num_clients, samples=4)
    data.client_datasets()
    before, began = _resident(), time.perf_counter()
    federation = Federation.from_data(data, MLP(in_features=64), batch_size=4)
    federation.test_dataset = None
    set_up = time.perf_counter() - began
    grown = (_resident() - before) / num_clients
    loop = FederatedLoop(
        accelerator="cpu", logger=False, enable_progress_bar=False, eval_every=10**6, num_threads=1
    )
    sampler = ClientSampler(fraction=0.01)
    with (
        tempfile.TemporaryDirectory() as folder,
        LMDBHistory(Path(folder) / "history", codec=codec) as history,
    ):
        result = loop.record(
            federation, FedAvg(), history, max_rounds=rounds, server_lr=0.1, sampler=sampler
        )
        size, manifest = history.num_bytes(), len(history.manifest.to_json())
    d, m = federation.layout.num_parameters, num_clients // 100
    models = 2 * 4 * d * rounds
    return {
        "clients": num_clients,
        "codec": codec,  # type: ignore[dict-item]
        "parameters": d,
        "updates_a_round": m,
        "set_up_seconds": set_up,
        "kilobytes_a_client": grown,
        "manifest_bytes_a_client": manifest / num_clients,
        "milliseconds_an_update": 1e3 * result.seconds / rounds / m,
        "bytes_an_update": (size - models) / rounds / m,
    }


def exercise() -> list[list[object]]:
    """Return what a million clients for 100 rounds would take, all of them in every round."""
    clients, rounds = 10**6, 100
    updates = clients * rounds
    rows: list[list[object]] = []
    for codec, bits in (("float32", 32), ("float16", 16), ("int8", 8), ("sign", 1)):
        total = updates * RESNET20_PARAMETERS * bits / 8
        # One NVMe disk of 2 GB/s and 8 TB a shard's machine.
        disks, seconds = math.ceil(total / 8e12), total / rounds / 2e9
        rows.append([codec, f"{total / 1e12:,.0f}", f"{disks:,}", f"{seconds:,.0f}"])
    flops = 3 * RESNET20_FLOPS * 32 * updates
    print(f"FLOPs of all updates (batches of 32): {flops:.1e}")
    print(f"on one GPU at 10 TFLOP/s sustained: {flops / 1e13 / 3600:,.0f} hours")
    return rows


def main() -> None:
    """Measure, each in a process of its own, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        clients, codec = arguments.measure
        print(json.dumps(measure(int(clients), codec, arguments.rounds)))
        return
    found = []
    for clients, codec in [(n, "float32") for n in CLIENTS] + [(CLIENTS[0], c) for c in CODECS[1:]]:
        words = [sys.executable, __file__, "--rounds", str(arguments.rounds)]
        words += ["--measure", str(clients), codec]
        output = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found.append(json.loads(output.splitlines()[-1]))
    rows = [[_short(one[h]) for h in HEADERS] for one in found]
    table(rows, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, rows, HEADERS)
    table(exercise(), ("codec", "terabytes", "disks of 8 TB", "disk seconds a round at 2 GB/s"))


def _short(value: object) -> object:
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
