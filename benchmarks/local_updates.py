"""The updates of a cohort, one local step: fedrec's ways, plain loops, and the limit.

    python benchmarks/local_updates.py --nets cnn purchase --threads 1

Everything is measured in turn in one process, so that drift hits all alike; what is compared are
the ratios within a turn. Times are medians, of CPU time with one thread and of wall-clock time with
more. Every way ends with the updates of a round in a new matrix. `Trainer.fit` (`--fit`) is
measured with three clients and scaled up. The limit is the number of floating-point operations of
forward and backward passes over the rate of a 2048 x 2048 matrix product; what computes winners
alone needs fewer.
"""

from __future__ import annotations

import argparse
import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from timing import interleave, median, table, write_csv
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedrec.clients import LightningClient
from fedrec.executors import Executor, SequentialExecutor, VectorizedExecutor, winners
from fedrec.loop.runtime import keep_freed_memory
from fedrec.models import CNN, HARMLP, MLP, Classifier, PurchaseMLP
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext


class Net(Classifier):
    """Layers in a row, weights channels last."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = make()
        self.initialize()
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits."""
        logits: Tensor = self.layers(x)
        return logits


class Block(nn.Module):
    """Two convolutions with GroupNorm, and a way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(4, out), nn.GroupNorm(4, out)])
        around = stride != 1 or channels != out
        self.around = nn.Conv2d(channels, out, 1, stride, bias=False) if around else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block."""
        y = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(y)) + self.around(x))


def resnet() -> nn.Module:
    """Return a ResNet-20 with GroupNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
    ]
    for before, channels in ((16, 16), (16, 32), (32, 64)):
        layers.append(Block(before, channels, channels // before))
        layers += [Block(channels, channels, 1) for _ in range(2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head)


def convolutions(channels: int, plan: str, head: tuple[int, ...]) -> nn.Module:
    """Return layers in the order that papers write them in.

    Args:
        channels: Of the images.
        plan: `30x3` is a convolution to 30 channels with a 3x3 kernel, and a ReLU, `30x3+1` the
            same with padding 1; `M2` a 2x2 max-pooling, `M3/2` a 3x3 one with stride 2.
        head: Widths of the fully connected layers, features first.
    """
    body: list[nn.Module] = []
    for part in plan.split():
        if part.startswith("M"):
            size, _, stride = part[1:].partition("/")
            body.append(nn.MaxPool2d(int(size), int(stride or size)))
        else:
            out, _, kernel = part.partition("x")
            size, _, padding = kernel.partition("+")
            body += [nn.Conv2d(channels, int(out), int(size), 1, int(padding or 0)), nn.ReLU()]
            channels = int(out)
    body.append(nn.Flatten())
    for i, width in enumerate(head[1:]):
        body += [*([nn.ReLU()] if i else []), nn.Linear(head[i], width)]
    return nn.Sequential(*body)


def net(make: Callable[..., nn.Module], *args: Any) -> Callable[[], Classifier]:
    """Return a function that makes a network."""
    return lambda: Net(lambda: make(*args))


_MNIST, _CIFAR = (1, 28, 28), (3, 32, 32)
# How it is made, shape of a sample, number of classes, clients.
NETS: dict[str, tuple[Callable[[], Classifier], tuple[int, ...], int, int]] = {
    "cnn": (CNN, _MNIST, 10, 100),
    "cnn-relu-first": (
        net(convolutions, 1, "30x3 M2 50x3 M2", (1250, 100, 10)),
        _MNIST,
        10,
        100,
    ),
    "lenet5": (
        net(convolutions, 1, "6x5+2 M2 16x5 M2", (400, 120, 84, 10)),
        _MNIST,
        10,
        100,
    ),
    "fedavg-cnn": (
        net(convolutions, 1, "32x5+2 M2 64x5+2 M2", (3136, 512, 10)),
        _MNIST,
        10,
        20,
    ),
    "cifar-cnn": (partial(CNN, in_channels=3, image_size=32), _CIFAR, 10, 50),
    "vgg": (
        net(convolutions, 3, "32x3+1 32x3+1 M2 64x3+1 64x3+1 M2", (4096, 10)),
        _CIFAR,
        10,
        10,
    ),
    "overlapping": (
        net(convolutions, 3, "32x3+1 M3/2 64x3 M3/2", (2304, 10)),
        _CIFAR,
        10,
        20,
    ),
    "resnet20": (net(resnet), _CIFAR, 10, 10),
    "mlp": (partial(MLP, in_features=784, hidden=(100,)), (784,), 10, 100),
    "har": (HARMLP, (561,), 6, 100),
    "purchase": (PurchaseMLP, (600,), 100, 100),
}
OTHER_PATHS = ("grouped", "vmap", "loop", "sequential")
HEADERS = ("net", "clients", "threads", "way", "ms/round", "faster than channels_last", "limits")
PLAIN, CHANNELS_LAST, FIT = "plain loop, NCHW", "plain loop, channels_last", "Trainer.fit"
NUM_FITTED = 3


def data_of(name: str, clients: int, batch_size: int) -> list[TensorDataset]:
    """Return random data, four batches for each client."""
    _, shape, classes, _ = NETS[name]
    generator = torch.Generator().manual_seed(0)
    return [
        TensorDataset(
            torch.randn(4 * batch_size, *shape, generator=generator),
            torch.randint(classes, (4 * batch_size,), generator=generator),
        )
        for _ in range(clients)
    ]


def plain_loop(module: Classifier, data: list[TensorDataset], batch_size: int) -> torch.Tensor:
    """Write the round the way PyTorch's tutorials would."""
    parameters = list(module.parameters())
    updates = torch.empty(len(data), sum(p.numel() for p in parameters))
    for row, dataset in zip(updates, data, strict=True):
        index = torch.randperm(len(dataset))[:batch_size]
        batch = tuple(t[index] for t in dataset.tensors)
        module.zero_grad()
        x, y = batch
        torch.nn.functional.cross_entropy(module(x), y).backward()
        row.copy_(torch.cat([p.grad.reshape(-1) for p in parameters]))
    return updates


