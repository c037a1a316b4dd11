"""An estimated round of FedRecover against an exact one, per-client loops and the memory.

    python benchmarks/estimation.py --csv benchmarks/results/estimation.csv

The estimated round is what `FedRecover` does in one with the paper's estimates: those of all
clients from s pairs each, and the abnormality test. `anchored` is the same for the anchored
estimator; and what it learns, and does with its anchors and pairs, when all clients were asked. The
floor is the time that its bytes take at the fastest rate of the same run (reading, copying and
adding large tensors): the update differences, the historical updates and the estimates. The
differences have to be read twice, since what to add depends on their products with a vector;
`floor, differences once` ignores that. The exact round is one local step of every client in the
executor that the loop chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from timing import interleave, median, table, write_csv
from torch import Tensor
from workloads import workload

from fedrec.functional import lbfgs_hvp
from fedrec.loop import FederatedLoop
from fedrec.recoverers import AnchoredLBFGS
from fedrec.recoverers.estimators.pairs import ClientPairs
from fedrec.recoverers.threshold import abnormality_threshold
from fedrec.types import CohortUpdates, RoundContext, RoundRecord

CPU = torch.device("cpu")
HEADERS = ("threads", "what", "ms", "of floor", "of estimated round")


class Problem:
    """Pairs, historical updates and a vector, of the size of the paper's CNN."""

    def __init__(self, num_clients: int, num_pairs: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.rows = torch.arange(num_clients)
        self.historical, self.v = draw(num_clients, size), 0.01 * draw(size)
        self.pairs = ClientPairs(num_clients, num_pairs, size, CPU)
        self.pushed = ClientPairs(num_clients, num_pairs, size, CPU)
        self.delta_w = 0.01 * draw(num_pairs, size)
        curvature = torch.rand(num_clients, 1, generator=generator) + 0.5
        self.round = 0
        for delta_w in self.delta_w:
            self.exact = self.historical + curvature * delta_w + 1e-4 * draw(num_clients, size)
            for pairs in (self.pairs, self.pushed):
                pairs.push(self.rows, delta_w, self.exact, self.historical, self.round, alone=False)
            self.round += 1
        self.other = torch.empty_like(self.historical)

    def estimate(self) -> Tensor:
        """Estimate all clients and test for abnormality."""
        estimates, largest, usable = self.pairs.estimate(self.historical, self.v, self.rows)
        _ = usable & torch.isfinite(largest) & (largest > 1.0)
        return estimates

    def client_by_client(self, dtype: torch.dtype) -> Tensor:
        """Do the same for one client after another, with everything computed anew."""
        delta_w, v = self.delta_w.to(dtype), self.v.to(dtype)
        estimates = []
        for i in self.rows.tolist():
            product = lbfgs_hvp(delta_w, self.pairs.delta_g[i : i + 1].to(dtype), v)[0]
            estimates.append(self.historical[i].to(dtype) + product)
            _ = bool(estimates[-1].abs().max() > 1.0)
        return torch.stack(estimates)

    def push(self) -> None:
        """Add a pair to every client."""
        at = self.round % len(self.delta_w)
        self.pushed.push(
            self.rows, self.delta_w[at], self.exact, self.historical, self.round, False
        )
        self.round += 1

    def solve(self) -> None:
        """Invert all middle matrices, as after a change of the pairs."""
        self.pairs._solved = None
        self.pairs._solve()

    def scan(self, num_rounds: int) -> None:
        """Look for the abnormality threshold in equal rounds."""
        abnormality_threshold([self.historical] * num_rounds, 1e-6)


class Anchored:
    """The default estimator, of the same size, after a warm-up."""

    def __init__(self, problem: Problem) -> None:
        self.exact, self.weights = problem.exact, 0.01 * torch.ones_like(problem.v)
        ids = tuple(f"c{i}" for i in problem.rows.tolist())
        sizes = torch.ones(len(ids), dtype=torch.int64)
        self.sent = CohortUpdates(client_ids=ids, updates=problem.historical, num_samples=sizes)
        self.estimator = AnchoredLBFGS(
            history_weight=0.5, curvature_weight=1.0, buffer_size=len(problem.delta_w)
        )
        self.estimator.start(SimpleNamespace(remaining=ids), range(10**6))
        self.round = 0
        for _ in range(5):
            self.observe()

    def record(self) -> RoundRecord:
        """Return a recorded round, whose weights are others each time."""
        self.round += 1
        weights = self.weights * (self.round % 7)
        return RoundRecord(
            round=self.round, global_weights=weights, sent=self.sent, aggregate=weights
        )

    def estimate(self) -> None:
        """Estimate all clients and test for abnormality."""
        _, largest, usable = self.estimator.estimate(self.record(), self.weights)
        _ = usable & torch.isfinite(largest) & (largest > 1.0)

    def observe(self) -> None:
        """Learn from a correction, nine estimated rounds after the last one."""
        self.round += 9
        found = self.estimator.observe(self.record(), self.exact, self.weights, "correction")
        assert found is not None
        self.estimator.pool([found])


def exact_round(num_clients: int) -> Callable[[], object]:
    """Return a function that computes one local step of every client."""
    federation = workload("cnn", num_clients, malicious=0.0)
    clients = federation.clients
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    executor = loop.runtime.choose_executor(None)
    weights = federation.layout.flatten(federation.module)
    ctx = RoundContext(
        round=0,
        phase="recover",
        client_ids=federation.client_ids,
        global_weights=weights,
        layout=federation.layout,
        purpose="client",
    )
    executor.plan(clients, weights, ctx)
    return lambda: executor.compute(clients, weights, ctx)


def measure(
    threads: int, problem: Problem, exact: Callable[[], object], repeats: int, cpu_seconds: bool
) -> list[list]:
    """Measure everything with this number of threads; return rows of the table."""
    torch.set_num_threads(threads)
    anchored = Anchored(problem)
    big, small = problem.pairs.delta_g, problem.historical
    memory = {
        "reading": (big.sum, big.nbytes),
        "copying": (lambda: problem.other.copy_(small), 2 * small.nbytes),
        "adding": (lambda: torch.add(small, problem.exact, out=problem.other), 3 * small.nbytes),
    }
    seconds = interleave(
        {
            **{name: function for name, (function, _) in memory.items()},
            "estimated round": problem.estimate,
            "client by client, float32": lambda: problem.client_by_client(torch.float32),
            "client by client, float64": lambda: problem.client_by_client(torch.float64),
            "exact round": exact,
            "pairs added after an exact round": problem.push,
            "anchored: estimated round": anchored.estimate,
            "anchored: all asked, learnt": anchored.observe,
            "middle matrices inverted": problem.solve,
            "threshold: first round": lambda: problem.scan(1),
            "threshold: 11 rounds": lambda: problem.scan(11),
        },
        repeats=repeats,
        cpu_seconds=cpu_seconds,
    )
    time = {name: median(values) for name, values in seconds.items()}
    rate = max(num_bytes / time[name] for name, (_, num_bytes) in memory.items())
    floor = (2 * big.nbytes + 2 * small.nbytes) / rate
    first, later = time["threshold: first round"], time.pop("threshold: 11 rounds")
    time["threshold: a later round"] = (later - first) / 10
    time["threshold: a read of a round"] = small.nbytes / rate
    rows = [
        [f"floor at {rate / 1e9:.1f} GB/s", floor],
        ["floor, differences once", (big.nbytes + 2 * small.nbytes) / rate],
        *([name, t] for name, t in time.items() if name not in memory),
    ]
    return [[threads, n, 1e3 * t, t / floor, t / time["estimated round"]] for n, t in rows]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu-seconds", action="store_true", help="of the process, not wall time")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    exact = exact_round(arguments.clients)
    problem = Problem(arguments.clients, arguments.pairs, 139_960)
    found, wide = problem.estimate(), problem.client_by_client(torch.float64)
    error = float((found - wide).norm() / wide.norm())
    print(f"relative error of the estimates against float64: {error:.1e}\n")
    rows = []
    for threads in arguments.threads:
        rows += measure(threads, problem, exact, arguments.repeats, arguments.cpu_seconds)
    table(rows, HEADERS)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
