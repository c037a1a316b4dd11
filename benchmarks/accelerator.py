"""One accelerator, or several, beside the CPU: the same numbers, and how much faster.

    python benchmarks/accelerator.py --accelerator gpu --csv accelerator.csv
    python benchmarks/accelerator.py --accelerator gpu --devices 2
    python benchmarks/accelerator.py --accelerator cpu --clients 20 --rounds 30

First it checks: the updates of a round on the accelerator are those of the CPU within 1e-5, those
on disk are those in memory, the kernel of order statistics gives the CPU's values, a short
recording and recoveries end at the same model within 1e-3, and several devices end at the same bits
as one of them. It stops there, with an error, if anything differs. Then it measures, on one device,
the median and the trimmed mean beside a copy of the updates, and the milliseconds a round of
recording, training from scratch and FedRecover, with the history in memory: 17 GB of it with 100
clients and 300 rounds, and for a while as much on disk. How several devices share the work, and
what they send each other, is for ranks.py to measure.

What it decides:

- A fifth of the clients takes nearly as long a round as all of them: the round waits for launches.
  Then CUDA graphs over a round, or a compiled step, are worth trying; otherwise they are not.
- An order statistic takes more than about five copies: a selection network of its own (as on the
  CPU, a column a thread) is worth trying in place of `torch.sort`.
- FedRecover is far from `ideal`, what training from scratch takes times the part of its updates
  that is asked for: look at estimates (torch's operations there), and at the way of rounds from
  the host's memory to the device.
- Recording on disk takes much longer than in memory: look at how rounds leave the device.
- The checks fail: a path is wrong there, and the rest has to wait.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pipeline import RULES, measure
from timing import table, write_csv
from torch import Tensor
from workloads import workload

from fedrec.aggregators import FedAvg
from fedrec.attacks import TrimAttack
from fedrec.federation import Federation
from fedrec.functional import coordinate_median, trimmed_mean
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.history import HistoryStore, LMDBHistory, MemoryHistory
from fedrec.loop import FederatedLoop
from fedrec.recoverers import FedRecover, TrainFromScratch
from fedrec.types import RunResult

CPU = torch.device("cpu")
ESTIMATORS = ("anchored", "average", "paired")


def loop_on(accelerator: str, devices: int = 1, num_shards: int | None = None) -> FederatedLoop:
    """Return a quiet loop without evaluations, and without TF32."""
    return FederatedLoop(
        accelerator=accelerator,
        devices=devices,
        num_shards=num_shards,
        enable_progress_bar=False,
        logger=False,
        eval_every=10**9,
        eval_samples=1,
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative distance in float64."""
    found, expected = found.to(CPU, torch.float64), expected.to(CPU, torch.float64)
    return float((found - expected).norm() / expected.norm())


def check(name: str, found: float, most: float) -> list[object]:
    """Return a row; stop if the difference is too large."""
    if not found <= most:
        raise SystemExit(f"{name}: relative difference {found:.2e}, more than {most:.0e}")
    return [name, "", "", "", f"{found:.1e}"]


def record(
    loop: FederatedLoop, federation: Federation, history: HistoryStore, rounds: int
) -> RunResult:
    """Record under attack, with the trimmed mean."""
    return loop.record(
        federation,
        RULES["trimmed-mean"](),
        history,
        max_rounds=rounds,
        server_lr=0.05,
        attack=TrimAttack(),
    )


def models(loop: FederatedLoop, clients: int) -> dict[str, Tensor]:
    """Return the models at the end of a short recording and of its recoveries."""
    federation, history = workload("cnn", clients), MemoryHistory()
    found = {"model after 30 rounds": record(loop, federation, history, 30).global_weights}
    for name in ESTIMATORS:
        settings = FedRecover(warmup_rounds=5, correction_period=5, final_rounds=2, estimator=name)
        again = loop.recover(federation, history, settings, federation.malicious)
        found[f"recovered model, {name}"] = again.global_weights
    return found


def updates(loop: FederatedLoop, clients: int, history: HistoryStore, rounds: int) -> Tensor:
    """Return the updates of the last of some rounds, as they were stored."""
    loop.record(workload("cnn", clients), FedAvg(), history, max_rounds=rounds, server_lr=0.05)
    return history.read_round(rounds - 1).updates


