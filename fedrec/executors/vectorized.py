"""All clients at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from fedrec._checks import check_int
from fedrec.clients.base import Client
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import (
    LocalOptimizer,
    as_number,
    capture_logs,
    random_numbers,
    take,
    training_step,
)
from fedrec.exceptions import FedrecWarning
from fedrec.executors.base import Executor
from fedrec.executors.sequential import SequentialExecutor
from fedrec.parameters import keeps_running_statistics
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["VectorizedExecutor", "why_sequential"]

_RANDOM = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def why_sequential(clients: Sequence[Client]) -> str | None:
    """Say why these clients cannot be vectorised, as far as it shows without running them."""
    first = clients[0]
    for client in clients:
        if not isinstance(client, LightningClient):
            return f"client {client.client_id!r} is a {type(client).__name__}"
        if type(client).local_update is not LightningClient.local_update:
            return f"{type(client).__name__} overrides local_update"
    lightning = [c for c in clients if isinstance(c, LightningClient)]
    module = lightning[0].module
    for client in lightning:
        if client.module is not module:
            return f"clients {first.client_id!r} and {client.client_id!r} do not share a module"
    if len({(c.local_steps, c.local_epochs, c.local_lr) for c in lightning}) > 1:
        return "clients differ in local_steps, local_epochs or local_lr"
    for layer in module.modules():
        if isinstance(layer, _RANDOM) and layer.training:
            return f"{type(layer).__name__} draws random numbers"
        if keeps_running_statistics(layer):
            return f"{type(layer).__name__} changes its buffers"
    if not LocalOptimizer(module, lightning[0].local_lr).is_elementwise:
        return "the optimizer does not work elementwise"
    return None


class _TrainingStep(nn.Module):
    """Calls `training_step` as a forward pass, so that `functional_call` can reach it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, step: int) -> Any:
        loss = training_step(self.module, batch, step)
        if loss is None:
            raise TypeError("training_step returned None")
        return loss


