"""All clients at once, with stacked weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from fedrec.clients.local import LogMeans
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.clients.step import training_step
from fedrec.executors.cohort import Cohort
from fedrec.executors.kinds import CannotGroupError
from fedrec.executors.watch import EscapeWatch

__all__ = ["train_stacked"]


def train_stacked(cohort: Cohort, updates: Tensor, logs: LogMeans) -> None:
    """Train every client with `torch.func.vmap`, any number of local steps.

    Args:
        cohort: The clients.
        updates: Shape $(c, d)$, written in place.
        logs: Gets what was logged.

    Raises:
        CannotGroupError: If a step reads values, hooks into gradients or changes weights.
    """
    cohort.load()
    module, layout, count = cohort.module, cohort.ctx.layout, len(cohort.clients)
    num_steps = len(cohort.batches[0])
    weights = cohort.global_weights.clone()  # the module may write to what it is given
    parameters = layout.unflatten(weights)
    found: dict[str, Tensor] = {}
    trainer = cohort.clients[0].local_trainer(module, cohort.ctx)
    with trainer.attached() as logged:
        optimizer = LocalOptimizer(module, cohort.clients[0].local_lr)
        shared = num_steps == 1 and optimizer.is_plain_sgd
        if not shared:
            parameters = {n: p.expand(count, *p.shape).clone() for n, p in parameters.items()}
            optimizer.adopt(parameters)
        trainer.hiding_optimizers()
        gradient = _per_client_gradient(module, logged, shared)
        for step, samples in enumerate(cohort.steps()):
            batch = tree_map(lambda x: x.reshape(count, -1, *x.shape[1:]), samples)
            with cohort.ctx.autocast(), warnings.catch_warnings():
                # Of operations that vmap takes client by client, which is torch's business.
                warnings.filterwarnings("ignore", message="There is a performance drop")
                gradients, found = gradient(parameters, batch, trainer.begin(step))
            if shared:
                scale = optimizer.gradient_scale()
                named = {n: g * scale.get(n, 0.0) for n, g in gradients.items()}
                layout.flatten_dict(named, updates)
                cohort.refuse_other_weights(weights)
            else:
                if not all(
                    torch.equal(p, optimizer.twins[n].float()) for n, p in parameters.items()
                ):
                    raise CannotGroupError("it changes its weights itself")
                parameters = optimizer.step(gradients, trainer.is_last_batch)
    if not shared:
        layout.flatten_dict(optimizer.total, updates)
    logs.add({name: value.mean() for name, value in found.items()}, count)


class _TrainingStep(nn.Module):
    """Calls `training_step` as a forward pass, so that `functional_call` can reach it."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, step: int) -> Any:
        with EscapeWatch():
            loss = training_step(self.module, batch, step)
        if loss is None:
            raise TypeError("training_step returned None")
        return loss


def _per_client_gradient(
    module: Any, logs: dict[str, Any], shared: bool
) -> Callable[..., tuple[dict[str, Tensor], dict[str, Tensor]]]:
    call = _TrainingStep(module)
    names = _places(module)

    def loss(parameters: dict[str, Tensor], batch: Any, step: int) -> tuple[Tensor, dict[str, Any]]:
        logs.clear()
        named = {f"module.{place}": parameters[n] for place, n in names.items() if n in parameters}
        value: Tensor = functional_call(call, named, (batch, step), tie_weights=False)
        found = {n: torch.as_tensor(v).float() for n, v in logs.items()}
        logs.clear()
        return value, found

    return vmap(grad(loss, has_aux=True), in_dims=(None if shared else 0, 0, None))


def _places(module: nn.Module) -> dict[str, str]:
    """Return the name of the parameter at each place that holds one, each place once.

    `functional_call` can find them itself, but does not put the parameters of a layer back that is
    in a module twice.
    """
    names = {id(p): n for n, p in module.named_parameters()}
    return {
        f"{owner}.{kind}" if owner else kind: names[id(p)]
        for owner, layer in module.named_modules()
        for kind, p in layer.named_parameters(recurse=False, remove_duplicate=False)
    }
