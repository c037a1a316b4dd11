"""Estimates that start from the exact update that a client sent last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrec._checks import check_float, check_int
from fedrec.exceptions import ConfigurationError, expected
from fedrec.recoverers.estimators.base import Estimates, Estimator
from fedrec.recoverers.estimators.pairs import ClientPairs
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["AnchoredLBFGS"]

# Rounds whose changes decide together how much the recorded ones count.
WINDOW = 3
# A measured gain starts and stays here.
FIRST_GAIN, LEAST_GAIN, LARGEST_GAIN = 0.5, 0.1, 0.9


class AnchoredLBFGS(Estimator):
    r"""L-BFGS from the round in which a client was asked last, and not from the recorded one.

    $$\hat g_t = a + \beta (\bar g_t - \bar g_0)
    + \tilde H \left[ (\hat w_t - \hat w_0) - \beta (\bar w_t - \bar w_0) \right]$$

    for each client, where 0 is the round in which it was asked last, $\hat w_0$ the weights that it
    was asked at, bars are what the server stored, and $\tilde H$ is made of the last $s$ pairs of
    positive curvature. `PairedLBFGS` has to bridge $\hat w_t - \bar w_t$, all that lies between the
    recovered and the recorded model. Where that is far, this estimate holds, as it has to bridge no
    more than what has changed since the client was asked.

    The anchor $a$ is the prediction of round 0, moved by a fraction $K$ (`gain`) towards the exact
    update, so that the noise of mini-batches averages out from one periodic correction to the next;
    with $K = 1$ it is the exact update. With $K = 1$ and $\beta = 1$ the estimate is that of
    `PairedLBFGS`, provided that $\tilde H$ maps the client's newest pair to itself.

    Args:
        gain: $K$ in (0, 1]; or `"measured"`, from how successive errors of prediction of all
            clients correlate: they do not under the gain of a Kalman filter.
        history_weight: $\beta$ in [0, 1], how much a change in the recording tells about one now;
            or by regression of exact on recorded changes in the last rounds in which all were
            asked: `"pooled"`, over all clients; `"client"`, for each, shrunk halfway to `"pooled"`.
        buffer_size: $s$, pairs per client; 0 for $\tilde H = 0$.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023: what it starts from; the estimate is another.
        - Mehra, On the identification of variances and adaptive Kalman filtering, IEEE
          Transactions on Automatic Control 1970: the measured gain.

    Examples:
        >>> AnchoredLBFGS(gain=0.3)
        AnchoredLBFGS(gain=0.3, history_weight='pooled', buffer_size=2)
    """

    assumes_gradients = True

    def __init__(
        self,
        *,
        gain: float | str = 0.5,
        history_weight: float | str = "pooled",
        buffer_size: int = 2,
    ) -> None:
        if isinstance(gain, str):
            if gain != "measured":
                requirement = 'a number in (0, 1], or "measured"'
                raise ConfigurationError(expected("gain", requirement, gain))
        else:
            gain = check_float("gain", gain, minimum=0, maximum=1, open_minimum=True)
        if isinstance(history_weight, str):
            if history_weight not in ("pooled", "client"):
                requirement = 'a number in [0, 1], "pooled" or "client"'
                raise ConfigurationError(expected("history_weight", requirement, history_weight))
        else:
            history_weight = check_float("history_weight", history_weight, minimum=0, maximum=1)
        self.gain = gain
        self.history_weight = history_weight
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=0)
        self._rows: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget what was observed."""
        self._gain = FIRST_GAIN if isinstance(self.gain, str) else self.gain
        self._previous_gain = 1.0  # with which the anchors were made
        first = 1.0 if isinstance(self.history_weight, str) else self.history_weight
        c = len(self._rows)
        self._weights = torch.full((c,), first, dtype=torch.float64)
        self._products = torch.zeros(WINDOW, 2, c, dtype=torch.float64)
        self._round = torch.full((c,), -1, dtype=torch.int64)
        self._models: dict[int, tuple[Tensor, Tensor]] = {}
        self._anchors = self._exact = self._recorded = torch.empty(0)
        self._pairs: ClientPairs | None = None

    def _allocate(self, weights: Tensor) -> None:
        """Make room on the device of the weights."""
        c, d = len(self._rows), weights.numel()
        self._anchors, self._exact, self._recorded = (weights.new_zeros(c, d) for _ in range(3))
        if self.buffer_size:
            self._pairs = ClientPairs(c, self.buffer_size, d, weights.device)

    @property
    def fewest_warmup_rounds(self) -> int:
        """One more than pairs: the first round gives none, since both models are still equal."""
        return self.buffer_size + 1

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all anchors and pairs."""
        self._rows = {c: i for i, c in enumerate(history.remaining)}
        self._begin()

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> None:
        """Put the anchors of these clients here; if all were asked, learn how well it predicted."""
        if not len(self._anchors):
            self._allocate(global_weights)
        rows = self._rows_of(record)
        at = rows.to(exact.device)
        anchors = exact
        if reason in ("warmup", "correction"):
            anchors = self._learn(record, exact, global_weights, rows, reason == "correction")
        self._anchors[at], self._exact[at], self._recorded[at] = anchors, exact, record.updates
        self._round[rows] = record.round
        self._models[record.round] = global_weights.clone(), record.global_weights.clone()
        self._models = {t: self._models[t] for t in self._round.unique().tolist() if t >= 0}
        if self._pairs is not None:
            # Asked alone or not: its other pairs do no harm that an anchor would not undo.
            self._pairs.push(
                rows,
                global_weights - record.global_weights,
                exact,
                record.updates,
                record.round,
                alone=False,
            )

    def _learn(
        self, record: RoundRecord, exact: Tensor, weights: Tensor, rows: Tensor, filtered: bool
    ) -> Tensor:
        """Set the weight of history and the gain from what came true, and return anchors."""
        known = (self._round[rows] >= 0).nonzero().flatten()
        if not len(known):
            return exact
        rows, here = rows[known], known.to(exact.device)
        at = rows.to(exact.device)
        # Changes since each client's anchor, less what curvature explains.
        now = exact[here] - self._exact[at]
        then = record.updates[here] - self._recorded[at]
        if self._pairs is not None:
            for x, y, group in self._changes(record, weights, rows):
                on_device = group.to(exact.device)
                now[on_device] = self._pairs.estimate(now[on_device], -x, rows[group]).updates
                then[on_device] = self._pairs.estimate(then[on_device], -y, rows[group]).updates
        used = self._weights[rows]
        if isinstance(self.history_weight, str):
            self._regress(now, then, rows)
        if not filtered or self.gain == 1:
            return exact
        behind = self._exact[at] - self._anchors[at]  # what the last filter took off
        errors = now.sub_(then.mul_(used.to(then)[:, None])).add_(behind)
        gain = self._gain
        if isinstance(self.gain, str):
            self._measure(errors, behind)
        self._previous_gain = gain
        anchors = exact.clone()
        anchors[here] -= (1 - gain) * errors
        return anchors

    def _regress(self, now: Tensor, then: Tensor, rows: Tensor) -> None:
        """Regress the changes of these clients on their recorded ones."""
        products = torch.stack([_dots(now, then), _dots(then, then)])
        usable = torch.isfinite(products).all(dim=0)
        newest = torch.zeros_like(self._products[0])
        newest[:, rows[usable]] = products[:, usable]
        self._products = torch.cat([self._products[1:], newest[None]])
        own, size = self._products.sum(dim=0)
        if not float(size.sum()) > 0:
            return
        pooled = (own.sum() / size.sum()).clamp(0, 1)
        if self.history_weight == "pooled":
            self._weights.fill_(float(pooled))
        else:
            prior = size.mean()
            self._weights = ((own + prior * pooled) / (size + prior)).clamp(0, 1)

    def _measure(self, errors: Tensor, behind: Tensor) -> None:
        """Move the gain to where the errors of successive predictions do not correlate."""
        left = 1 - self._previous_gain
        if left == 0:
            return
        with_last, size, last = (
            _dots(errors, behind) / left,
            _dots(errors, errors),
            _dots(behind, behind),
        )
        usable = torch.isfinite(with_last) & torch.isfinite(size) & (last > 0)
        if bool(usable.any()) and float(size[usable].sum()) > 0:
            step = float(with_last[usable].sum() / size[usable].sum()) / 2
            self._gain = min(max(self._gain + step, LEAST_GAIN), LARGEST_GAIN)

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Estimate from the anchor of each client; who was never asked has no estimate."""
        rows = self._rows_of(record)
        usable = self._round[rows] >= 0
        if not bool(usable.any()):
            return Estimates(record.updates, largest_magnitudes(record.updates), usable)
        at = rows.to(global_weights.device)
        weights = self._weights[rows]
        updates = record.updates - self._recorded[at]
        updates.mul_(weights.to(updates)[:, None]).add_(self._anchors[at])
        if self._pairs is not None:
            for x, y, group in self._changes(record, global_weights, rows):
                theirs = rows[group]
                if len(group) == len(rows):
                    updates = self._with_curvature(updates, x, y, theirs)
                else:
                    here = group.to(updates.device)
                    updates[here] = self._with_curvature(updates[here], x, y, theirs)
        return Estimates(updates, largest_magnitudes(updates), usable)

    def _with_curvature(self, updates: Tensor, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Add the products with the change now, less the weighted one of the recording."""
        assert self._pairs is not None
        weights = self._weights[rows]
        if bool((weights == weights[0]).all()):
            return self._pairs.estimate(updates, x - float(weights[0]) * y, rows).updates
        recorded = self._pairs.estimate(torch.zeros_like(updates), y, rows).updates
        updates = updates - weights.to(updates)[:, None] * recorded
        return self._pairs.estimate(updates, x, rows).updates

    def _changes(
        self, record: RoundRecord, weights: Tensor, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the changes of both models since an anchor, and places in `rows` that have it."""
        rounds = self._round[rows]
        for t in rounds.unique().tolist():
            if t >= 0:
                now, then = self._models[t]
                places = (rounds == t).nonzero().flatten()
                yield weights - now, record.global_weights - then, places

    def _rows_of(self, record: RoundRecord) -> Tensor:
        return torch.tensor([self._rows[c] for c in record.client_ids], dtype=torch.int64)

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of anchors, pairs and estimates."""
        rows = num_clients * (self.buffer_size + 4) + self.buffer_size + 2
        return rows * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return clients, anchors, pairs and what was learnt."""
        return {
            "remaining": list(self._rows),
            "gain": self._gain,
            "previous_gain": self._previous_gain,
            **{name: getattr(self, f"_{name}") for name in _TENSORS},
            "model_rounds": list(self._models),
            "models": [list(models) for models in self._models.values()],
            "pairs": None if self._pairs is None else self._pairs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rows = {c: i for i, c in enumerate(state["remaining"])}
        self._begin()
        if state["models"]:
            self._allocate(state["models"][0][0])
        self._gain, self._previous_gain = state["gain"], state["previous_gain"]
        for name in _TENSORS:
            setattr(self, f"_{name}", state[name].to(getattr(self, f"_{name}").device))
        models = [(now, then) for now, then in state["models"]]
        self._models = dict(zip(state["model_rounds"], models, strict=True))
        if self._pairs is not None:
            self._pairs.load_state_dict(state["pairs"])

    def diagnostics(self) -> dict[str, float]:
        """Return gain, mean weight of history, and the number of pairs that were skipped."""
        return {
            "gain": self._gain,
            "history_weight": float(self._weights.mean()) if len(self._weights) else 0.0,
            "skipped_pairs": 0.0 if self._pairs is None else float(self._pairs.skipped),
        }


_TENSORS = ("weights", "products", "round", "anchors", "exact", "recorded")


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows, shape (k,), float64 on the CPU."""
    products: Tensor = torch.linalg.vecdot(a, b)
    return products.cpu().double()