def fit(module: Classifier, data: list[TensorDataset], batch_size: int) -> None:
    """Train every client with a Trainer of its own."""
    for dataset in data:
        trainer = pl.Trainer(
            max_steps=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(dataset, batch_size, shuffle=True))


def first_round(
    module: Classifier, clients: Sequence[LightningClient]
) -> tuple[Tensor, RoundContext]:
    """Return the weights of a module, and the context in which clients start from them."""
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=0,
        phase="record",
        client_ids=tuple(c.client_id for c in clients),
        global_weights=weights,
        layout=layout,
    )
    return weights, ctx


def fedrec_ways(
    module: Classifier, data: list[TensorDataset], batch_size: int, others: bool
) -> dict[str, Callable[[], object]]:
    """Return a function for each path that is not refused, by name."""
    clients = [
        LightningClient(f"client-{i:03d}", module, dataset, batch_size=batch_size)
        for i, dataset in enumerate(data)
    ]
    weights, ctx = first_round(module, clients)
    ways: dict[str, Callable[[], object]] = {}

    def add(name: str, executor: Executor, path: str) -> None:
        taken = path
        if isinstance(executor, VectorizedExecutor):
            taken = executor.plan(clients, weights, ctx)["path"]
        if path in ("auto", taken.removesuffix(" (winners)")):
            suffix = f": {taken}" if path == "auto" else f", {path}"
            ways[name + suffix] = partial(executor.compute, clients, weights, ctx)

    with patch.object(winners, "kernels", lambda: None):
        add("fedrec without winners", VectorizedExecutor(warn=False, audit=0), "auto")
    add("fedrec", VectorizedExecutor(warn=False, audit=0), "auto")
    for path in OTHER_PATHS if others else ():
        sequential = path == "sequential"
        executor = VectorizedExecutor(path=path, warn=False, audit=0)
        add("fedrec", SequentialExecutor() if sequential else executor, path)
    return ways


def flops_of(module: Classifier, data: list[TensorDataset], batch_size: int) -> int:
    """Count the floating-point operations of a round."""
    with FlopCounterMode(display=False) as counter:
        plain_loop(module, data[:1], batch_size)
    return len(data) * counter.get_total_flops()


def measure(name: str, options: argparse.Namespace) -> list[Any]:
    """Return the rows of one net."""
    torch.manual_seed(0)
    make, _, _, usual = NETS[name]
    module, clients = make(), options.clients or usual
    data = data_of(name, clients, options.batch_size)
    matrix = torch.randn(2048, 2048)
    contiguous = copy.deepcopy(module).to(memory_format=torch.contiguous_format)
    ways: dict[str, Callable[[], object]] = {
        "matrix product": lambda: matrix @ matrix,
        PLAIN: partial(plain_loop, contiguous, data, options.batch_size),
        CHANNELS_LAST: partial(plain_loop, module, data, options.batch_size),
        **fedrec_ways(module, data, options.batch_size, options.paths),
    }
    if options.fit:
        ways[FIT] = partial(fit, copy.deepcopy(module), data[:NUM_FITTED], options.batch_size)
    cpu_seconds = options.threads == 1
    turns = interleave(ways, repeats=options.repeats, cpu_seconds=cpu_seconds)
    if options.fit:
        turns[FIT] = [value * clients / NUM_FITTED for value in turns[FIT]]
    rate = median(turns.pop("matrix product")) / (2 * 2048**3)
    limit = flops_of(module, data, options.batch_size) * rate
    plain = turns[CHANNELS_LAST]
    rows = [
        (
            *(name, clients, options.threads, way, 1e3 * median(values)),
            *(median([a / b for a, b in zip(plain, values, strict=True)]), median(values) / limit),
        )
        for way, values in turns.items()
    ]
    return [
        *rows,
        (name, clients, options.threads, "limit", 1e3 * limit, median(plain) / limit, 1.0),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--clients", type=int, help="instead of as many as suit the net")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--paths", action="store_true", help="measure the other paths as well")
    parser.add_argument("--fit", action="store_true", help="measure Trainer.fit as well")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # of Lightning, about data loaders
    keep_freed_memory()
    print(f"batch size {options.batch_size}, torch {torch.__version__}\n")
    rows: list[Any] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        one = argparse.Namespace(**{**vars(options), "threads": threads})
        for name in options.nets:
            rows += measure(name, one)
            if options.csv is not None:  # what is measured is kept, whatever comes
                write_csv(options.csv, rows, HEADERS)
    table(rows, HEADERS)


if __name__ == "__main__":
    main()