class VectorizedExecutor(Executor):
    """Computes the updates of LightningClients that share a module with `torch.func.vmap`.

    Where that is impossible, clients are asked one after another, with one warning that says why:
    clients with other settings or modules of their own, layers that draw random numbers (dropout)
    or keep running statistics, an optimiser that is not elementwise, or a `training_step` that
    `vmap` refuses.
    Whether `vmap` works is tried on two clients before the first round; their updates must agree
    with the sequential ones.

    Fastest for dense networks and for several local steps; convolutions on a CPU are faster one
    client after another (`executor="auto"` knows).

    Args:
        chunk_size: Clients per vectorised call; `None` for as many as keep a few copies of their
            parameters within 256 MiB.

    Examples:
        >>> VectorizedExecutor(chunk_size=10)
        VectorizedExecutor(chunk_size=10)
    """

    def __init__(self, chunk_size: int | None = None) -> None:
        if chunk_size is not None:
            check_int("chunk_size", chunk_size, minimum=1)
        self.chunk_size = chunk_size
        self._sequential = SequentialExecutor()
        self._path: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(chunk_size={self.chunk_size})"

    def plan(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> dict[str, Any]:
        """Choose between `vmap` and one client after another."""
        reason = why_sequential(clients) or self._try(clients[:2], global_weights, ctx)
        self._path = "vmap" if reason is None else "sequential"
        if reason is not None:
            warnings.warn(
                f"VectorizedExecutor works one client after another, because {reason}.",
                FedrecWarning,
                stacklevel=2,
            )
        plan = {"executor": type(self).__name__, "path": self._path}
        if reason is None:
            plan["chunk_size"] = str(self._chunk(global_weights.numel()))
        return plan

    def _try(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> str | None:
        reference = self._sequential.compute(clients, global_weights, ctx)
        try:
            found = self._vectorized(clients, global_weights, ctx)
        except Exception as error:  # noqa: BLE001 - whatever vmap or the module makes of it
            return f"its training_step cannot be vectorised ({str(error).splitlines()[0]})"
        difference = float((found.updates - reference.updates).norm())
        # bfloat16 keeps 8 bits, and the order of summation differs.
        limit = 1e-5 if ctx.autocast_is_off else 5e-2
        if not difference <= limit * float(reference.updates.norm()):
            return f"its vectorised updates differ by {difference:.1e} from the sequential ones"
        return None

    def _chunk(self, num_parameters: int) -> int:
        return self.chunk_size or max(1, (256 << 20) // (16 * num_parameters))

    def compute(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        """Compute all updates along the path that `plan` chose."""
        if self._path is None:
            self.plan(clients, global_weights, ctx)
        if self._path == "sequential":
            return self._sequential.compute(clients, global_weights, ctx)
        return self._vectorized(clients, global_weights, ctx)

    def _vectorized(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> CohortUpdates:
        asked = [c for c in clients if isinstance(c, LightningClient)]
        updates = torch.zeros(len(asked), global_weights.numel(), device=ctx.device)
        batches = [client.batches(ctx) for client in asked]
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, steps in enumerate(batches):
            groups.setdefault(tuple(len(indices) for indices in steps), []).append(row)
        size = self._chunk(global_weights.numel())
        logs: dict[str, list[Tensor]] = {}
        for rows in groups.values():
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                out, logged = self._train(
                    [asked[r] for r in part], [batches[r] for r in part], global_weights, ctx
                )
                updates[part] = out
                for name, values in logged.items():
                    logs.setdefault(name, []).append(values.detach().reshape(-1).float())
        return CohortUpdates(
            client_ids=tuple(c.client_id for c in asked),
            updates=updates,
            num_samples=torch.tensor([c.num_samples for c in asked], dtype=torch.int64),
            metrics={name: as_number(torch.cat(values).mean()) for name, values in logs.items()},
        )

    def _train(
        self,
        clients: Sequence[LightningClient],
        batches: Sequence[Sequence[Any]],
        global_weights: Tensor,
        ctx: RoundContext,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train clients with equal batch sizes; return updates (c, d) and logged values (c,)."""
        module, layout = clients[0].module, ctx.layout
        layout.load(module, global_weights)
        if ctx.buffers is not None:
            layout.load_buffers(module, ctx.buffers)
        out = torch.zeros(len(clients), global_weights.numel(), device=ctx.device)
        num_steps = len(batches[0])
        samples = [_samples(c, steps, ctx) for c, steps in zip(clients, batches, strict=True)]
        parameters = layout.unflatten(global_weights)
        logged: dict[str, Tensor] = {}
        with capture_logs(module, num_steps) as logs:
            optimizer = LocalOptimizer(module, clients[0].local_lr)
            shared = num_steps == 1 and optimizer.is_plain_sgd
            if not shared:
                parameters = {
                    n: p.expand(len(clients), *p.shape).clone() for n, p in parameters.items()
                }
                optimizer.adopt(parameters)
            gradient = _per_client_gradient(module, logs, shared)
            for step in range(num_steps):
                parts = [taken[step] for taken in samples]
                batch = torch.utils._pytree.tree_map(lambda *xs: torch.stack(xs), *parts)
                with ctx.autocast():
                    gradients, logged = gradient(parameters, batch, step)
                if shared:
                    scale = optimizer.gradient_scale()
                    named = {n: g * scale.get(n, 0.0) for n, g in gradients.items()}
                    return layout.flatten_dict(named, out), logged
                parameters = optimizer.step(gradients, clients[0].ends_epoch(step, num_steps))
        return layout.flatten_dict(optimizer.total, out), logged


def _samples(client: LightningClient, steps: Sequence[Any], ctx: RoundContext) -> list[Any]:
    """Return the batch of each local step, drawing the random numbers a sequential client draws."""
    if type(client.dataset) is TensorDataset:
        return [take(client.dataset, indices, ctx.device) for indices in steps]
    with random_numbers(ctx, client.client_id):
        return [take(client.dataset, indices, ctx.device) for indices in steps]


def _per_client_gradient(
    module: Any, logs: dict[str, Any], shared: bool
) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    call = _TrainingStep(module)

    def loss(parameters: dict[str, Tensor], batch: Any, step: int) -> tuple[Tensor, dict[str, Any]]:
        logs.clear()
        named = {f"module.{n}": p for n, p in parameters.items()}
        value: Tensor = functional_call(call, named, (batch, step))
        found = {n: torch.as_tensor(v).float() for n, v in logs.items()}
        logs.clear()
        return value, found

    return vmap(grad(loss, has_aux=True), in_dims=(None if shared else 0, 0, None))
