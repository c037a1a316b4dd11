"""Gradient ascent: a client that leaves unlearns its own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.clients.objective import LocalObjective, LocalWork
from fedrec.exceptions import ConfigurationError
from fedrec.functional.recovery.ascent import (
    distance_to_random_models,
    project_onto_ball,
    reference_weights,
)
from fedrec.parameters import ParameterVector
from fedrec.recoverers._final import final_weights, rounds_after, shares
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.context import RecoveryContext

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["GradientAscent"]


class GradientAscent(Recoverer):
    r"""Lets the client that leaves climb its own loss, close to a model without its share (PGA).

    The client that leaves is the *target*. The numbers of the rounds follow those of the recording:

    1. The server takes the target's last model $w_i = w_{T-1} - \eta \bar g_{T-1}^i$ out of the
       final model: $w_{\mathrm{ref}} = (w_T - p_i w_i) / (1 - p_i)$, where $p_i$ is the target's
       share in the aggregate. For $p_i = 1/N$ this is the paper's $(N w_T - w_i) / (N - 1)$, which
       is also used for rules that are no weighted sum.
    2. The target starts from $w_{\mathrm{ref}}$ and does gradient *ascent* on its own data, with
       clipped gradients, and with a projection onto the ball
       $\lVert w - w_{\mathrm{ref}} \rVert_2 \le \delta$ after every step. It stops early once its
       model is far enough from $w_i$, or its accuracy is low enough.
    3. The remaining clients train for `final_rounds` rounds, with the recorded rule.

    Assumes that the target cooperates honestly: the method is for a client that wants its data to
    be forgotten, not against attackers. A recovery with `attack=` is refused if an excluded client
    is malicious. The target has to be a `LightningClient` that is still in the federation. The
    ledger has what it is asked for, but the ACP does not count it: that is about the remaining
    clients. The history has to have kept the target's last update.

    The paper has one target. With several, all their shares are taken out, every target climbs from
    $w_{\mathrm{ref}}$, and the mean of their models is taken, which is in the ball, too. A target
    that took no part in the last round has no share to take out.

    Args:
        num_epochs: Passes of the target over its data, at least 1.
        batch_size: Samples per batch of the target, at least 1.
        lr: Learning rate of the target, with the module's own optimizer (published: SGD with
            momentum 0.9).
        clip_norm: Longest gradient, above 0; `None` for no limit.
        radius: $\delta$, above 0; `None` for
            $\sqrt{\tfrac13 \mathbb{E} \lVert w_{\mathrm{ref}} - w_{\mathrm{random}} \rVert^2}$,
            where random models have the initial weights in random order within every parameter.
        stop_distance: Stop once $\lVert w - w_i \rVert_2$ exceeds this number, above 0; `None` for
            never. The right number depends on the model: the default is the published one, for a
            CNN.
        min_accuracy: Stop once the accuracy on the mini-batch of a step, after the step, is below
            this number, in [0, 1]; `None` for never.
        final_rounds: Rounds of the remaining clients after the ascent, at least 0. (In the paper,
            whose rounds are epochs, one round is enough.)

    Raises:
        ConfigurationError: If an argument is out of range; or in a recovery, if a target has left,
            is malicious or no LightningClient, or history lacks its last update.

    References:
        - Halimi et al., Federated Unlearning: How to Efficiently Erase a Client in FL?, arXiv
          2207.05521, 2022, and the code published with it (which compares squared distances).

    Examples:
        >>> GradientAscent(final_rounds=1).needs_excluded_client
        True
    """

    needs_excluded_client = True

    def __init__(
        self,
        *,
        num_epochs: int = 5,
        batch_size: int = 128,
        lr: float = 0.01,
        clip_norm: float | None = 5.0,
        radius: float | None = None,
        stop_distance: float | None = 1.48,
        min_accuracy: float | None = None,
        final_rounds: int = 5,
    ) -> None:
        self.num_epochs = check_int("num_epochs", num_epochs, minimum=1)
        self.batch_size = check_int("batch_size", batch_size, minimum=1)
        self.lr = check_float("lr", lr, minimum=0, open_minimum=True)
        self.clip_norm = _positive("clip_norm", clip_norm)
        self.radius = _positive("radius", radius)
        self.stop_distance = _positive("stop_distance", stop_distance)
        if min_accuracy is not None:
            min_accuracy = check_float("min_accuracy", min_accuracy, minimum=0, maximum=1)
        self.min_accuracy = min_accuracy
        self.final_rounds = check_int("final_rounds", final_rounds, minimum=0)

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return one round for the reference, one for the ascent, and the final rounds."""
        return rounds_after(history, 2 + self.final_rounds)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Compute the final model, and find the round of every target's last update."""
        self._final = final_weights(history, max_rounds)
        self._first, self._server_lr = len(history.rounds()), history.manifest.server_lr
        self._last: dict[str, int] = {}
        left = set(history.manifest.clients).difference(history.remaining)
        for t in range(max_rounds - 1, -1, -1):
            if not left:
                break
            targets = [c for c in history.excluded(t) if c in left]
            self._last.update(dict.fromkeys(targets, t))
            left.difference_update(targets)
        history.require_excluded(sorted(set(self._last.values())), "GradientAscent")

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the final model of the recording."""
        return self._final

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Compute the reference, let the targets climb, or train with the remaining clients."""
        if t == self._first:
            return self._reference(global_weights, ctx)
        if t == self._first + 1:
            return self._ascended(global_weights, ctx)
        sent = ctx.exact(ctx.client_ids, "final")
        return ctx.server_step(sent)

    def _own(self, client_id: str, ctx: RecoveryContext) -> Tensor:
        """Return the last model of a target, shape $(d,)$."""
        record = ctx.history(self._last[client_id], (client_id,))
        own: Tensor = record.global_weights - self._server_lr * record.updates[0]
        return own

    def _reference(self, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        r"""Return $w_{\mathrm{ref}}$, shape $(d,)$."""
        last = ctx.max_rounds - 1
        gone = [c for c, t in self._last.items() if t == last]
        if not gone:
            return global_weights
        present = ctx.history(last, ()).present
        if len(gone) == len(present):
            raise ConfigurationError(
                f"GradientAscent needs a client in round {last} that remains, but all of its "
                f"{len(present)} are excluded. HINT: recover with another `max_rounds`."
            )
        models = torch.stack([self._own(c, ctx) for c in gone])
        return reference_weights(
            global_weights, models, shares(ctx, present, gone).to(global_weights)
        )

    def _ascended(self, reference: Tensor, ctx: RecoveryContext) -> Tensor:
        """Return the mean of the targets' models after the ascent, shape $(d,)$."""
        radius = self.radius
        if radius is None:
            initial = ctx.history(0, ()).global_weights
            radius = (distance_to_random_models(reference, initial, ctx.layout.sizes) / 3) ** 0.5
        ctx.logger("radius", radius)
        total = torch.zeros_like(reference)
        for client_id in self._last:
            objective = _Ascent(
                ctx.layout,
                reference.double(),
                radius,
                self._own(client_id, ctx) if self.stop_distance is not None else None,
                self,
            )
            work = LocalWork(
                local_epochs=self.num_epochs,
                batch_size=self.batch_size,
                lr=self.lr,
                objective=objective,
            )
            sent = ctx.exact((client_id,), "other", work)
            # A sum over no row, which is 0, if the update was dropped.
            total += sent.updates.sum(dim=0) / len(self._last)
        return reference - self.lr * total

    def state_dict(self) -> dict[str, Any]:
        """Return the round of every target's last update, and facts about the recording."""
        return {"first": self._first, "last": dict(self._last), "server_lr": self._server_lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self._first, self._last = state["first"], dict(state["last"])
        self._server_lr = state["server_lr"]


class _Ascent(LocalObjective):
    """The objective of a target: to raise the module's loss, within a ball."""

    def __init__(
        self,
        layout: ParameterVector,
        centre: Tensor,
        radius: float,
        own: Tensor | None,
        settings: GradientAscent,
    ) -> None:
        self._layout = layout
        self._centre = centre
        self._radius = radius
        self._own = own
        self._settings = settings

    def loss(self, module: Any, batch: Any, step: int) -> Tensor | None:
        loss = super().loss(module, batch, step)
        return None if loss is None else -loss

    def gradients(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        limit = self._settings.clip_norm
        if limit is None:
            return gradients
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        if bool(norm <= limit):
            return gradients
        return {name: g * (limit / norm) for name, g in gradients.items()}

    def project(self, parameters: Mapping[str, Tensor]) -> None:
        flat = self._layout.flatten_dict(parameters, torch.empty_like(self._centre))
        inside = project_onto_ball(flat, self._centre, self._radius)
        if inside is not flat:
            for name, part in self._layout.unflatten(inside).items():
                parameters[name].copy_(part)

    def is_done(self, module: Any, batch: Any) -> bool:
        if self._own is not None:
            distance = float((self._layout.flatten(module) - self._own).norm())
            if distance > (self._settings.stop_distance or 0):
                return True
        least = self._settings.min_accuracy
        if least is None:
            return False
        with torch.no_grad():
            right = module(batch[0]).argmax(dim=1) == batch[1]
        return float(right.float().mean()) < least


def _positive(name: str, value: float | None) -> float | None:
    return None if value is None else check_float(name, value, minimum=0, open_minimum=True)
