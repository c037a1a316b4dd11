"""FedRecover's estimators at several learning rates and numbers of rounds, on the bundled digits.

    python benchmarks/learning_rates.py --csv benchmarks/results/learning_rates.csv

5 clients of which one flips labels and is excluded, batches of 32, FedAvg, a network with one
hidden layer; clients are asked in the first 20 rounds, in every tenth and in the last 5. TER in
percent, one row per learning rate, number of rounds and seed. It takes three minutes on one core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import table, write_csv

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.attacks import LabelFlip
from fedrec.cli.quiet import quiet
from fedrec.data import Digits
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover, Recoverer, TrainFromScratch

METHODS: dict[str, Recoverer] = {
    "scratch": TrainFromScratch(),
    "paired": FedRecover(estimator="paired"),
    "anchored": FedRecover(estimator="anchored"),
    "average": FedRecover(estimator="average"),
}


def measure(server_lr: float, max_rounds: int, seed: int) -> list[float]:
    """Record once, recover by every method, and return their TERs in percent."""
    torch.manual_seed(seed)
    data, model = Digits(num_clients=5, seed=seed), MLP(in_features=64)
    federation = Federation.from_data(data, model, malicious=1, batch_size=32, seed=seed)
    rarely = {"enable_progress_bar": False, "eval_every": max_rounds}
    loop = FederatedLoop(seed=seed, logger=False, num_threads=1, **rarely)
    history, attack = MemoryHistory(), LabelFlip(num_classes=10)
    settings = {"max_rounds": max_rounds, "server_lr": server_lr}
    loop.record(federation, FedAvg(), history, attack=attack, **settings)
    found = []
    for method in METHODS.values():
        result = loop.recover(federation, history, method, federation.malicious)
        found.append(100 * loop.test(federation, result.global_weights)["ter"])
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5])
    parser.add_argument("--rounds", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    with quiet():
        for server_lr in arguments.learning_rates:
            for max_rounds in arguments.rounds:
                for seed in arguments.seeds:
                    ters = measure(server_lr, max_rounds, seed)
                    rows.append([server_lr, max_rounds, seed, *(f"{ter:.1f}" for ter in ters)])
    headers = ["server_lr", "rounds", "seed", *METHODS]
    table(rows, headers)
    if arguments.csv:
        write_csv(arguments.csv, rows, headers)


if __name__ == "__main__":
    main()
