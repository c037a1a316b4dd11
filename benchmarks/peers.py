"""The same round in other frameworks: seconds, and whether they compute the same.

    python benchmarks/peers.py --csv benchmarks/results/peers.csv
    python benchmarks/peers.py --clients 30 --peers ByzFL BlazeFL

The paper's CNN; every client has one batch of 32 samples and takes one step of SGD from the global
weights; the server aggregates and steps. All start from the same weights and have the same batches.
`difference` is that of the first round's aggregate from fedrec's, relative, and, after the slash,
that of the rule alone on the same updates; beyond 1e-3 the script fails.

Rounds of all peers but Flower are timed in turn in one process, in which the C library keeps freed
memory, as fedrec's loop asks it to (`keep_freed_memory`): all of them gain by it. Flower's are
timed in its own simulation, between the start of `configure_train` and the end of
`aggregate_train`, after a round to warm up, with one single-threaded worker process per thread. CPU
seconds are those of all threads and child processes.

Peers are optional; what cannot be imported is skipped. None belongs in fedrec's own environment,
since their requirements replace torch and more. Versions known to work, each installed with
`--no-deps` but the last:

    byzfl==0.0.11 fedlab==1.3.0 blazefl==3.0.0a1 "flwr[simulation]==1.42.0"

ByzFL and FedLab need matplotlib, seaborn, scipy, munch, pandas, nvidia-ml-py; BlazeFL declares
Python 3.13, but this version runs unchanged on 3.11 (`pip install --ignore-requires-python`).
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import itertools
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from timing import interleave, median, table, write_csv
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from workloads import workload

from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.clients import LightningClient
from fedrec.federation import Federation
from fedrec.loop import FederatedLoop
from fedrec.loop.runtime import keep_freed_memory
from fedrec.models import CNN
from fedrec.types import RoundContext

BATCH, TRIM, LR = 32, 0.2, 0.1
RULES: dict[str, Aggregator] = {
    "mean": FedAvg(),
    "trimmed mean": TrimmedMean(trim=TRIM),
    "median": Median(),
}
ROUND_RULES = ("mean", "trimmed mean")
# Who sends weights loses digits: a step changes float32 weights by little. Another batch, another
# weighting or another trimming would show in the first or second digit.
TOLERANCE = 1e-3
Compute = Callable[[], Tensor]


@dataclass
class Peer:
    """What to time of a framework.

    Args:
        rounds: By rule: does the next round and returns its aggregate, shape (d,).
        aggregations: By rule: aggregates the same updates each time.
        layout: Memory format of the convolutions' weights.
    """

    rounds: dict[str, Compute] = field(default_factory=dict)
    aggregations: dict[str, Compute] = field(default_factory=dict)
    layout: str = "channels_last"


class Problem:
    """The clients' batches, the network, and their first updates."""

    def __init__(self, num_clients: int, threads: int) -> None:
        made = workload("cnn", num_clients, malicious=0.0, batch_size=BATCH)
        # Exactly one batch per client, so that everybody draws the same, in whatever order.
        batches = [client.dataset[:BATCH] for client in made.clients]
        self.sets = [TensorDataset(x.clone(), y.clone()) for x, y in batches]
        self.threads, self.module, self.layout = threads, made.module, made.layout
        self.num_clients, self.num_trim = num_clients, int(TRIM * num_clients)
        self.weights = self.layout.flatten(self.module)
        self.updates = torch.empty(0)

    def contiguous(self) -> nn.Module:
        """Copy the module, in the default memory format: some peers flatten by `view(-1)`."""
        module = copy.deepcopy(self.module)
        for parameter in module.parameters():
            parameter.data = torch.empty(parameter.shape).copy_(parameter.data)
        return module

    def loader(self, client: int) -> DataLoader:
        """Return the DataLoader of one client."""
        return DataLoader(self.sets[client], batch_size=BATCH)

    def flat(self, named: Any) -> Tensor:
        """Flatten named arrays or tensors."""
        return torch.cat([torch.as_tensor(named[n]).reshape(-1) for n in self.layout.names])


