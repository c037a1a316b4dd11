"""What a codec costs FedRecover in accuracy: one recording per seed, recovered from every codec.

    FEDREC_DATA=... python benchmarks/codec_accuracy.py --seeds 0 1 2

The settings of `recipes/mnist/coffee_break_trim.yaml`: MNIST on 20 clients, 4 of them with the trim
attack, a trimmed mean, a network with one hidden layer. The malicious clients are known. The
recording is made once per seed and written with every codec (a recording does not depend on it),
so that all else is the same. Errors are those of all updates of the middle
round, relative, in the L2 norm. TER and ACP are fractions.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from timing import table, write_csv

from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import MNIST, DegreeOfNonIID
from fedrec.federation import Federation
from fedrec.history import LMDBHistory, MemoryHistory
from fedrec.history.codecs import CODECS
from fedrec.loop import FederatedLoop
from fedrec.models import MLP
from fedrec.recoverers import FedRecover, TrainFromScratch

HEADERS = ("seed", "codec", "TER", "ACP", "bytes/parameter", "rel. L2 error", "estimates")


def rows_of(seed: int, codecs: list[str], arguments: argparse.Namespace) -> list[list[object]]:
    """Record, then recover from every codec; return a row for each."""
    data = MNIST(num_clients=20, partitioner=DegreeOfNonIID(q=0.5), seed=seed)
    torch.manual_seed(seed)
    federation = Federation.from_data(
        data, MLP(in_features=784, hidden=[100]), malicious=4, batch_size=8, seed=seed
    )
    loop = FederatedLoop(
        logger=False, enable_progress_bar=False, eval_every=10**9, eval_samples=1, seed=seed
    )
    attack, exclude = TrimAttack(), federation.malicious
    recording = MemoryHistory()
    poisoned = loop.record(
        federation,
        TrimmedMean(trim=0.2),
        recording,
        attack=attack,
        max_rounds=arguments.rounds,
        server_lr=0.02,
    )

    def error_rate(weights: torch.Tensor) -> float:
        return float(loop.test(federation, weights)["ter"] or 0)

    scratch = loop.recover(federation, recording, TrainFromScratch(), exclude)
    rows: list[list[object]] = [
        [seed, "poisoned", error_rate(poisoned.global_weights), "", "", "", ""],
        [seed, "train from scratch", error_rate(scratch.global_weights), 0.0, "", "", ""],
    ]
    middle = recording.read_round(arguments.rounds // 2).updates
    for codec in codecs:
        with (
            tempfile.TemporaryDirectory() as folder,
            LMDBHistory(Path(folder) / "history", codec=codec) as history,
        ):
            history.begin(recording.manifest)
            for t in recording.rounds():
                history.write_round(recording.read_round(t))
            result = loop.recover(federation, history, FedRecover(estimator="paired"), exclude)
            stored = history.read_round(arguments.rounds // 2).updates
            size = sum(len(CODECS[codec].encode(u.numpy()).payload) for u in middle)
        assert result.ledger is not None
        rows.append(
            [
                seed,
                codec,
                error_rate(result.global_weights),
                result.ledger.acp(),
                f"{size / middle.numel():.3f}",
                float((stored - middle).norm() / middle.norm()),
                int(result.diagnostics["estimated_updates"]),
            ]
        )
    return rows


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--rounds", type=int, default=450)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = [row for seed in arguments.seeds for row in rows_of(seed, arguments.codecs, arguments)]
    table(rows, HEADERS)
    if arguments.csv:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
