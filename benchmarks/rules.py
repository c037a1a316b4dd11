"""What every aggregation rule costs, against a plain mean of the updates.

    python benchmarks/rules.py --csv benchmarks/results/rules.csv

Everything is measured in turn in one process, so that drift hits all alike; figures are medians of
wall-clock time of a round after the first. Updates are a common direction and Gaussian noise.
Wrappers and server optimisers are measured around a mean, so that one mean of theirs is the rule's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from timing import interleave, median, size_parser, table, write_csv
from torch import nn

import fedrec.aggregators as rules
from fedrec.aggregators import AggregationContext, Aggregator, FedAvg
from fedrec.parameters import ParameterVector

HEADERS = ("rule", "clients", "parameters", "threads", "ms", "times a mean")
RULES: dict[str, Aggregator] = {
    "FedAvg": FedAvg(),
    "Median": rules.Median(),
    "TrimmedMean": rules.TrimmedMean(trim=0.2),
    "MeanAroundMedian": rules.MeanAroundMedian(num_byzantine=0.2),
    "NormClipping": rules.NormClipping(),
    "GeometricMedian": rules.GeometricMedian(),
    "Krum": rules.Krum(num_byzantine=0.2),
    "MultiKrum": rules.MultiKrum(num_byzantine=0.2),
    "Bulyan": rules.Bulyan(num_byzantine=0.2),
    "DnC": rules.DnC(num_byzantine=0.2),
    "CAF": rules.CAF(num_byzantine=0.2),
    "CenteredClipping": rules.CenteredClipping(tau=100.0),
    "FoolsGold": rules.FoolsGold(),
    "FLTrust": rules.FLTrust(),
    "FLAME": rules.FLAME(),
    "SignGuard": rules.SignGuard(),
    "AlignIns": rules.AlignIns(),
    "LASA": rules.LASA(),
    "MultiMetrics": rules.MultiMetrics(local_lr=0.1),
    "RFLBAT": rules.RFLBAT(),
    "RLR": rules.RLR(FedAvg(), threshold=0.2),
    "NearestNeighborMixing": rules.NearestNeighborMixing(FedAvg(), num_byzantine=0.2),
    "Bucketing": rules.Bucketing(FedAvg()),
    "ARC": rules.ARC(FedAvg(), num_byzantine=0.2),
    "FedAvgM": rules.FedAvgM(FedAvg()),
    "FedAdam": rules.FedAdam(FedAvg()),
    "FedYogi": rules.FedYogi(FedAvg()),
    "ServerOptimizer, Adam": rules.ServerOptimizer(FedAvg(), optimizer="Adam"),
}


def main() -> None:
    """Measure, print, write."""
    arguments = size_parser(__doc__).parse_args()
    torch.set_num_threads(arguments.threads)
    m, d = arguments.clients, arguments.parameters
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(d, generator=generator)
    updates = direction + 2 * torch.randn(m, d, generator=generator)
    ctx = AggregationContext(
        round=0,
        phase="record",
        client_ids=tuple(f"client-{i}" for i in range(m)),
        global_weights=torch.zeros(d),
        layout=ParameterVector(nn.Linear(d, 1, bias=False)),
        server_update=direction,
    )
    functions: dict[str, Callable[[], object]] = {
        name: partial(rule, updates, None, ctx) for name, rule in RULES.items()
    }
    with torch.no_grad():
        seconds = interleave(functions, repeats=arguments.repeats)
    took = {name: median(values) for name, values in seconds.items()}
    rows = [
        (name, m, d, arguments.threads, 1e3 * t, t / took["FedAvg"]) for name, t in took.items()
    ]
    table(rows, HEADERS)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
