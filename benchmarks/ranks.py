"""Several processes for one run: rounds per second, bytes that travel, memory, and efficiency.

    python benchmarks/ranks.py --csv benchmarks/results/ranks.csv
    python benchmarks/ranks.py --accelerator cuda --rounds 50      # on two GPUs

Every line of the table is a recording of its own on disk, or its recovery by FedRecover, which asks
the clients in three rounds and estimates all others; one thread a process, evaluation off. Nobody
is asked for abnormal estimates: in so short a recovery they would be in every round, for which one
rank would wait.
`independent` are processes with one device each that know nothing of each other, side by side, with
as many clients each as a rank has: what several ranks could reach at best, but for a rule whose
work grows with the square of clients. The efficiency of two ranks is their rate over the mean rate
of these. The other one is of the processor's seconds that a round takes a process, which say more
on a busy machine, but nothing of waiting for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timing import table, write_csv
from workloads import workload

from fedrec.aggregators import Aggregator, FedAvg, Krum, TrimmedMean
from fedrec.federation import ClientSampler
from fedrec.history import ShardedHistory
from fedrec.loop import FederatedLoop
from fedrec.recoverers import FedRecover
from fedrec.types import RunResult

RULES: dict[str, Callable[[], Aggregator]] = {
    "FedAvg (sums)": FedAvg,
    "TrimmedMean (columns)": lambda: TrimmedMean(trim=0.2),
    "Krum (gram)": lambda: Krum(num_byzantine=0.2),
}
# Network, clients, fraction of them in a round, samples a batch, rounds.
WORKLOADS: dict[str, tuple[str, int, float, int, int]] = {
    "CNN, 100 clients": ("cnn", 100, 1.0, 32, 20),
    "MLP, 1,000 clients, a tenth a round": ("mlp", 1000, 0.1, 32, 100),
}
RECOVERED = "CNN, 100 clients"  # everybody takes part in every round, so that all have estimates
WARMUP = 3
SHARDS = 8
HEADERS = (
    "workload", "rule", "what", "processes", "rounds_per_second", "cpu_seconds_a_round_and_rank",
    "megabytes_sent_a_round_and_rank", "peak_megabytes_a_rank", "efficiency", "cpu_efficiency",
)  # fmt: skip


def measure(
    name: str, rule: str, devices: int, share: int, folder: Path, *, rounds: int, accelerator: str
) -> None:
    """Record, and write what it took to a file; `share` divides the number of clients."""
    kind, num_clients, fraction, batch_size, _ = WORKLOADS[name]
    loop = FederatedLoop(
        accelerator=accelerator, devices=devices, num_shards=SHARDS // share, num_threads=1,
        logger=False, enable_progress_bar=False, eval_every=10**6, seed=0,
    )  # fmt: skip
    federation = workload(kind, num_clients // share, malicious=0.0, batch_size=batch_size)
    federation.test_dataset = None
    sampler = None if fraction == 1 else ClientSampler(fraction=fraction)
    given: dict[str, Any] = {"server_lr": 0.01, "sampler": sampler}
    with ShardedHistory(folder / "warm") as history:
        loop.record(federation, RULES[rule](), history, max_rounds=2, **given)
    found = {}
    with ShardedHistory(folder / "history") as history:
        found["record"] = _timed(
            loop,
            lambda: loop.record(federation, RULES[rule](), history, max_rounds=rounds, **given),
        )
        if name == RECOVERED:
            method = FedRecover(
                warmup_rounds=WARMUP, correction_period=None, tolerance_rate=None, final_rounds=0
            )
            left_out = federation.client_ids[: num_clients // share // 20]
            found["recover"] = _timed(
                loop, lambda: loop.recover(federation, history, method, left_out)
            )
    if loop.is_global_zero:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _timed(loop: FederatedLoop, go: Callable[[], RunResult]) -> dict[str, float]:
    """Return what a run takes; the peak is that of the process so far."""
    ranks, began = loop.runtime.ranks, resource.getrusage(resource.RUSAGE_SELF)
    before = ranks.sent_bytes
    result = go()
    ended = resource.getrusage(resource.RUSAGE_SELF)
    spent = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    every = ranks.gather((ranks.sent_bytes - before, spent, ended.ru_maxrss / 1e3))
    sent, seconds, peaks = zip(*every, strict=True)
    return {
        "rate": result.rounds / result.seconds,
        "cpu": sum(seconds) / len(every) / result.rounds,
        "sent": sum(sent) / len(every) / result.rounds / 1e6,
        "peak": max(peaks),
    }


def run(
    name: str, rule: str, processes: Sequence[tuple[int, int]], options: Sequence[str]
) -> list[Any]:
    """Run recordings side by side, each with (devices, share); return what they took."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for i, (devices, share) in enumerate(processes):
            own = Path(folder) / str(i)
            own.mkdir()
            words = [sys.executable, __file__, *options]
            words += ["--measure", name, rule, devices, share, own]
            environment = {k: v for k, v in os.environ.items() if k != "LOCAL_RANK"}
            started.append((subprocess.Popen(list(map(str, words)), env=environment), own))
        for process, _ in started:
            if process.wait() != 0:
                raise SystemExit(f"{name}, {rule} failed")
        return [json.loads((own / "found.json").read_text()) for _, own in started]


def main() -> None:
    """Measure all lines, print them, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="of every workload; by default its own")
    parser.add_argument("--accelerator", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, rule, devices, share, folder = arguments.measure
        measure(
            name,
            rule,
            int(devices),
            int(share),
            Path(folder),
            rounds=arguments.rounds,
            accelerator=arguments.accelerator,
        )
        return
    rows: list[list[object]] = []
    for name, (*_, own_rounds) in WORKLOADS.items():
        if arguments.workload not in (None, name):
            continue
        options = ["--rounds", str(arguments.rounds or own_rounds)]
        options += ["--accelerator", arguments.accelerator]
        for rule in RULES:
            one = run(name, rule, [(1, 1)], options)[0]
            two = run(name, rule, [(2, 1)], options)[0]
            alone = run(name, rule, [(1, 2), (1, 2)], options)
            for what in one:
                best = {k: sum(found[what][k] for found in alone) / 2 for k in ("rate", "cpu")}
                faster = two[what]["rate"] / best["rate"], best["cpu"] / two[what]["cpu"]
                for processes, found, efficiency in (
                    ("1", one[what], ("", "")),
                    ("2 ranks", two[what], tuple(f"{x:.2f}" for x in faster)),
                    ("2 independent", {**alone[0][what], **best}, ("1", "1")),
                ):
                    rows.append(
                        [name, rule, what, processes, round(found["rate"], 2),
                         round(found["cpu"], 3), round(found["sent"], 2), round(found["peak"]),
                         *efficiency]
                    )  # fmt: skip
    table(rows, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
