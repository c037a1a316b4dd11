"""Whatever way of computing the cohort is fastest and right."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedrec._checks import check_choice, check_int
from fedrec.clients.base import Client
from fedrec.clients.batches import is_plain
from fedrec.clients.hooks import needs_sequential
from fedrec.clients.lightning import LightningClient
from fedrec.clients.local import LogMeans, gradients_of, scaled
from fedrec.clients.optimizer import LocalOptimizer
from fedrec.clients.state import state_of
from fedrec.exceptions import FedrecWarning
from fedrec.executors.base import Executor
from fedrec.executors.batches import CannotJoinError, ClientData
from fedrec.executors.choice import PATHS, Choice, choose, reason_of
from fedrec.executors.cohort import Cohort
from fedrec.executors.kinds import CannotGroupError
from fedrec.executors.sequential import SequentialExecutor
from fedrec.executors.watch import refuse_hooks, traceless
from fedrec.parameters import keeps_running_statistics
from fedrec.random import reused_generator, torch_generator
from fedrec.types import CohortUpdates, RoundContext

__all__ = ["VectorizedExecutor"]

# Relative differences of two ways to compute an update: what rounding explains in all clients, and
# what a single one may show where a ReLU or a maximum was nearly tied.
_ROUNDING = 1e-4
_ROUNDING_IN_BFLOAT16 = 5e-2
_TIPPED = 1e-2
# A change of weights like that of rounding, and how many times as much as it does rounding may do.
_ROUNDED = 2.0**-22
_TIMES_ROUNDED = 16
_NUM_DOUBTED = 8
# Updates to every audited one, in rounds that do not ask all clients.
_PER_AUDIT = 20


class VectorizedExecutor(Executor):
    r"""Computes the updates of LightningClients that share a module, the fastest way that is right.

    - `"grouped"`: one forward and backward pass over the batches of all clients, with the global
      weights that they share in a single local step. Each layer sums its weight gradients client
      by client, straight into the rows of the result. It is `"grouped (winners)"` where numba is
      installed and max-pooling follows a convolution, before or after a ReLU, a LeakyReLU or
      nothing: only outputs that win their window carry a gradient, and no others are kept.
    - `"vmap"`: `torch.func.vmap` over stacked weights, one copy for each client.
    - `"loop"`: one client after another, with everything that they share done once; the same bits
      as the `SequentialExecutor`.
    - `"sequential"`: the `SequentialExecutor`, right for every `Client`.

    The rule:

    1. Clients that are no LightningClients, override `local_update`, have modules of their own or
       other settings than the rest, or whose module does something between its batches (hooks,
       manual optimisation, a scheduler that watches a metric), is compiled, or has layers that
       keep running statistics: `"sequential"`.
    2. One local step of plain SGD: the first of `"grouped"`, `"vmap"` and `"loop"` that is not
       refused.
    3. Several steps, or another optimiser: `"vmap"` unless it is refused; then `"sequential"`.
    4. `"vmap"` is left out on a CPU if the module has convolutions, which are slower there with
       stacked weights than one after another. `"loop"` goes before `"grouped"` there if activations
       take more than 16 MiB a client and no convolution is computed by its winners: nothing is to
       be gained then. Winners are computed in float32, where at most a third of the outputs
       win, without dilation, groups, `ceil_mode` and indices.

    `"grouped"` is refused where a trainable parameter is not used exactly once, by a `Linear`,
    `Conv1d`, `Conv2d`, `LayerNorm` or `GroupNorm` layer, where samples meet in any other way than
    in one mean or sum that the loss is linear in, or where a client has labels that the loss leaves
    out. `"vmap"` is refused by torch, for similar reasons, and with optimisers that may not be
    elementwise: some of torch's, and all with hooks or of another class. All but `"sequential"` are
    refused where local training changes anything, parameters included but for the optimiser's step,
    or looks at its optimisers or at what it has logged; `"grouped"` and `"vmap"` also where it
    draws random numbers, reads the value of a tensor or hooks into gradients. Before the first
    round every path is tried on up to eight clients and refused if the updates of half of them
    differ from the sequential ones by more than 1e-5, any by more than 1e-2 (both 5e-2 in
    bfloat16), or what they log does. (Rounding may tip over a ReLU that is nearly at zero, which is
    why a single client may differ more.)

    What could change later is watched in every round. In every round that asks all clients or 20,
    the update of one, drawn by seed from those that are computed with others, is computed
    sequentially as well; a round that asks $m$ is drawn with probability $m / 20$, and a client
    that is asked alone is computed once. The optimiser, the clients' settings and their data are
    those of the round. Where a path is refused in a later round, or an update differs, the round is
    computed again sequentially, and so are all that follow. A warning says so once, and
    `RunResult.execution`, the round records of the history and the results keep it as `departure`.

    Args:
        path: `"auto"` for the rule, or one of the paths, to take it unless it is refused.
        chunk_size: Clients computed at once; `None` for as many as keep activations (`"grouped"`)
            or copies of their weights (`"vmap"`) within 256 MiB on a CPU, 2 GiB on a GPU.
        warn: Warn where clients are computed one after another because the rest was refused.
        audit: Clients a round whose updates are computed sequentially as well, 0 or more.

    Raises:
        ConfigurationError: If an argument is out of range.

    Examples:
        >>> VectorizedExecutor(chunk_size=10)
        VectorizedExecutor(path='auto', chunk_size=10, audit=1)
    """

    def __init__(
        self,
        *,
        path: str = "auto",
        chunk_size: int | None = None,
        warn: bool = True,
        audit: int = 1,
    ) -> None:
        check_choice("path", path, ("auto", *PATHS, "sequential"))
        if chunk_size is not None:
            chunk_size = check_int("chunk_size", chunk_size, minimum=1)
        self.path = path
        self.chunk_size = chunk_size
        self.warn = warn
        self.audit = check_int("audit", audit, minimum=0)
        self._sequential = SequentialExecutor()
        self._data: ClientData | None = None
        self._choices: dict[bool, Choice] = {}
        self._num_clients = 0

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(path={self.path!r}, chunk_size={self.chunk_size}, "
            f"audit={self.audit})"
        )

    def plan(
        self, clients: Sequence[Client], global_weights: Tensor, ctx: RoundContext
    ) -> dict[str, Any]:
        """Choose the path by the rule in the class description."""
        self._data, self._choices, self.departure = None, {}, None
        self._num_clients = len(clients)
        lightning = [c for c in clients if isinstance(c, LightningClient)]
        reason = _why_sequential(clients)
        if reason is None and self.path != "sequential":
            self._state = state_of(lightning[0].module)
            try:
                self._configure(lightning[0], ctx)
            except CannotGroupError as error:
                reason = str(error)
        if reason is not None or self.path == "sequential":
            self._choices[False] = Choice("sequential", refusals=(reason,) if reason else ())
        else:
            self._data = ClientData(lightning, ctx.device)
            cohort = self._cohort(self._data, lightning, global_weights, ctx)
            for direct, rows in self._kinds(cohort).items():
                self._choices[direct] = self._choose(direct, cohort.select(rows))
        choices = list(self._choices.values())
        plan: dict[str, Any] = {
            "executor": type(self).__name__,
            "path": " and ".join(choice.name for choice in choices),
        }
        if any(choice.path in PATHS for choice in choices):
            plan["audit"] = self.audit
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
        if self._data is None or not usual or self.departure is not None:
            return self._sequential.compute(clients, global_weights, ctx)
        lightning = [c for c in clients if isinstance(c, LightningClient)]  # all of them
        try:
            sent = self._compute_together(self._data, lightning, global_weights, ctx)
            wrong = sent and self._audit(lightning, sent.updates, global_weights, ctx)
        except Exception as error:  # noqa: BLE001 - whatever vmap or the module makes of it
            return self._depart(clients, global_weights, ctx, reason=reason_of(error))
        if sent is None:
            return self._sequential.compute(clients, global_weights, ctx)
        if not wrong:
            return sent
        return self._depart(clients, global_weights, ctx, **wrong)

    def _compute_together(
        self,
        data: ClientData,
        clients: Sequence[LightningClient],
        global_weights: Tensor,
        ctx: RoundContext,
    ) -> CohortUpdates | None:
        """Compute along the chosen paths; `None` where the sequential one was chosen."""
        # It may have changed between rounds, by a callback for instance.
        reason = _unlike(clients)
        if reason is not None:
            raise CannotGroupError(reason)
        module, tried = clients[0].module, self._state
        self._state = state_of(module)
        self._configure(clients[0], ctx)
        cohort = self._cohort(data, clients, global_weights, ctx)
        kinds = self._kinds(cohort)
        for direct, rows in kinds.items():
            # Other work than the clients' own may be of another kind than what was planned for.
            if direct not in self._choices:
                self._choices[direct] = self._choose(direct, cohort.select(rows))
        if any(self._choices[direct].path == "sequential" for direct in kinds):
            return None
        updates = torch.empty(len(clients), global_weights.numel(), device=ctx.device)
        logs = LogMeans()
        together = any(self._choices[direct].path != "loop" for direct in kinds)
        if self._state is not tried and together:
            refuse_hooks(module)
        with traceless(self._state):
            for direct, rows in kinds.items():
                choice = self._choices[direct]
                try:
                    cohort.train(choice.train, choice.chunk_size, rows, updates, logs)
                except CannotJoinError:  # of samples that differ in length, in this round alone
                    return None
        return CohortUpdates(
            client_ids=tuple(c.client_id for c in clients),
            updates=updates,
            num_samples=torch.tensor([c.num_samples for c in clients], dtype=torch.int64),
            metrics=logs.result(),
        )

    def _audit(
        self,
        clients: Sequence[LightningClient],
        updates: Tensor,
        global_weights: Tensor,
        ctx: RoundContext,
    ) -> dict[str, Any] | None:
        """Compute some clients' updates sequentially, too; return how they differ, or `None`."""
        if self.audit == 0 or len(clients) == 1:  # nobody else's samples are there
            return None
        generator = reused_generator(ctx.seed, "audit", ctx.round)
        if len(clients) < self._num_clients and generator.random() >= len(clients) / _PER_AUDIT:
            return None
        rows = generator.permutation(len(clients)).tolist()
        # What is computed by itself cannot be mistaken for a part of the others.
        sizes = [_batch_size(client) for client in clients]
        alone = {size for size, count in Counter(sizes).items() if count == 1}
        rows.sort(key=lambda row: sizes[row] in alone)
        rows = rows[: max(self.audit, _NUM_DOUBTED)]
        differences = [
            self._difference(clients[row], updates[row], global_weights, ctx)
            for row in rows[: self.audit]
        ]
        if not any(differences):
            return None
        # A ReLU or a maximum that was nearly tied makes one client differ a little, not most.
        differences += [
            self._difference(clients[row], updates[row], global_weights, ctx)
            for row in rows[self.audit :]
        ]
        largest = max(differences)
        if largest <= _TIPPED and 2 * sum(d > 0 for d in differences) <= len(rows):
            return None
        client = clients[rows[differences.index(largest)]].client_id
        return {
            "client": client,
            "difference": largest,
            "reason": "updates differ from the sequential ones",
        }

    def _difference(
        self, client: LightningClient, update: Tensor, global_weights: Tensor, ctx: RoundContext
    ) -> float:
        """Return how far an update is from the sequential one, relative to that."""
        alone = self._alone(client, global_weights, ctx)
        if alone is None:
            return math.inf
        norms = [torch.linalg.vector_norm(vector) for vector in (alone - update, alone)]
        distance, size = torch.stack(norms).tolist()
        if not math.isfinite(size):
            return 0.0 if torch.equal(update.isfinite(), alone.isfinite()) else math.inf
        limit = _ROUNDING if ctx.autocast_is_off else _ROUNDING_IN_BFLOAT16
        if distance <= limit * size:
            return 0.0
        # Where contributions nearly cancel, as at a minimum, rounding is most of what is left.
        signs = torch_generator(ctx.seed, "audit", ctx.round, client.client_id)
        noise = torch.randint(2, global_weights.shape, generator=signs).mul_(2).sub_(1)
        moved = global_weights * (1 + _ROUNDED * noise.to(global_weights))
        nearby = self._alone(client, moved, ctx)
        if nearby is not None and distance <= _TIMES_ROUNDED * float((nearby - alone).norm()):
            return 0.0
        return distance / size if size else math.inf

    def _alone(
        self, client: LightningClient, global_weights: Tensor, ctx: RoundContext
    ) -> Tensor | None:
        """Return a client's update, computed sequentially; `None` if it is unusable."""
        choice = self._choices.get(True)
        together = choice is not None and choice.path != "loop"
        if (
            not together
            or not self._plain_sgd
            or not is_plain(client.dataset, client.collate_fn)
            or client.num_local_steps(ctx) > 1
        ):
            sent = self._sequential.compute([client], global_weights, ctx)
            return sent.updates[0] if sent.client_ids else None
        # The same in less time, since nothing draws random numbers: the watch has just seen it.
        module, layout = client.module, ctx.layout
        layout.load(module, global_weights)
        parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        trainer = client.local_trainer(module, ctx).hiding_optimizers()
        try:
            with trainer.attached(), torch.enable_grad():
                batch = client.read(client.batches(ctx)[0], ctx.device)
                gradients = gradients_of(module, parameters, batch, 0, ctx)
        finally:
            self._state.restore()
        if gradients is None:
            return torch.zeros_like(global_weights)
        return layout.flatten_dict(scaled(gradients, self._scale), torch.empty_like(global_weights))

    def _depart(
        self,
        clients: Sequence[Client],
        global_weights: Tensor,
        ctx: RoundContext,
        *,
        reason: str,
        client: str | None = None,
        difference: float | None = None,
    ) -> CohortUpdates:
        """Compute a round again, one client after another; all later rounds will be so, too."""
        sent = self._sequential.compute(clients, global_weights, ctx)
        self.departure = {
            "round": ctx.round,
            "reason": reason,
            "client": client,
            "difference": difference if difference is None or difference < math.inf else None,
        }
        where = "" if client is None else f" (client {client!r} by {difference:.2g} of its size)"
        warnings.warn(
            f"From round {ctx.round} on, clients are computed one after another, since computing "
            f"them together is not right any more: {reason}{where}. The round was computed again.",
            FedrecWarning,
            stacklevel=2,
        )
        return sent

    def _configure(self, client: LightningClient, ctx: RoundContext) -> None:
        """Take note of the optimiser that the module configures in this round."""
        try:
            with client.local_trainer(client.module, ctx).attached():
                optimizer = LocalOptimizer(client.module, client.local_lr)
        finally:
            self._state.restore()
        if any(config.reduce_on_plateau for config in optimizer.schedulers):
            raise CannotGroupError("a scheduler watches a metric")
        self._plain_sgd, self._scale = optimizer.is_plain_sgd, optimizer.gradient_scale()
        self._elementwise = optimizer.is_elementwise
        choice = self._choices.get(False)
        if not self._elementwise and choice is not None and choice.path != "sequential":
            raise CannotGroupError("the optimizer does not work elementwise")

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
        found = choose(
            cohort, self._state, direct=direct, elementwise=self._elementwise, path=self.path
        )
        if found.chunk_size is None or self.chunk_size is None:
            return found
        return replace(found, chunk_size=self.chunk_size)


