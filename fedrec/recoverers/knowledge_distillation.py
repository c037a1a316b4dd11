"""Subtract what excluded clients sent, then distil."""

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

    First, of the final, poisoned model $w_T$, the excluded clients' part in every aggregate is
    taken back:

    $$w_T + \eta \sum_{t < T} \sum_{i \in E} p_i^t \, \bar g_t^i$$

    with the recorded updates $\bar g_t^i$, the server's learning rate $\eta$ and the coefficients
    $p_i^t$ of the aggregation rule. For a rule that is no weighted sum (a median, say) they are
    $1 / m_t$, one by the number of clients of the round, as in plain averaging, which is what the
    paper assumes; then it is not the part that they really had.

    That model does not work, as the other clients' updates were answers to those that are gone. So
    it becomes the student of the poisoned model: on the server's data, whose labels are not read,
    it is trained to predict the same softened probabilities. What the poisoned model does on a
    backdoor's trigger does not show on clean data, so it is not learnt; what an untargeted attack
    has spoilt is learnt again.

    Assumes data at the server, labelled or not, of inputs like the clients'
    (`Federation.server_data`), a history that kept every update of the excluded clients, and a
    module whose `forward` gives logits. Clients are not asked. The first round, numbered after
    those of the recording, subtracts; each of the others is an epoch of the module's own optimizer,
    which is fresh in every epoch.

    Args:
        num_epochs: Passes over the data, at least 0; with 0 the model is left as it is after the
            subtraction.
        batch_size: Samples per batch, at least 1.
        lr: Learning rate of the optimizer; `None` for that of the global model, `server_lr`.
        temperature: Above 0; a high one, the paper says, without a number.

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
        """Return a round for the subtraction and one per epoch."""
        return rounds_after(history, 1 + self.num_epochs)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Find the teacher, and check that history has what to subtract."""
        history.require_excluded(range(max_rounds), type(self).__name__)
        self._teacher = final_weights(history, max_rounds)
        self._first, self._server_lr = len(history.rounds()), history.manifest.server_lr
        self._excluded = [
            (t, history.present(t), gone)
            for t in range(max_rounds)
            if (gone := history.excluded(t))
        ]

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the poisoned model."""
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
        total = torch.zeros_like(global_weights, dtype=torch.float64)
        for t, present, gone in self._excluded:
            record = ctx.history(t, gone)
            part = shares(ctx, present, record.client_ids).to(total)
            total += part @ record.updates.to(total)
        return (global_weights + self._server_lr * total).to(global_weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher; what to subtract is, once there is anything to go on from."""
        return {"teacher": self._teacher, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        self._teacher, self._first = state["teacher"], state["first"]


class _Distillation(LocalObjective):
    """Predicts what a teacher predicts; labels are not looked at."""

    def __init__(self, teacher: Tensor, layout: ParameterVector, temperature: float) -> None:
        self._weights = teacher
        self._layout = layout
        self._temperature = temperature
        self._teacher: Any = None

    def loss(self, module: Any, batch: Any, step: int) -> Tensor:
        if self._teacher is None:  # the module is known from here on only
            self._teacher = copy.deepcopy(module).eval()
            self._layout.load(self._teacher, self._weights)
        inputs = batch if isinstance(batch, Tensor) else batch[0]
        with torch.no_grad():
            taught = self._teacher(inputs)
        return distillation_loss(module(inputs), taught, self._temperature)
