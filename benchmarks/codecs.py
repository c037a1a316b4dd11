"""Bytes, error and speed of every codec on gradients of real training.

    FEDREC_DATA=... python benchmarks/codecs.py --csv benchmarks/results/codecs.csv

The paper's CNN and a network with tanh are trained on MNIST (`--digits`: on the bundled digits),
ten clients; the updates of early and late rounds are encoded and decoded, those of attackers apart
(`--malicious 2`, the trim attack). Rates are GB of float32 a second, side by side in one process,
median of the repeats; a plain copy is among them. `--repeats 0` leaves them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timing import interleave, median, table, write_csv

from fedrec.aggregators import FedAvg, TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import MNIST, Digits
from fedrec.federation import Federation
from fedrec.history import MemoryHistory
from fedrec.history.codecs import CODECS, Codec
from fedrec.history.codecs.rows import map_rows
from fedrec.loop import FederatedLoop
from fedrec.models import CNN, MLP
from fedrec.types import RoundRecord

HEADERS = (
    *(
        "model",
        "seed",
        "rows",
        "round",
        "zeros",
        "codec",
        "bytes/parameter",
        "smaller by",
        "rel. L2 error",
    ),
    *("encode GB/s", "decode GB/s", "encode GB/s, threads", "decode GB/s, threads"),
)


class SomeRounds(MemoryHistory):
    """A history that keeps the updates of some rounds and forgets the rest."""

    def __init__(self, wanted: list[int]) -> None:
        super().__init__()
        self.wanted, self.kept, self.count = wanted, {}, 0

    def write_round(self, record: RoundRecord) -> None:
        if record.round in self.wanted:
            self.kept[record.round] = record.updates.numpy().copy()
        self.count += 1

    def rounds(self) -> range:
        return range(self.count)


def gradients(
    model: str, rounds: list[int], digits: bool, seed: int, malicious: int
) -> tuple[dict[int, NDArray[np.float32]], list[bool]]:
    """Train; return the updates (m, d) of these rounds, and which rows are attackers'."""
    torch.manual_seed(seed)
    side = 8 if digits else 28
    data = (Digits if digits else MNIST)(num_clients=10, seed=seed)
    tanh = MLP(in_features=side * side, hidden=(100, 100), activation="tanh")
    module = tanh if model == "tanh" or digits else CNN()
    history = SomeRounds(rounds)
    federation = Federation.from_data(data, module, batch_size=32, malicious=malicious, seed=seed)
    FederatedLoop(logger=False, enable_progress_bar=False, num_threads=1, seed=seed).record(
        federation,
        TrimmedMean(trim=malicious) if malicious else FedAvg(),
        history,
        attack=TrimAttack() if malicious else None,
        max_rounds=max(rounds) + 1,
        server_lr=0.02,
    )
    return history.kept, [c in federation.malicious for c in federation.client_ids]


def measure(
    updates: NDArray[np.float32], repeats: int
) -> dict[str, tuple[float, float, list[float]]]:
    """Return bytes a parameter, relative error and four rates by codec."""
    rows, out = list(updates), np.zeros_like(updates)
    payloads: dict[str, list[Any]] = {}
    functions: dict[str, Callable[[], object]] = {"copy": partial(np.copyto, out, updates)}

    def decode(codec: Codec, k: int) -> None:
        codec.decode(memoryview(payloads[codec.name][k]), out[k])

    found = {}
    for name, codec in CODECS.items():
        payloads[name] = [codec.encode(row).payload for row in rows]
        for k in range(len(rows)):
            decode(codec, k)
        error = np.linalg.norm(out - updates) / np.linalg.norm(updates)
        found[name] = (sum(map(len, payloads[name])) / updates.size, float(error), [])
        # One thread if there is next to nothing to do, as many as there are processors otherwise.
        for threads, num_bytes in (("one", 0), ("all", updates.nbytes)):
            functions[f"{name} encode {threads}"] = partial(map_rows, codec.encode, rows, num_bytes)
            functions[f"{name} decode {threads}"] = partial(
                map_rows, partial(decode, codec), range(len(rows)), num_bytes
            )
    if not repeats:
        return found
    seconds = {k: median(v) for k, v in interleave(functions, repeats=repeats).items()}
    rate = {k: updates.nbytes / s / 1e9 for k, s in seconds.items()}
    for name in CODECS:
        found[name][2].extend(
            rate[f"{name} {way} {threads}"]
            for threads in ("one", "all")
            for way in ("encode", "decode")
        )
    found["copy"] = (4.0, 0.0, [rate["copy"]] * 4)
    return found


def main() -> None:
    """Train, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["CNN", "tanh"])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--malicious", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--digits", action="store_true", help="without MNIST: tanh on digits only")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    lines: list[list[object]] = []
    for model in ["tanh"] if arguments.digits else arguments.models:
        by_round, attackers = gradients(
            model, arguments.rounds, arguments.digits, arguments.seed, arguments.malicious
        )
        for (t, updates), attacked in product(sorted(by_round.items()), sorted(set(attackers))):
            some = updates[np.array(attackers) == attacked]
            rows = "attackers" if attacked else "benign"
            zeros = f"{100 * np.mean(some == 0):.0f}%"
            for name, (size, error, rates) in measure(some, arguments.repeats).items():
                what = [model, arguments.seed, rows, t, zeros, name]
                lines.append([*what, f"{size:.3f}", 4 / size, error, *(rates or [""] * 4)])
    table(lines, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, lines, HEADERS)


if __name__ == "__main__":
    main()