def _batch_size(client: LightningClient) -> int:
    return min(client.batch_size or client.num_samples, client.num_samples)


def _why_sequential(clients: Sequence[Client]) -> str | None:
    """Say why these clients can only be asked one by one, as far as it shows without running."""
    lightning = [c for c in clients if isinstance(c, LightningClient)]
    for client in clients:
        if not isinstance(client, LightningClient):
            return f"client {client.client_id!r} is a {type(client).__name__}"
        if type(client).local_update is not LightningClient.local_update:
            return f"{type(client).__name__} overrides local_update"
    unlike = _unlike(lightning)
    if unlike is not None:
        return unlike
    first = lightning[0]
    reason = needs_sequential(first.module)
    if reason is not None:
        return reason
    for layer in first.module.modules():
        if keeps_running_statistics(layer):
            return f"{type(layer).__name__} changes its buffers"
    return None


def _unlike(clients: Sequence[LightningClient]) -> str | None:
    """Say how clients differ that can only be trained together if they are alike, or `None`."""
    first = clients[0]
    for client in clients:
        if client.module is not first.module:
            return f"clients {first.client_id!r} and {client.client_id!r} do not share a module"
    if len({(c.local_steps, c.local_epochs, c.local_lr) for c in clients}) > 1:
        return "clients differ in local_steps, local_epochs or local_lr"
    return None