def fedrec(problem: Problem) -> Peer:
    """Executor chosen by `executor="auto"`, aggregation rule with its checks, server step."""
    module = copy.deepcopy(problem.module)
    clients = [
        LightningClient(f"client-{i}", module, data, batch_size=BATCH)
        for i, data in enumerate(problem.sets)
    ]
    federation = Federation(clients, module)
    loop = FederatedLoop(accelerator="cpu", logger=False, enable_progress_bar=False)
    executor = loop.runtime.choose_executor(None)

    ids, layout = federation.client_ids, federation.layout
    context = functools.partial(
        RoundContext, round=0, phase="record", client_ids=ids, layout=layout
    )

    def rounds(rule: Aggregator) -> Compute:
        weights = problem.weights.clone()

        def round_() -> Tensor:
            nonlocal weights
            ctx = context(global_weights=weights)
            sent = executor.compute(clients, weights, ctx)
            aggregate = rule(sent.updates, sent.num_samples.float(), ctx)
            weights = weights - LR * aggregate
            return aggregate

        return round_

    ctx = context(global_weights=problem.weights)
    print("fedrec:", executor.plan(clients, problem.weights, ctx))
    problem.updates = executor.compute(clients, problem.weights, ctx).updates.clone()
    return Peer(
        {name: rounds(RULES[name]) for name in ROUND_RULES},
        {name: functools.partial(rule, problem.updates) for name, rule in RULES.items()},
    )


def plain_loop(problem: Problem, layout: str = "channels_last") -> Peer:
    """A loop over the clients as one writes it in plain torch; order statistics by torch.sort."""
    k, m = problem.num_trim, problem.num_clients
    rules: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda rows: rows.mean(dim=0),
        "trimmed mean": lambda rows: rows.sort(dim=0).values[k : m - k].mean(dim=0),
        "median": lambda rows: rows.sort(dim=0).values[(m - 1) // 2 : m // 2 + 1].mean(dim=0),
    }

    def rounds(rule: Callable[[Tensor], Tensor]) -> Compute:
        module = copy.deepcopy(problem.module) if layout != "NCHW" else problem.contiguous()
        parameters = dict(module.named_parameters())
        rows = torch.empty(m, problem.layout.num_parameters)

        def round_() -> Tensor:
            for row, data in zip(rows, problem.sets, strict=True):
                loss = cross_entropy(module(data.tensors[0]), data.tensors[1])
                gradients = torch.autograd.grad(loss, list(parameters.values()))
                torch.cat([g.reshape(-1) for g in gradients], out=row)
            aggregate = rule(rows)
            with torch.no_grad():
                for name, part in problem.layout.unflatten(aggregate).items():
                    parameters[name].sub_(part, alpha=LR)
            return aggregate

        return round_

    return Peer(
        {name: rounds(rules[name]) for name in ROUND_RULES},
        {name: functools.partial(rule, problem.updates) for name, rule in rules.items()}
        if layout != "NCHW"
        else {},
        layout,
    )


