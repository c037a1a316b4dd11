"""Theorem 1: the guaranteed distance to train-from-scratch beside the one that is reached.

    python benchmarks/theorem.py --csv benchmarks/results/theorem.csv

Twenty clients fit the digits by ridge regression (a quadratic loss) or by softmax regression with
weight decay; both are strongly convex and smooth, and clients use all their data in every step.
A fifth of them is malicious and sends its update reversed. M is measured: the largest distance of
an estimate that the recovery uses from the client's exact update at the same weights. `exact`
multiplies with the clients' true Hessians (Corollary 1).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from timing import table, write_csv
from torch import Tensor

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import FedAvg
from fedrec.attacks import SignFlip
from fedrec.clients import Client
from fedrec.data import Digits
from fedrec.functional import recovery_bound
from fedrec.history import MemoryHistory
from fedrec.recoverers import (
    Estimates,
    Estimator,
    FedRecover,
    PairedLBFGS,
    RecoveryContext,
    TrainFromScratch,
)
from fedrec.testing.problems import VectorModule
from fedrec.types import ClientUpdate, RoundContext, RoundRecord

CLASSES = 10
HEADERS = ("problem", "estimate", "s", "M", "bound", "distance", "distance/bound", "largest", "ACP")


class ConvexClient(Client):
    """A linear model with weight decay, trained on all of the client's data."""

    def __init__(self, client_id: str, x: Tensor, y: Tensor, decay: float, softmax: bool) -> None:
        super().__init__(client_id, num_samples=len(x))
        self.x = torch.cat([x.flatten(1), torch.ones(len(x), 1)], dim=1)
        self.y = torch.nn.functional.one_hot(y, CLASSES).float()
        self.decay, self.softmax = decay, softmax
        # Of the softmax's Hessian, no eigenvalue exceeds 1/2 (Boehning).
        largest = float(torch.linalg.eigvalsh(self.gram.double())[-1])
        self.smoothness = (0.5 if softmax else 1.0) * largest + decay

    @property
    def gram(self) -> Tensor:
        return self.x.T @ self.x / len(self.x)

    def gradient(self, weights: Tensor) -> Tensor:
        matrix = weights.view(-1, CLASSES)
        x, y = self.x.to(weights), self.y.to(weights)
        out = x @ matrix
        residual = (out.softmax(dim=1) if self.softmax else out) - y
        return (x.T @ residual / len(x) + self.decay * matrix).flatten()

    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        return ClientUpdate(update=self.gradient(global_weights), num_samples=self.num_samples)


class Trajectory(TrainFromScratch):
    """Train-from-scratch that keeps its weights."""

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        self.weights = [*(self.weights if t else []), global_weights.double()]
        return super().step(t, global_weights, ctx)


class Measured(FedRecover):
    """FedRecover that keeps its weights, and how far off its worst estimate is."""

    clients: dict[str, ConvexClient]

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        self.weights = [*(self.weights if t else []), global_weights.double()]
        self.error = self.error if t else 0.0
        if self.exact_reason(t, ctx.max_rounds) is None:
            record = ctx.history(t)
            estimates = self._estimates(record, global_weights)[0].updates
            for client_id, estimate in zip(record.client_ids, estimates, strict=True):
                exact = self.clients[client_id].gradient(self.weights[-1])
                self.error = max(self.error, float((estimate.double() - exact).norm()))
        return super().step(t, global_weights, ctx)


class ExactHessians(Estimator):
    """Multiplies with the clients' true Hessians."""

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        matrix = (global_weights - record.global_weights).view(-1, CLASSES)
        products = [
            (c.gram @ matrix + c.decay * matrix).flatten()
            for c in (Measured.clients[client_id] for client_id in record.client_ids)
        ]
        estimates = record.updates + torch.stack(products)
        usable = torch.ones(len(estimates), dtype=torch.bool)
        return Estimates(estimates, estimates.abs().amax(dim=1), usable)


def measure(softmax: bool, rounds: int, decay: float) -> list[tuple[object, ...]]:
    """Return rows of one problem: what was estimated, M, the bound and the distances."""
    data = Digits(num_clients=20)
    clients = []
    for client_id, part in data.client_datasets().items():
        samples = [part[k] for k in range(len(part))]
        x, y = torch.stack([s[0] for s in samples]), torch.tensor([int(s[1]) for s in samples])
        clients.append(ConvexClient(client_id, x.float(), y, decay, softmax))
    module = VectorModule(size=clients[0].x.shape[1] * CLASSES)
    ids = [c.client_id for c in clients]
    federation = Federation(clients, module, malicious=ids[::5])
    lr = 1 / max(c.smoothness for c in clients)
    loop = FederatedLoop(accelerator="cpu", logger=False, enable_progress_bar=False, num_threads=1)
    history, excluded = MemoryHistory(), federation.malicious
    attack = SignFlip()
    loop.record(federation, FedAvg(), history, max_rounds=rounds, server_lr=lr, attack=attack)
    scratch = Trajectory()
    final = loop.recover(federation, history, scratch, excluded).global_weights.double()
    truth = [*scratch.weights, final]
    Measured.clients = {c.client_id: c for c in clients}
    common = {"tolerance_rate": None, "final_rounds": 0}
    methods = [
        ("L-BFGS", 2, Measured(estimator="paired", **common)),
        ("L-BFGS", 8, Measured(estimator=PairedLBFGS(buffer_size=8), **common)),
        ("anchored", 2, Measured(estimator="anchored", **common)),
        ("history", 0, Measured(estimator="history", **common)),
    ]
    if not softmax:
        methods.append(("exact", 0, Measured(estimator=ExactHessians(), **common)))
    rows: list[tuple[object, ...]] = []
    for name, size, recoverer in methods:
        result = loop.recover(federation, history, recoverer, excluded)
        weights = [*recoverer.weights, result.global_weights.double()]
        distances = [float((a - b).norm()) for a, b in zip(weights, truth, strict=True)]
        bounds = [recovery_bound(t, recoverer.error, lr, decay) for t in range(rounds + 1)]
        rows.append(
            (
                "softmax regression" if softmax else "ridge regression",
                name,
                size or "",
                f"{recoverer.error:.2g}",
                f"{bounds[-1]:.2g}",
                f"{distances[-1]:.2g}",
                f"{distances[-1] / bounds[-1]:.2g}",
                f"{max(d / b for d, b in zip(distances[1:], bounds[1:], strict=True)):.2g}",
                f"{result.ledger.acp():.3f}",
            )
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--decay", type=float, default=0.1, help="weight decay, the mu of the losses"
    )
    parser.add_argument("--csv", type=Path, help="write the table there")
    args = parser.parse_args()
    rows = [row for s in (False, True) for row in measure(s, args.rounds, args.decay)]
    table(rows, HEADERS)
    if args.csv is not None:
        write_csv(args.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
