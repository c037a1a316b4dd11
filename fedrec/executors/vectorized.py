"""Whatever way of computing the cohort is fastest and right."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_choice, check_int
from fedrec.clients.base import Client
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import LogMeans, capture_logs
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.exceptions import FedrecWarning
from fedrec.executors.base import Executor
from fedrec.executors.batches import ClientData
from fedrec.executors.choice import PATHS, Choice, choose
from fedrec.executors.cohort import Cohort
from fedrec.executors.sequential import SequentialExecutor
from fedrec.parameters import keeps_running_statistics
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["VectorizedExecutor"]


class VectorizedExecutor(Executor):
    r"""Computes the updates of LightningClients that share a module, the fastest way that is right.

    - `"grouped"`: one forward and backward pass over the batches of all clients, with the global
      weights that they share in a single local step. Each layer sums its weight gradients client
      by client, straight into the rows of the result.
    - `"vmap"`: `torch.func.vmap` over stacked weights, one copy for each client.
    - `"loop"`: one client after another, with everything that they share done once; the same bits
      as the `SequentialExecutor`.
    - `"sequential"`: the `SequentialExecutor`, right for every `Client`.

    The rule:

    1. Clients that are no LightningClients, override `local_update`, have modules of their own or
       other settings than the rest, or whose layers keep running statistics: `"sequential"`.
    2. One local step of plain SGD: the first of `"grouped"`, `"vmap"` and `"loop"` that is not
       refused.
    3. Several steps, or another optimiser: `"vmap"` unless it is refused; then `"sequential"`.
    4. `"vmap"` is left out on a CPU if the module has convolutions, which are slower there with
       stacked weights than one after another.

    `"grouped"` is refused where a trainable parameter is not used exactly once, by a `Linear`,
    `Conv1d`, `Conv2d`, `LayerNorm` or `GroupNorm` layer, or where a step draws random numbers or
    reads the value of a tensor. `"vmap"` is refused by torch, for similar reasons, and with
    optimisers that are not elementwise. Before the first round every path is tried on up to eight
    clients and refused if the updates of half of them differ from the sequential ones by more than
    1e-5 (5e-2 in bfloat16), any by more than 1e-2, or what they log does. (Rounding may tip over a
    ReLU that is nearly at zero, which is why a single client may differ more.) For `"grouped"` the
    same is tried with batches that repeat one sample, which shows a loss that is no mean over
    samples.

    Args:
        path: `"auto"` for the rule, or one of the paths, to take it unless it is refused.
        chunk_size: Clients computed at once; `None` for as many as keep activations (`"grouped"`)
            or copies of their weights (`"vmap"`) within 256 MiB on a CPU, 2 GiB on a GPU.
        warn: Warn where clients are computed one after another because the rest was refused.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> VectorizedExecutor(chunk_size=10)
        VectorizedExecutor(path='auto', chunk_size=10)
    """

    def __init__(
        self, path: str = "auto", chunk_size: int | None = None, warn: bool = True
    ) -> None:
        check_choice("path", path, ("auto", *PATHS, "sequential"))
        if chunk_size is not None:
            chunk_size = check_int("chunk_size", chunk_size, minimum=1)
        self.path = path
        self.chunk_size = chunk_size
        self.warn = warn
        self._sequential = SequentialExecutor()
        self._data: ClientData | None = None
        self._choices: dict[bool, Choice] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(path={self.path!r}, chunk_size={self.chunk_size})"

    def plan(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> dict[str, Any]:
        """Choose the path by the rule in the class description."""
        self._data, self._choices = None, {}
        reason = _why_sequential(clients)
        if reason is not None or self.path == "sequential":
            self._choices[False] = Choice("sequential", refusals=(reason,) if reason else ())
        else:
            lightning = [c for c in clients if isinstance(c, LightningClient)]
            module = lightning[0].module
            self._data = ClientData(lightning, ctx.device)
            with capture_logs(module, 1):
                optimizer = LocalOptimizer(module, lightning[0].local_lr)
            self._plain_sgd, self._elementwise = optimizer.is_plain_sgd, optimizer.is_elementwise
            self._scale = optimizer.gradient_scale()
            cohort = self._cohort(self._data, lightning, global_weights, ctx)
            for direct, rows in self._kinds(cohort).items():
                self._choices[direct] = self._choose(direct, cohort.select(rows))
        choices = list(self._choices.values())
        plan: dict[str, Any] = {
            "executor": type(self).__name__,
            "path": " and ".join(choice.path for choice in choices),
        }
        sizes = [choice.chunk_size for choice in choices if choice.chunk_size is not None]
        if sizes:
            plan["chunk_size"] = min(sizes)
        refusals = [why for choice in choices for why in choice.refusals]
        if refusals:
            plan["refused"] = "; ".join(refusals)
        if self.warn and any(c.refusals and c.path in ("loop", "sequential") for c in choices):
            warnings.warn(
                f"VectorizedExecutor works one client after another, because {plan['refused']}.",
                FedrecWarning,
                stacklevel=2,
            )
        return plan

    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Compute all updates along the path that `plan` chose."""
        if not self._choices:
            self.plan(clients, global_weights, ctx)
        # Of other work than usual only the number of steps is understood below.
        usual = ctx.work is None or ctx.work.is_as_usual
        if self._data is None or not usual:
            return self._sequential.compute(clients, global_weights, ctx)
        lightning = [c for c in clients if isinstance(c, LightningClient)]
        cohort = self._cohort(self._data, lightning, global_weights, ctx)
        kinds = self._kinds(cohort)
        for direct, rows in kinds.items():
            # Other work than the clients' own may be of another kind than what was planned for.
            if direct not in self._choices:
                self._choices[direct] = self._choose(direct, cohort.select(rows))
        if any(self._choices[direct].path == "sequential" for direct in kinds):
            return self._sequential.compute(clients, global_weights, ctx)
        updates = torch.empty(len(clients), global_weights.numel(), device=ctx.device)
        logs = LogMeans()
        for direct, rows in kinds.items():
            choice = self._choices[direct]
            cohort.train(PATHS[choice.path], choice.chunk_size, rows, updates, logs)
        return CohortUpdates(
            client_ids=tuple(c.client_id for c in clients),
            updates=updates,
            num_samples=torch.tensor([c.num_samples for c in clients], dtype=torch.int64),
            metrics=logs.result(),
        )

    def _cohort(
        self,
        data: ClientData,
        clients: Sequence[LightningClient],
        global_weights: Tensor,
        ctx: RoundContext,
    ) -> Cohort:
        return Cohort(
            clients=clients,
            batches=[client.batches(ctx) for client in clients],
            data=data,
            scale=self._scale,
            global_weights=global_weights,
            ctx=ctx,
        )

    def _kinds(self, cohort: Cohort) -> dict[bool, list[int]]:
        """Return the rows of clients that take one step of plain SGD (True), and the others."""
        kinds: dict[bool, list[int]] = {}
        for row, steps in enumerate(cohort.batches):
            kinds.setdefault(len(steps) == 1 and self._plain_sgd, []).append(row)
        return kinds

    def _choose(self, direct: bool, cohort: Cohort) -> Choice:
        found = choose(cohort, direct=direct, elementwise=self._elementwise, path=self.path)
        if found.chunk_size is None or self.chunk_size is None:
            return found
        return replace(found, chunk_size=self.chunk_size)


def _why_sequential(clients: Sequence[Client]) -> str | None:
    """Say why these clients can only be asked one by one, as far as it shows without running."""
    lightning = [c for c in clients if isinstance(c, LightningClient)]
    for client in clients:
        if not isinstance(client, LightningClient):
            return f"client {client.client_id!r} is a {type(client).__name__}"
        if type(client).local_update is not LightningClient.local_update:
            return f"{type(client).__name__} overrides local_update"
    first = lightning[0]
    for client in lightning:
        if client.module is not first.module:
            return f"clients {first.client_id!r} and {client.client_id!r} do not share a module"
    if len({(c.local_steps, c.local_epochs, c.local_lr) for c in lightning}) > 1:
        return "clients differ in local_steps, local_epochs or local_lr"
    for layer in first.module.modules():
        if keeps_running_statistics(layer):
            return f"{type(layer).__name__} changes its buffers"
    return None