@contextmanager
def torchvision_stub() -> Iterator[None]:
    """Let packages be imported that want torchvision for data sets that are not used here."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    sys.modules["torchvision"] = MagicMock()
    try:
        yield
    finally:
        del sys.modules["torchvision"]


def byzfl(problem: Problem) -> Peer:
    """ByzFL's clients and server, its distributed SGD: clients send gradients."""
    with torchvision_stub():
        from byzfl import Average, Client, Server, TrMean
        from byzfl import Median as ByzFLMedian
        from byzfl.fed_framework import models

    models.fedrec_cnn = problem.contiguous
    model = {"model_name": "fedrec_cnn", "device": "cpu"}
    optimizer = {"optimizer_name": "SGD", "learning_rate": LR, "weight_decay": 0.0}
    shared = {**model, **optimizer, "milestones": [], "learning_rate_decay": 1.0}
    task = {"loss_name": "CrossEntropyLoss", "nb_labels": 10, "momentum": 0.0}
    off = {"LabelFlipping": False, "store_per_client_metrics": False}

    def rounds(name: str, parameters: dict[str, int]) -> Compute:
        info = {"name": name, "parameters": parameters}
        defence = {"aggregator_info": info, "pre_agg_list": []}
        server = Server({**shared, **defence, "test_loader": problem.loader(0)})
        loaders = [problem.loader(i) for i in range(problem.num_clients)]
        clients = [
            Client({**shared, **task, **off, "training_dataloader": loader}) for loader in loaders
        ]

        def round_() -> Tensor:
            for client in clients:
                client.compute_gradients()
            gradients = [client.get_flat_gradients_with_momentum() for client in clients]
            server.update_model_with_gradients(gradients)
            state = server.get_dict_parameters()
            for client in clients:
                client.set_model_state(state)
            return server.get_flat_gradients()

        return round_

    sent = list(problem.updates)
    return Peer(
        {"mean": rounds("Average", {}), "trimmed mean": rounds("TrMean", {"f": problem.num_trim})},
        {
            "mean": lambda: Average()(sent),
            "trimmed mean": lambda: TrMean(f=problem.num_trim)(sent),
            "median": lambda: ByzFLMedian()(sent),
        },
        "NCHW",
    )


def fedlab(problem: Problem) -> Peer:
    """FedLab's standalone pipeline with its serial trainer: clients send weights."""
    with torchvision_stub():
        from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
        from fedlab.contrib.algorithm.basic_server import SyncServerHandler
        from fedlab.utils import Aggregators

    class Data:
        def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
            return problem.loader(client)

    handler = SyncServerHandler(problem.contiguous(), global_round=10**9, sample_ratio=1.0)
    trainer = SGDSerialClientTrainer(problem.contiguous(), problem.num_clients)
    trainer.setup_dataset(Data())
    trainer.setup_optim(epochs=1, batch_size=BATCH, lr=LR)
    handler.num_clients = problem.num_clients

    def round_() -> Tensor:
        before = handler.model_parameters
        trainer.local_process(handler.downlink_package, handler.sample_clients())
        for package in trainer.uplink_package:
            handler.load(package)
        return (before - handler.model_parameters) / LR

    sent = list(problem.updates)
    mean = functools.partial(Aggregators.fedavg_aggregate, sent)
    return Peer({"mean": round_}, {"mean": mean}, "NCHW")


