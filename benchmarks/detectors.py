"""What every detector costs a round, against a plain mean of the updates.

    python benchmarks/detectors.py --csv benchmarks/results/detectors.csv

Everything is measured in turn in one process, so that drift hits all alike; figures are medians of
wall-clock time of a round after the first. Updates are a common direction and Gaussian noise, two
sets of them in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from timing import interleave, median, size_parser, table, write_csv

import fedrec.detectors as detectors
from fedrec.detectors import Detector
from fedrec.functional import weighted_mean
from fedrec.types import CohortUpdates, RoundRecord

HEADERS = ("detector", "clients", "parameters", "threads", "ms", "times a mean")
DETECTORS: dict[str, Detector] = {
    "NormOutlier": detectors.NormOutlier(),
    "CosineOutlier": detectors.CosineOutlier(),
    "Spectral": detectors.Spectral(),
    "Spectral, 10,000 coordinates": detectors.Spectral(num_coordinates=10_000),
    "Mahalanobis, PCA": detectors.Mahalanobis(),
    "Mahalanobis, random directions": detectors.Mahalanobis(projection="random"),
    "Auror, while it looks for features": detectors.Auror(find_rounds=1000),
    "SybilSimilarity": detectors.SybilSimilarity(),
    "CrossRoundConsistency": detectors.CrossRoundConsistency(),
    "UpdateAutoencoder, trained": detectors.UpdateAutoencoder(train_rounds=1),
    # Never sure, so that it goes on.
    "FLDetector": detectors.FLDetector(start_round=1, standard_errors=1e6),
}


def main() -> None:
    """Measure, print, write."""
    arguments = size_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    m, d = arguments.clients, arguments.parameters
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(d, generator=generator)
    sets = [direction + 2 * torch.randn(m, d, generator=generator) for _ in range(2)]
    means = [updates.mean(dim=0) for updates in sets]
    ids = tuple(f"client-{i:03d}" for i in range(m))
    sizes = torch.ones(m, dtype=torch.int64)

    def watch(detector: Detector) -> Callable[[], object]:
        rounds = itertools.count()

        def observe() -> None:
            t = next(rounds)
            detector.observe(
                RoundRecord(
                    round=t,
                    global_weights=means[t % 2] * (t + 1),
                    sent=CohortUpdates(
                        client_ids=ids,
                        updates=sets[t % 2],
                        num_samples=sizes,
                    ),
                    aggregate=means[t % 2],
                )
            )

        return observe

    functions = {"a mean": lambda: weighted_mean(sets[0], sizes.float())}
    functions |= {name: watch(detector) for name, detector in DETECTORS.items()}
    with torch.no_grad():
        seconds = interleave(functions, repeats=arguments.repeats)
    took = {name: median(values) for name, values in seconds.items()}
    rows = [
        (name, m, d, arguments.threads, 1e3 * t, t / took["a mean"]) for name, t in took.items()
    ]
    table(rows, HEADERS)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
