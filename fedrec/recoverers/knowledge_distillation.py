"""Knowledge distillation: subtract what excluded clients sent, then distil."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.clients.objective import LocalObjective, LocalWork
from fedrec.functional.recovery.distillation import distillation_loss
from fedrec.parameters import ParameterVector
from fedrec.recoverers._final import final_weights, rounds_after, shares
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.context import RecoveryContext

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["KnowledgeDistillation"]


class KnowledgeDistillation(Recoverer):
    r"""Subtracts what the excluded clients have sent, and distils the damage away at the server.

    First, the excluded clients' part in every aggregate is taken out of the final, poisoned model
    $w_T$:

    $$w_T + \eta \sum_{t < T} \sum_{i \in E} p_i^t \, \bar g_t^i$$

    with the recorded updates $\bar g_t^i$, the server's learning rate $\eta$ and the coefficients
    $p_i^t$ of the aggregation rule. For a rule that is no weighted sum (a median, say), $p_i^t$ is
    $1 / m_t$, one by the number of clients of the round, as in the paper's plain averaging. Then
    the result is an approximation.

    The model after the subtraction does not work, since the remaining clients' updates were
    computed on weights that the excluded clients had changed. So it becomes the student of the
    poisoned model: it is trained on the server's data to predict the same softened probabilities.
    Labels are not read. Clean data do not show the poisoned model's reaction to a backdoor's
    trigger, so the student does not learn it; but it does learn the errors that an untargeted
    attack has caused.

    Assumes data at the server, labelled or not, with inputs like the clients'
    (`Federation.server_data`), a history that kept every update of the excluded clients, and a
    module whose `forward` gives logits. Clients are not asked. The numbers of the rounds follow
    those of the recording. The first round subtracts. Each other round is an epoch with the
    module's own optimizer, a new one in every epoch.

    Args:
        num_epochs: Passes over the data, at least 0; with 0 there is no distillation after the
            subtraction.
        batch_size: Samples per batch, at least 1.
        lr: Learning rate of the optimizer; `None` for that of the global model, `server_lr`.
        temperature: Temperature that softens the probabilities, above 0. The paper asks for a high
            one, without a number.

    Raises:
        ConfigurationError: If an argument is out of range; or at the start of a recovery, if the
            history lacks an update of an excluded client, or the server has no data.

    References:
        - Wu et al., Federated Unlearning with Knowledge Distillation, arXiv 2201.09441, 2022.

    Examples:
        >>> KnowledgeDistillation(num_epochs=10).needs_server_data
        True
    """

    needs_server_data = True

    def __init__(
        self,
        *,
        num_epochs: int = 50,
        batch_size: int = 32,
        lr: float | None = None,
        temperature: float = 5.0,
    ) -> None:
        self.num_epochs = check_int("num_epochs", num_epochs, minimum=0)
        self.batch_size = check_int("batch_size", batch_size, minimum=1)
        self.lr = None if lr is None else check_float("lr", lr, minimum=0, open_minimum=True)
        self.temperature = check_float("temperature", temperature, minimum=0, open_minimum=True)

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return one round for the subtraction and one per epoch."""
        return rounds_after(history, 1 + self.num_epochs)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Compute the teacher, and check that the history has all updates to subtract."""
        history.require_excluded(range(max_rounds), type(self).__name__)
        self._teacher = final_weights(history, max_rounds)
        self._first, self._server_lr = len(history.rounds()), history.manifest.server_lr
        self._excluded = [
            (t, history.present(t), gone)
            for t in range(max_rounds)
            if (gone := history.excluded(t))
        ]

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the final, poisoned model."""
        return self._teacher

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the size of the teacher."""
        return 4 * num_parameters

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Subtract, or distil for an epoch."""
        if t == self._first:
            return self._subtracted(global_weights, ctx)
        lr = ctx.server_lr if self.lr is None else self.lr
        teacher = self._teacher.to(global_weights.device)
        objective = _Distillation(teacher, ctx.layout, self.temperature)
        work = LocalWork(local_epochs=1, batch_size=self.batch_size, lr=lr, objective=objective)
        return global_weights - lr * ctx.train_at_server(global_weights, work)

    def _subtracted(self, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Return the weights without the excluded clients' part in every aggregate."""
        total = torch.zeros_like(global_weights, dtype=torch.float64)
        for t, present, gone in self._excluded:
            record = ctx.history(t, gone)
            part = shares(ctx, present, record.client_ids).to(total)
            total += part @ record.updates.to(total)
        return (global_weights + self._server_lr * total).to(global_weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher and its round: a checkpoint is written after the subtraction only."""
        return {"teacher": self._teacher, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self._teacher, self._first = state["teacher"], state["first"]


class _Distillation(LocalObjective):
    """The objective of a student: to predict what a teacher predicts, without labels."""

    def __init__(self, teacher: Tensor, layout: ParameterVector, temperature: float) -> None:
        self._weights = teacher
        self._layout = layout
        self._temperature = temperature
        self._teacher: Any = None

    def loss(self, module: Any, batch: Any, step: int) -> Tensor:
        if self._teacher is None:  # made here: the module is not known before
            self._teacher = copy.deepcopy(module).eval()
            self._layout.load(self._teacher, self._weights)
        inputs = batch if isinstance(batch, Tensor) else batch[0]
        with torch.no_grad():
            targets = self._teacher(inputs)
        return distillation_loss(module(inputs), targets, self._temperature)