def blazefl(problem: Problem) -> Peer:
    """BlazeFL's thread pool, one torch thread each: clients send weights."""
    from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer

    class Selector:
        def select_model(self, name: str) -> nn.Module:
            return copy.deepcopy(template)

    class Data:
        def get_dataloader(self, type_: str, cid: int, **settings: Any) -> DataLoader:
            return problem.loader(cid)

    class Trainer(FedAvgThreadPoolClientTrainer):
        def progress_fn(self, it: Any) -> Any:
            return it

    template = problem.contiguous()
    shared = {
        "model_selector": Selector(),
        "model_name": "cnn",
        "dataset": Data(),
        "num_clients": problem.num_clients,
        "device": "cpu",
        "batch_size": BATCH,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(**shared, global_round=10**9, sample_ratio=1.0)
    trainer = Trainer(**shared, epochs=1, lr=LR, num_parallels=problem.threads)

    def round_() -> Tensor:
        torch.set_num_threads(1)
        package = server.downlink_package()
        trainer.local_process(package, server.sample_clients())
        for uplink in trainer.uplink_package():
            server.load(uplink)
        torch.set_num_threads(problem.threads)
        return (package.model_parameters - server.downlink_package().model_parameters) / LR

    sent = list(problem.updates)
    sizes = [BATCH] * problem.num_clients
    mean = functools.partial(FedAvgBaseServerHandler.aggregate, sent, sizes)
    return Peer({"mean": round_}, {"mean": mean}, "NCHW")


def flower(problem: Problem, repeats: int) -> tuple[Peer, dict[str, Any]]:
    """Flower's simulation; return its aggregation rules, and per rule what its rounds took."""
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    logging.getLogger("alembic").setLevel(logging.ERROR)
    import flwr
    import ray
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(f"Flower {flwr.__version__} on Ray {ray.__version__}")
    rules = {
        "mean": (FedAvg, {}),
        "trimmed mean": (FedTrimmedAvg, {"beta": TRIM}),
        "median": (FedMedian, {}),
    }
    every = {"min_available_nodes": problem.num_clients, "fraction_evaluate": 0.0}

    def simulate(rule: str, path: str) -> tuple[Tensor, list[float], list[float]]:
        wall: list[float] = []
        cpu: list[float] = []
        first: list[Tensor] = []
        base, settings = rules[rule]

        class Timed(base):  # type: ignore[misc, valid-type]
            def configure_train(self, *args: Any, **kwargs: Any) -> Any:
                cpu.append(-family_cpu_seconds())
                wall.append(-time.perf_counter())
                return super().configure_train(*args, **kwargs)

            def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
                found = super().aggregate_train(*args, **kwargs)
                wall[-1] += time.perf_counter()
                cpu[-1] += family_cpu_seconds()
                if not first:
                    new = problem.flat({n: a.numpy() for n, a in found[0].items()})
                    first.append((problem.weights - new) / LR)
                return found

        server, client = ServerApp(), ClientApp()

        @server.main()
        def main(grid: Any, context: Any) -> None:
            arrays = ArrayRecord(copy.deepcopy(problem.module).state_dict())
            Timed(**every, **settings).start(grid, arrays, num_rounds=repeats + 1)

        @client.train()
        def train(message: Any, context: Any) -> Any:
            # By name: a worker then keeps the batches and the module, which travel but once.
            from peers import flower_client

            return flower_client(message, context, path)

        resources = {
            "init_args": {"num_cpus": problem.threads},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        }
        run_simulation(server, client, problem.num_clients, backend_config=resources)
        return first[0], wall[1:], cpu[1:]

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "batches.pt")
        torch.save([data.tensors for data in problem.sets], path)
        found = {rule: simulate(rule, path) for rule in ROUND_RULES}

    arrays = [
        {n: Array(p.numpy()) for n, p in problem.layout.unflatten(row).items()}
        for row in problem.updates
    ]

    def reply(row: dict[str, Any]) -> Any:
        metrics = MetricRecord({"num-examples": BATCH})
        content = RecordDict({"arrays": ArrayRecord(row), "metrics": metrics})
        return Message(content, dst_node_id=1, message_type="train")

    def aggregation(rule: str) -> Compute:
        base, settings = rules[rule]
        strategy = base(**every, **settings)
        # Strategies take the arrays out of the replies: one set for every call.
        sets = iter([[reply(row) for row in arrays] for _ in range(repeats + 2)])

        def aggregate() -> Tensor:
            found, _ = strategy.aggregate_train(1, next(sets))
            return problem.flat({n: a.numpy() for n, a in found.items()})

        return aggregate

    return Peer(aggregations={rule: aggregation(rule) for rule in rules}), found


@functools.cache
def flower_state(path: str) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return what a worker process of the simulation keeps between clients."""
    torch.set_num_threads(1)
    return CNN(), torch.load(path)


def flower_client(message: Any, context: Any, path: str) -> Any:
    """Train one client in a worker process of the simulation: it sends weights."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    module, batches = flower_state(path)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = batches[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    optimizer.zero_grad()
    cross_entropy(module(x), y).backward()
    optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def family_cpu_seconds() -> float:
    """Return the CPU time of this process and all its descendants (Linux)."""
    ticks: dict[int, int] = {}
    parent: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(entry.name)
        parent[pid], ticks[pid] = int(fields[1]), sum(int(f) for f in fields[11:15])
    total = 0
    for pid, used in ticks.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parent.get(ancestor, 0)
        total += used if ancestor else 0
    return total / os.sysconf("SC_CLK_TCK")


