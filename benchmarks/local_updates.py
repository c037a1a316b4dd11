"""The updates of a cohort, one local step: fedrec's ways, plain loops, and the limit.

    python benchmarks/local_updates.py --nets cnn purchase --clients 100 --threads 1

Everything is measured in turn, so that drift hits all alike; figures are medians of wall-clock
time. Every way ends with the updates of a round in a new matrix. The plain loops and `Trainer.fit`
run in a second process with glibc's default settings, since fedrec changes those of a process.
`Trainer.fit` is measured with three clients and scaled up. The limit is the number of
floating-point operations of forward and backward passes over the rate of a 2048 x 2048 matrix
product.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from timing import interleave, median, table, write_csv
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from fedrec.clients import LightningClient
from fedrec.executors import Executor, SequentialExecutor, VectorizedExecutor
from fedrec.loop.runtime import keep_freed_memory
from fedrec.models import CNN, HARMLP, MLP, Classifier, PurchaseMLP
from fedrec.parameters import ParameterVector
from fedrec.types import RoundContext

NETS: dict[str, tuple[Callable[[], Classifier], tuple[int, ...], int]] = {
    "cnn": (CNN, (1, 28, 28), 10),
    "mlp": (partial(MLP, in_features=784, hidden=(100,)), (784,), 10),
    "har": (HARMLP, (561,), 6),
    "purchase": (PurchaseMLP, (600,), 100),
}
PATHS = ("auto", "grouped", "vmap", "loop", "sequential")
HEADERS = ("net", "clients", "way", "ms/round", "faster than plain", "times the limit")
PLAIN, CHANNELS_LAST, FIT = "plain loop, NCHW", "plain loop, channels_last", "Trainer.fit"
NUM_FITTED = 3


def data_of(net: str, clients: int, batch_size: int) -> list[TensorDataset]:
    """Return random data, four batches for each client."""
    _, shape, classes = NETS[net]
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


def quiet() -> None:
    """Keep Lightning from announcing devices and data loaders."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def serve(pipe: Connection, threads: int) -> None:
    """Run plain loops in this process when asked to: the life of the second process."""
    torch.set_num_threads(threads)
    quiet()
    data: list[TensorDataset] = []
    module = channels_last = CNN()
    batch_size = 0
    while (message := pipe.recv()) is not None:
        if isinstance(message, tuple):
            net, clients, batch_size = message
            data = data_of(net, clients, batch_size)
            torch.manual_seed(0)
            module, channels_last = NETS[net][0](), NETS[net][0]()
            for layer in module.layers:
                layer.to(memory_format=torch.contiguous_format)
        elif message == FIT:
            fit(module, data[:NUM_FITTED], batch_size)
        else:
            plain_loop(module if message == PLAIN else channels_last, data, batch_size)
        pipe.send(None)


def fedrec_ways(net: str, data: list[TensorDataset], batch_size: int) -> dict[str, Any]:
    """Return a function for each path that is not refused, by name."""
    torch.manual_seed(0)
    module = NETS[net][0]()
    clients = [
        LightningClient(f"client-{i:03d}", module, dataset, batch_size=batch_size)
        for i, dataset in enumerate(data)
    ]
    layout = ParameterVector(module)
    weights = layout.flatten(module)
    ctx = RoundContext(
        round=0,
        phase="record",
        client_ids=tuple(c.client_id for c in clients),
        global_weights=weights,
        layout=layout,
    )
    ways = {}
    chosen = ""
    for path in PATHS:
        executor: Executor = SequentialExecutor()
        taken = path
        if path != "sequential":
            executor = VectorizedExecutor(path=path, warn=False)
            taken = executor.plan(clients, weights, ctx)["path"]
        if path == "auto":
            chosen = taken
        if path in ("auto", taken) and (path == "auto" or taken != chosen):
            name = f"fedrec, chosen: {taken}" if path == "auto" else f"fedrec, {path}"
            ways[name] = partial(executor.compute, clients, weights, ctx)
    return ways


def flops_of(net: str, clients: int, batch_size: int) -> int:
    """Count the floating-point operations of a round."""
    module, data = NETS[net][0](), data_of(net, 1, batch_size)
    with FlopCounterMode(display=False) as counter:
        plain_loop(module, data, batch_size)
    return clients * counter.get_total_flops()


def measure(net: str, clients: int, options: argparse.Namespace, pipe: Connection) -> list[Any]:
    """Return the rows of one net and number of clients."""

    def ask(message: object) -> None:
        pipe.send(message)
        pipe.recv()

    ask((net, clients, options.batch_size))
    matrix = torch.randn(2048, 2048)
    plain = [PLAIN, CHANNELS_LAST] if net == "cnn" else [PLAIN]
    ways: dict[str, Callable[[], object]] = {
        "matrix product": lambda: matrix @ matrix,
        **{name: partial(ask, name) for name in [*plain, FIT]},
        **fedrec_ways(net, data_of(net, clients, options.batch_size), options.batch_size),
    }
    seconds = {
        name: median(values) for name, values in interleave(ways, repeats=options.repeats).items()
    }
    seconds[FIT] *= clients / NUM_FITTED
    limit = flops_of(net, clients, options.batch_size) * seconds.pop("matrix product")
    limit /= 2 * 2048**3
    rows = [
        (net, clients, name, 1e3 * value, seconds[PLAIN] / value, value / limit)
        for name, value in seconds.items()
    ]
    return [*rows, (net, clients, "limit", 1e3 * limit, seconds[PLAIN] / limit, 1.0)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 30, 100])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=serve, args=(other, options.threads), daemon=True)
    process.start()
    rows = [
        row
        for net in options.nets
        for clients in options.clients
        for row in measure(net, clients, options, pipe)
    ]
    pipe.send(None)
    process.join()
    print(
        f"batch size {options.batch_size}, threads {options.threads}, torch {torch.__version__}\n"
    )
    table(rows, HEADERS)
    if options.csv is not None:
        write_csv(options.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
