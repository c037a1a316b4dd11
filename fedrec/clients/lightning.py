"""A client that trains a LightningModule."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedrec._checks import check_bool, check_float, check_int, of_class
from fedrec.clients.base import Client
from fedrec.clients.batches import (
    CollateFn,
    batch_indices,
    check_map_style,
    collate_name,
    is_plain,
    num_batches,
    take,
)
from fedrec.clients.fit import LocalFit
from fedrec.clients.generators import held_generators, random_numbers
from fedrec.clients.hooks import is_overridden, lightning_class, unwrapped
from fedrec.clients.local import buffers_after, changes_batches, clear_gradients, transferred
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.clients.state import state_of
from fedrec.clients.trainer import LocalTrainer, as_number
from fedrec.exceptions import ConfigurationError, expected
from fedrec.types import ClientUpdate, RoundContext

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LightningClient"]


class LightningClient(Client):
    r"""Trains a LightningModule on its own data, with its own `training_step` and optimiser.

    To the module, a round of local training is a `Trainer.fit` of its own: hooks, `self.trainer`,
    schedulers and manual optimisation work as in Lightning, see the page on Lightning modules.
    The client returns what all its steps together subtracted from the parameters, divided by
    `local_lr`. For one step of plain SGD, that is the mini-batch gradient itself.

    The batches of a round are a function of (seed, round, client), so a recovery replays those of
    the recording. The same goes for whatever training draws (for dropout or augmentation) from
    torch, NumPy's global generator, Python's `random`, or generators that the data set or
    `collate_fn` holds. The module trains in the `train` or `eval` mode it was handed over in. After
    training, all of its state but the parameters is put back. Batches are what a DataLoader makes
    of the samples, named tuples and dicts included, moved to the device.

    Args:
        client_id: Unique name.
        module: Any LightningModule with `training_step` and `configure_optimizers`, of either
            package name, compiled or not. Clients may share one: its parameters are overwritten in
            each call.
        dataset: Map-style data set; a `TensorDataset` is fastest.
        batch_size: Samples per batch; `None`, or more than the client has, for the full batch.
        local_steps: Mini-batch steps per round, at least 1.
        local_epochs: Passes over the data per round instead of `local_steps`.
        local_lr: What an update is divided by, see above; `None` for the learning rate of the
            optimiser, which must have the same one in all its parameter groups.
        drop_last: With `local_epochs`, leave out the last batch of a pass where it is smaller than
            the others. A client with fewer samples than `batch_size` trains on the full batch all
            the same.
        collate_fn: Makes a batch of a list of samples, as in a DataLoader; `None` for torch's
            `default_collate`. It must not depend on anything but the samples and random
            numbers.

    Raises:
        ConfigurationError: If an argument is out of range or the module lacks a method.

    Examples:
        >>> from torch.utils.data import TensorDataset
        >>> from fedrec.models import MLP
        >>> data = TensorDataset(torch.rand(8, 4), torch.randint(3, (8,)))
        >>> LightningClient("a", MLP(in_features=4, num_classes=3), data, batch_size=2)
        LightningClient('a', num_samples=8)
    """

    def __init__(
        self,
        client_id: str,
        module: Any,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        local_steps: int | None = None,
        local_epochs: int | None = None,
        local_lr: float | None = None,
        drop_last: bool = False,
        collate_fn: CollateFn | None = None,
    ) -> None:
        module = unwrapped(module)
        if lightning_class(module) is None:
            raise ConfigurationError(
                expected(
                    "module",
                    "a LightningModule with `training_step` and `configure_optimizers`",
                    module if isinstance(module, type) else type(module).__name__,
                    hint=of_class(module) or "derive it from `pytorch_lightning.LightningModule`.",
                )
            )
        for method in ("training_step", "configure_optimizers"):
            if not is_overridden(module, method):
                raise ConfigurationError(
                    expected(
                        "module",
                        f"a LightningModule with `{method}`",
                        type(module).__name__,
                        hint=f"write `{method}`.",
                    )
                )
        if batch_size is not None:
            batch_size = check_int("batch_size", batch_size, minimum=1)
        if local_steps is not None and local_epochs is not None:
            raise ConfigurationError(
                expected(
                    "local_epochs",
                    "None beside `local_steps`",
                    local_epochs,
                    hint="give one of them.",
                )
            )
        if local_epochs is None:
            local_steps = 1 if local_steps is None else local_steps
            local_steps = check_int("local_steps", local_steps, minimum=1)
        else:
            local_epochs = check_int("local_epochs", local_epochs, minimum=1)
        if local_lr is not None:
            local_lr = check_float("local_lr", local_lr, minimum=0, open_minimum=True)
        drop_last = check_bool("drop_last", drop_last)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigurationError(expected("collate_fn", "a function or None", collate_fn))
        check_map_style("dataset", dataset)
        samples: Any = dataset
        num_samples = len(samples)
        if num_samples == 0:
            raise ConfigurationError(
                f"Client {client_id!r} has no data. HINT: use fewer clients or another partition."
            )
        super().__init__(client_id, num_samples=num_samples)
        self.module: Any = module
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.local_steps = local_steps
        self.local_epochs = local_epochs
        self.local_lr = local_lr
        self.drop_last = drop_last
        self.collate_fn = collate_fn

    def with_dataset(self, dataset: Dataset[Any]) -> Self:
        """Return a copy of the client with other data but the same `num_samples`, its weight."""
        client = copy.copy(self)
        client.dataset = dataset
        return client

    def _amount(self, ctx: RoundContext) -> tuple[int | None, int | None, int | None]:
        """Return local steps, local epochs (one of them is `None`) and the batch size."""
        steps, epochs, size = self.local_steps, self.local_epochs, self.batch_size
        work = ctx.work
        if work is not None:
            if work.local_steps is not None or work.local_epochs is not None:
                steps, epochs = work.local_steps, work.local_epochs
            size = size if work.batch_size is None else work.batch_size
        return steps, epochs, size

    def batches(self, ctx: RoundContext) -> list[np.ndarray]:
        """Return the sample indices of each local step of this round."""
        steps, epochs, batch_size = self._amount(ctx)
        return batch_indices(
            seed=ctx.seed,
            round=ctx.round,
            client_id=self.client_id,
            num_samples=len(self.dataset),
            batch_size=batch_size,
            local_steps=steps,
            local_epochs=epochs,
            drop_last=self.drop_last,
            purpose="batch" if ctx.batch_policy == "replay" else "batch-fresh",
        )

    def training_args(self) -> dict[str, Any]:
        """Return the arguments of local training by name."""
        names = ("batch_size", "local_steps", "local_epochs", "local_lr", "drop_last")
        arguments = {name: getattr(self, name) for name in names}
        return {**arguments, "collate_fn": collate_name(self.collate_fn)}

    def generators(self) -> list[Any]:
        """Return the generators of random numbers that the data set and `collate_fn` hold."""
        if is_plain(self.dataset, self.collate_fn):
            return []
        return held_generators(self.dataset, self.collate_fn)

    def read(self, indices: np.ndarray, device: torch.device) -> Any:
        """Return samples of the client as a batch.

        Args:
            indices: Indices of the samples.
            device: The device to move the batch to.
        """
        return take(self.dataset, indices, device, self.collate_fn, f"client {self.client_id!r}")

    def batch(self, module: Any, indices: np.ndarray, device: torch.device) -> Any:
        """Return samples as the batch that the module trains on, after its transfer hooks.

        Args:
            module: The client's module, or a copy of it.
            indices: Indices of the samples.
            device: The device to move the batch to.
        """
        if not changes_batches(module):
            return self.read(indices, device)
        return transferred(module, self.read(indices, torch.device("cpu")), device)

    def num_local_steps(self, ctx: RoundContext) -> int:
        """Return the number of mini-batches of this round."""
        steps, epochs, batch_size = self._amount(ctx)
        return num_batches(
            num_samples=len(self.dataset),
            batch_size=batch_size,
            local_steps=steps,
            local_epochs=epochs,
            drop_last=self.drop_last,
        )

    def local_trainer(self, module: Any, ctx: RoundContext | None = None) -> LocalTrainer:
        """Return the object that `self.trainer` is in local training.

        Args:
            module: The client's module, or a copy of it.
            ctx: The round; `None` for a round on the CPU with the client's own settings.
        """
        work: Any = SimpleNamespace(work=None) if ctx is None else ctx
        epochs = self._amount(work)[1] or 1
        return LocalTrainer(
            module,
            max_epochs=epochs,
            num_training_batches=self.num_local_steps(work) // epochs,
            device=None if ctx is None else ctx.device,
            autocast=nullcontext if ctx is None else ctx.autocast,
        )

    def local_update(self, global_weights: Tensor, ctx: RoundContext) -> ClientUpdate:
        """Train from the global weights; return what was subtracted, divided by `local_lr`."""
        module, layout, batches = self.module, ctx.layout, self.batches(ctx)
        start = layout.load(module, global_weights)
        if ctx.buffers is not None:
            layout.load_buffers(module, ctx.buffers)
        work = ctx.work
        trainer = self.local_trainer(module, ctx)
        state = state_of(module)
        changes: list[str] | None = None
        try:
            with (
                random_numbers(ctx, self.client_id, self.generators()),
                trainer.attached() as logs,
                torch.enable_grad(),
            ):
                optimizer = LocalOptimizer(module, self.local_lr, None if work is None else work.lr)
                objective = None if work is None else work.objective
                fit = LocalFit(self.client_id, self.batch, trainer, optimizer, ctx, objective)
                total = fit.run(batches, start)
            update = layout.flatten_dict(total, torch.empty_like(global_weights))
            metrics = {name: as_number(value, name) for name, value in logs.items()}
            changes = state.changes() if state.has_changed else []
            buffers = buffers_after(module, ctx, changes)
        finally:
            clear_gradients(module.parameters())
            if changes != []:  # `None` after an error: anything may have changed
                state.restore()
        return ClientUpdate(
            update=update, num_samples=self.num_samples, metrics=metrics, buffers=buffers
        )