class Measured:
    """A round that remembers its CPU seconds and its first aggregate."""

    def __init__(self, function: Compute) -> None:
        self.function, self.cpu = function, list[float]()
        self.first: Tensor | None = None

    def __call__(self) -> None:
        began = time.process_time()
        result = self.function()
        self.cpu.append(time.process_time() - began)
        if self.first is None:
            self.first = result.clone()


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative difference of two vectors."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


PEERS: dict[str, Callable[[Problem], Peer]] = {
    "plain loop": plain_loop,
    "plain loop, NCHW": functools.partial(plain_loop, layout="NCHW"),
    "ByzFL": byzfl,
    "FedLab": fedlab,
    "BlazeFL": blazefl,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5, help="rounds timed of each, after one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", nargs="+", choices=(*PEERS, "Flower"))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of worker processes
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    problem = Problem(arguments.clients, arguments.threads)
    peers = {"fedrec": fedrec(problem)}
    seconds: dict[tuple[str, str], tuple[Tensor, list[float], list[float]]] = {}
    for name in arguments.peers or (*PEERS, "Flower"):
        try:
            if name == "Flower":
                peers[name], found = flower(problem, arguments.rounds)
                seconds |= {(name, rule): result for rule, result in found.items()}
            else:
                peers[name] = PEERS[name](problem)
        except ImportError as error:
            print(f"{name}: skipped ({error})")

    rounds = {(n, r): Measured(f) for n, peer in peers.items() for r, f in peer.rounds.items()}
    wall = interleave(rounds, repeats=arguments.rounds)
    for key, function in rounds.items():
        seconds[key] = (function.first, wall[key], function.cpu[-arguments.rounds :])
    rules = {(n, r): f for n, peer in peers.items() for r, f in peer.aggregations.items()}
    alone = interleave(rules, repeats=arguments.rounds)

    rows: list[list[object]] = []
    gaps: list[float] = []
    for rule, name in itertools.product(RULES, peers):
        key, own = (name, rule), ("fedrec", rule)
        round_cells: list[object] = [""] * 4
        apart, milliseconds = ["", ""], ""
        if key in seconds:
            first, *clocks = seconds[key]
            spent = [median(clock) for clock in clocks]
            ratios = [s / median(c) for s, c in zip(spent, seconds[own][1:], strict=True)]
            round_cells = [*spent, *ratios]
            gaps.append(difference(first, seconds[own][0]))
            apart[0] = f"{gaps[-1]:.0e}"
        if key in alone:
            milliseconds = f"{1e3 * median(alone[key]):.3g}"
            gaps.append(difference(rules[key](), rules[own]()))
            apart[1] = f"{gaps[-1]:.0e}"
        if any(apart):
            cells = [name, peers[name].layout, rule, *round_cells, milliseconds]
            rows.append([*cells, " / ".join(apart)])
    headers = ["framework", "layout", "rule", "s/round", "CPU s/round"]
    headers += ["x fedrec", "x fedrec (CPU)", "aggregation alone, ms", "difference"]
    print(
        f"CNN, {problem.layout.num_parameters} parameters, {arguments.clients} clients, "
        f"batch {BATCH}, threads={arguments.threads}, median of {arguments.rounds} rounds"
    )
    table(rows, headers)
    if arguments.csv:
        write_csv(arguments.csv, rows, headers)
    if not max(gaps) <= TOLERANCE:
        raise SystemExit("An aggregate differs from fedrec's: it is another computation.")


if __name__ == "__main__":
    main()