def checks(accelerator: str, clients: int) -> list[list[object]]:
    """Compare the accelerator's results with the CPU's."""
    rows, cpu, there = [], loop_on("cpu"), loop_on(accelerator)
    found = updates(there, clients, MemoryHistory(), 1)
    expected = updates(cpu, clients, MemoryHistory(), 1)
    rows.append(check("updates of a round", difference(found, expected), 1e-5))
    with tempfile.TemporaryDirectory() as folder, LMDBHistory(folder) as history:
        found = updates(there, clients, history, 10)
    expected = updates(there, clients, MemoryHistory(), 10)
    rows.append(check("updates on disk, round 9", difference(found, expected), 1e-5))
    on_cpu = models(cpu, clients)
    for name, model in models(there, clients).items():
        rows.append(check(name, difference(model, on_cpu[name]), 1e-3))
    device = there.runtime.device
    for m in (7, clients):
        sent = torch.randn(m, 139_960, generator=torch.Generator().manual_seed(0))
        for name, rule in rules(m).items():
            rows.append(
                check(f"{name} of {m}", difference(rule(sent.to(device)), rule(sent)), 1e-6)
            )
    return rows


def sharing(accelerator: str, devices: int, clients: int) -> list[list[object]]:
    """Compare the results of several devices with one's; end all processes but the first."""
    several = loop_on(accelerator, devices, num_shards=devices)
    found = models(several, clients)
    if not several.is_global_zero:
        sys.exit()
    expected = models(loop_on(accelerator, num_shards=devices), clients)
    return [
        check(f"{name}, {devices} devices and one", difference(model, expected[name]), 0.0)
        for name, model in found.items()
    ]


def rules(num_clients: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the order statistics."""
    trim = num_clients // 5
    return {"median": coordinate_median, "trimmed mean": lambda u: trimmed_mean(u, trim)}


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Return the median wall-clock time of ten calls, the device waited for."""
    found = []
    for _ in range(12):
        began = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def kernels(device: torch.device, clients: int) -> list[list[object]]:
    """Time order statistics beside a copy of the same values."""
    updates = torch.randn(clients, 139_960, device=device)
    copied = torch.empty_like(updates)
    copy = seconds_of(lambda: copied.copy_(updates), device)
    gigabytes = updates.numel() * updates.element_size() / 1e9
    rows: list[list[object]] = [["copy", 1e3 * copy, 2 * gigabytes / copy, 1.0, ""]]
    taken = choose_kernel(device, *updates.shape)
    for name, rule in rules(clients).items():
        spent = seconds_of(lambda rule=rule: rule(updates), device)  # type: ignore[misc]
        rows.append([f"{name}, {taken}", 1e3 * spent, gigabytes / spent, spent / copy, ""])
    return rows


def runs(accelerator: str, clients: int, rounds: int) -> list[list[object]]:
    """Time recording, training from scratch and recovery."""
    loop, federation, history = loop_on(accelerator), workload("cnn", clients), MemoryHistory()

    def record_on_disk() -> RunResult:
        with tempfile.TemporaryDirectory() as folder, LMDBHistory(folder) as on_disk:
            return record(loop, federation, on_disk, rounds)

    ways: dict[str, Callable[[], RunResult]] = {
        "record": lambda: record(loop, federation, history, rounds),
        "record on disk": record_on_disk,
        "train from scratch": lambda: loop.recover(
            federation, history, TrainFromScratch(), federation.malicious
        ),
    }
    for estimator in ESTIMATORS:
        ways[f"FedRecover, {estimator}"] = lambda estimator=estimator: loop.recover(
            federation, history, FedRecover(estimator=estimator), federation.malicious
        )
    rows: list[list[object]] = []
    scratch = 0.0
    for name, run in ways.items():
        _, result, seconds = measure(name, run)
        spent = 1e3 * seconds / result.rounds
        rows.append([f"{name}, {clients} clients", spent, "", "", ""])
        if name == "train from scratch":
            scratch = spent
        elif result.ledger is not None:
            rows.append([f"{name}, ideal", scratch * (1 - result.ledger.acp()), "", "", ""])
    return rows


def main() -> None:
    """Check, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="auto", help="as FederatedLoop takes it")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=300, help="56 MB of memory each, 100 clients")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows, few = [], min(arguments.clients, 20)
    if arguments.devices > 1:
        rows = sharing(arguments.accelerator, arguments.devices, few)
    device = loop_on(arguments.accelerator).runtime.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {arguments.clients} clients of the paper's CNN")
    rows += checks(arguments.accelerator, few)
    rows += kernels(device, arguments.clients)
    for clients in (arguments.clients, max(arguments.clients // 5, 5)):
        rows += runs(arguments.accelerator, clients, arguments.rounds)
    headers = ("what", "ms (a round)", "GB/s", "times a copy", "relative difference from the CPU")
    table(rows, headers)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, headers)


if __name__ == "__main__":
    main()
