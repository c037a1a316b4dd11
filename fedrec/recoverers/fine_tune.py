"""Fine-tuning: train the poisoned model on clean data at the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from fedrec._checks import check_float, check_int
from fedrec.clients.objective import LocalWork
from fedrec.data.draw import draw_samples
from fedrec.exceptions import ConfigurationError
from fedrec.random import numpy_generator
from fedrec.recoverers._final import final_weights, rounds_after
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.context import RecoveryContext

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["FineTune"]


class FineTune(Recoverer):
    r"""Trains the final, poisoned model on the server's clean data; clients are not asked.

    Assumes that the server has clean, labelled data (`Federation.server_data`, or `server_samples`
    of a data module), enough of them, and distributed like the clients' data: with few data, or
    data of another distribution, the model gets worse. It does not matter which clients are
    excluded, nor which updates the history kept.

    Training is the module's own, with its `training_step` and its optimizer. Every epoch has a new
    optimizer. An epoch is a round of the recovery; its number follows those of the recording.

    Args:
        num_epochs: Passes over the data, at least 0.
        batch_size: Samples per batch, at least 1.
        lr: Learning rate of the optimizer; `None` for that of the global model, `server_lr`.
        num_samples: Number of the server's samples to use, drawn by the seed of the recording, at
            least 1; `None` for all. A smaller number is a subset of a larger one.
        beta: Concentration of the Dirichlet distribution that the label distribution of the samples
            is drawn from, above 0 (small: few labels); `None` draws samples uniformly. Needs
            `num_samples`, and enough samples of every label at the server to choose from.

    Raises:
        ConfigurationError: If an argument is out of range, or in a recovery, if the server has no
            data or not enough.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023, "Comparing with fine-tuning".

    Examples:
        >>> FineTune(num_epochs=5, num_samples=100).needs_server_data
        True
    """

    needs_server_data = True

    def __init__(
        self,
        *,
        num_epochs: int = 100,
        batch_size: int = 32,
        lr: float | None = None,
        num_samples: int | None = None,
        beta: float | None = None,
    ) -> None:
        self.num_epochs = check_int("num_epochs", num_epochs, minimum=0)
        self.batch_size = check_int("batch_size", batch_size, minimum=1)
        self.lr = None if lr is None else check_float("lr", lr, minimum=0, open_minimum=True)
        if num_samples is not None:
            num_samples = check_int("num_samples", num_samples, minimum=1)
        if beta is not None:
            beta = check_float("beta", beta, minimum=0, open_minimum=True)
            if num_samples is None:
                raise ConfigurationError(
                    "Expected `num_samples` beside `beta`, but got None. HINT: say how many of the "
                    "server's samples to draw."
                )
        self.num_samples = num_samples
        self.beta = beta

    def check_plan(self, max_rounds: int, server_samples: int | None) -> None:
        """Check that the server has enough samples."""
        if server_samples is not None and (self.num_samples or 0) > server_samples:
            raise ConfigurationError(
                f"FineTune takes {self.num_samples} samples, but the server has {server_samples}. "
                "HINT: lower `num_samples`, or raise `server_samples` of the data module."
            )

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return one round per epoch."""
        return rounds_after(history, self.num_epochs)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Compute the final model of the recording."""
        self._final = final_weights(history, max_rounds)

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the final, poisoned model."""
        return self._final

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Train for an epoch."""
        lr = ctx.server_lr if self.lr is None else self.lr
        work = LocalWork(local_epochs=1, batch_size=self.batch_size, lr=lr)
        update = ctx.train_at_server(global_weights, work, self._data(ctx))
        return global_weights - lr * update

    def _data(self, ctx: RecoveryContext) -> Dataset[Any] | None:
        """Return the samples to train on; `None` for all of the server's."""
        data: Any = ctx.server_data
        if self.num_samples is None:
            return None
        self.check_plan(ctx.max_rounds, len(data))
        labels = _labels(data) if self.beta is not None else np.zeros(len(data), dtype=np.int64)
        generator = numpy_generator(ctx.seed, "fine-tune")
        index = draw_samples(labels, self.num_samples, self.beta, generator)
        if type(data) is TensorDataset:
            return TensorDataset(*(tensor[torch.from_numpy(index)] for tensor in data.tensors))
        return Subset(data, index.tolist())


def _labels(data: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    if type(data) is TensorDataset:
        return data.tensors[1].numpy()
    return np.array([int(data[i][1]) for i in range(len(data))], dtype=np.int64)
