"""What computing pooled convolutions by their winners gains, by the share of outputs that win.

    python benchmarks/winners.py --csv benchmarks/results/winners.csv

Two convolutions, each with a max-pooling, 6 clients of 32 samples, one thread. `VectorizedExecutor`
with and without winners in turn, whatever its rule says; the gain is the median of the ratios.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from local_updates import Net, fedrec_ways
from timing import interleave, median, table, write_csv
from torch import nn
from torch.utils.data import TensorDataset

from fedrec.executors import winners
from fedrec.loop.runtime import keep_freed_memory

POOLINGS: tuple[tuple[int, Any], ...] = ((3, 3), (2, 2), (3, 2), (2, (2, 1)), (2, 1), (3, 1))
HEADERS = ("pooling", "stride", "activation", "share that wins", "gain")
CHANNELS, SIDE, CLIENTS, BATCH = 16, 20, 6, 32


def layers(size: int, stride: Any, activates: bool) -> nn.Module:
    """Return a network."""
    body: list[nn.Module] = []
    for channels in (CHANNELS, 32):
        activation = nn.ReLU() if activates else nn.Identity()
        body += [nn.Conv2d(channels, 32, 3), activation, nn.MaxPool2d(size, stride)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rows: list[Any] = []
    for size, stride in POOLINGS:
        for activates in (True, False):
            torch.manual_seed(0)
            net = Net(lambda size=size, stride=stride, on=activates: layers(size, stride, on))
            data = [
                TensorDataset(torch.randn(BATCH, CHANNELS, SIDE, SIDE), torch.randint(10, (BATCH,)))
                for _ in range(CLIENTS)
            ]
            with patch.object(winners, "_LARGEST_SHARE", 1.0):
                ways = fedrec_ways(net, data, BATCH, others=False)
                before, now = interleave(ways, repeats=options.repeats, cpu_seconds=True).values()
            outputs = torch.zeros(1, 1, SIDE - 2, SIDE - 2)
            pooled = nn.functional.max_pool2d(outputs, size, stride)
            gain = median([a / b for a, b in zip(before, now, strict=True)])
            name = "ReLU" if activates else "none"
            rows.append((size, stride, name, pooled.numel() / outputs.numel(), gain))
    table(rows, HEADERS)
    if options.csv is not None:
        write_csv(options.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
