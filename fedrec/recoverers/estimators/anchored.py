"""Estimates that start from the exact update that a client sent last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fedrec._checks import check_fraction, check_int
from fedrec.aggregators.base import ColumnRule
from fedrec.functional.aggregation.means import weighted_sum
from fedrec.recoverers.estimators._common_gain import CommonGain, Errors
from fedrec.recoverers.estimators._rows import picking, rows_of
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates, Estimator
from fedrec.recoverers.estimators.pairs import BLOCK_BYTES, ClientPairs, Sources
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["AnchoredLBFGS"]

# Rounds whose changes decide together about the weights.
WINDOW = 3
# What products with H have to explain of the squares of what averages lack, or they are not added.
LEAST = 0.01


class Observed(NamedTuple):
    """What exact updates of some clients say.

    Attributes:
        products: For each client of how far its update and its recorded update were from their
            averages, and what H says of both; shape $(k, 4, 4)$, NaN without an average.
        errors: How far estimates were off, of those that are not replaced by exact updates.
    """

    products: Tensor
    errors: Errors | None


class AnchoredLBFGS(Estimator):
    r"""Estimates from what a client has sent in this recovery, and not from the recorded update.

    $$\hat g_t = a + \beta (\bar g_t - \bar a)
    + \gamma \tilde H \left[ (\hat w_t - u) - \beta (\bar w_t - \bar u) \right]$$

    for each client. Bars are what the server stored. $a$, $\bar a$, $u$ and $\bar u$ are moving
    averages, over the rounds in which the client was asked, of its exact updates, its recorded
    ones, and of the recovered and the recorded model. $\tilde H$ is the L-BFGS approximation of the
    client's Hessian from its last $s$ pairs of positive curvature. `PairedLBFGS` has to bridge
    $\hat w_t - \bar w_t$, the whole distance between the recovered and the recorded model. This
    estimator bridges what has changed since the client was asked, so it also recovers if the
    recorded model is far away.

    Averages move by a fraction $K$ (`gain`) to the newest value. They belong together: where
    gradients are affine, the average of gradients is the gradient at the average of models. By a
    fraction $K_c$ (`common_gain`), if that is larger, $a$ moves by the mean error of estimates over
    all clients, as in `MovingAverage`, which is this without history and curvature. Errors that are
    longer than updates count for less in the mean.

    With $K = 1$ everything is as it was in the round in which the client was asked last. With
    $K = \beta = \gamma = 1$ the estimate is that of `PairedLBFGS`, if $\tilde H$ fulfils the secant
    equation of the client's newest pair.

    Weights that are `"pooled"` are regressed over all clients in the last three rounds in which
    all clients were asked: how far the exact update is from its average, on what $\tilde H$ says
    of it ($\gamma$, together with recorded updates, for which it has to hold, too; 0 if that
    explains less than a hundredth of the squares); then the rest of it on the rest of the recorded
    one ($\beta$).

    Args:
        gain: $K$ in (0, 1], or `"spacing"` for $2 / (n + 1)$ if the client was asked $n$ rounds
            ago. An average is used $n$ times, and so is its noise; with this gain, the noise adds
            up to that of $n$ exact updates.
        history_weight: $\beta$ in [0, 1], how much a recorded update tells about the exact one; or
            `"pooled"`.
        curvature_weight: $\gamma$ in [0, 1], how much of the products with $\tilde H$ is added; or
            `"pooled"`.
        buffer_size: $s$, pairs per client, at least 1.
        common_gain: $K_c$ in (0, 1], or `"adaptive"`.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023 (the schedule; the estimate is not the paper's).

    Examples:
        >>> AnchoredLBFGS().gain
        'spacing'
    """

    assumes_gradients = True
    counted = frozenset({"skipped_pairs"})

    def __init__(
        self,
        *,
        gain: float | str = "spacing",
        history_weight: float | str = "pooled",
        curvature_weight: float | str = "pooled",
        buffer_size: int = 2,
        common_gain: float | str = "adaptive",
    ) -> None:
        self.gain = check_fraction("gain", gain, ("spacing",), positive=True)
        self.history_weight = check_fraction("history_weight", history_weight, ("pooled",))
        self.curvature_weight = check_fraction("curvature_weight", curvature_weight, ("pooled",))
        self.buffer_size = check_int("buffer_size", buffer_size, minimum=1)
        self.common_gain = check_fraction("common_gain", common_gain, ("adaptive",), positive=True)
        self._rows: dict[str, int] = {}
        self._begin()

    def _begin(self) -> None:
        """Forget what was observed."""
        given = (self.history_weight, self.curvature_weight)
        self._beta, self._gamma = (1.0 if isinstance(w, str) else w for w in given)
        # Of the last rounds: differences with themselves, with what H says of them, and that with
        # itself; what it leaves of updates with what it leaves of recorded ones, and that
        # with itself.
        self._products = torch.zeros(WINDOW, 5, dtype=torch.float64)
        self._round = torch.full((len(self._rows),), -1, dtype=torch.int64)
        # Which averages of models are whose.
        self._group = self._round.clone()
        self._models: dict[int, tuple[Tensor, Tensor]] = {}
        # Averages of what clients sent, and of what they had sent in the recording.
        self._anchors = self._recorded = torch.empty(0)
        self._common = CommonGain(self.common_gain)
        self._without_history: Tensor | None = None
        self._pairs: ClientPairs | None = None

    def _allocate(self, weights: Tensor) -> None:
        """Make room on the device of the weights."""
        c, d = len(self._rows), weights.numel()
        self._anchors, self._recorded = weights.new_zeros(c, d), weights.new_zeros(c, d)
        if self.curvature_weight != 0:
            self._pairs = ClientPairs(c, self.buffer_size, d, weights.device)

    @property
    def fewest_warmup_rounds(self) -> int:
        """One more than pairs: the first round gives none, since both models are still equal."""
        return self.buffer_size + 1

    def start(self, history: HistoryView, rounds: range) -> None:
        """Forget all that was observed."""
        self._rows = {c: i for i, c in enumerate(history.remaining)}
        self._begin()

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> Observed | None:
        """Move the averages of these clients to this round.

        Returns:
            If all were asked, what that says about weights and the common gain.
        """
        if not len(self._anchors):
            self._allocate(global_weights)
        rows = rows_of(record, self._rows)
        ages = record.round - self._round[rows]
        gains = torch.ones(len(rows))
        if reason == "correction":
            gains = 2 / (ages + 1) if isinstance(self.gain, str) else gains * self.gain
        gains[self._round[rows] < 0] = 1
        found, self._without_history = None, None
        if reason in ("warmup", "correction"):
            found = self._changed(record, exact, global_weights, rows, gains)
        else:
            at = picking(rows, exact.device)
            self._anchors[at], self._recorded[at] = exact, record.updates
        self._move_models(record, global_weights, rows, gains)
        self._round[rows] = record.round
        if self._pairs is not None:
            # Also where a client is asked alone: its other pairs stay, since its averages are new.
            self._pairs.push(
                rows,
                global_weights - record.global_weights,
                exact,
                record.updates,
                record.round,
                alone=False,
            )
        return found

    def _move_models(
        self, record: RoundRecord, weights: Tensor, rows: Tensor, gains: Tensor
    ) -> None:
        """Move averages of models; clients that had the same, and move as far, share them again."""
        of_row = [
            # What a client had before does not matter where nothing of it is left.
            (group if gain < 1 else -1, gain)
            for group, gain in zip(self._group[rows].tolist(), gains.tolist(), strict=True)
        ]
        first = record.round * len(self._rows)
        names = {key: first + i for i, key in enumerate(dict.fromkeys(of_row))}
        for (group, gain), name in names.items():
            models = weights.clone(), record.global_weights.clone()
            if gain < 1:
                for new, old in zip(models, self._models[group], strict=True):
                    new.lerp_(old, 1 - gain)
            self._models[name] = models
        self._group[rows] = torch.tensor([names[key] for key in of_row])
        self._models = {name: self._models[name] for name in _distinct(self._group.tolist())}

    def _changed(
        self, record: RoundRecord, exact: Tensor, weights: Tensor, rows: Tensor, gains: Tensor
    ) -> Observed:
        """Move averages of updates by `gains`; return what the errors say."""
        known = self._round[rows] >= 0
        move = self._move
        if bool(known.any()) and self._compiles(len(rows)):
            move = self._compiled_move
        products, errors = move(record, exact, weights, rows, gains)
        products[~known] = float("nan")
        self._common.moved = rows, gains
        return Observed(products, self._errors(exact, gains, products, errors))

    def _errors(
        self, exact: Tensor, gains: Tensor, products: Tensor, errors: Tensor
    ) -> Errors | None:
        """Return how far clients were off that moved by less than their error."""
        moved = gains < 1
        if not bool(moved.any()):
            return None
        error = self._of_errors()
        counts, length = self._common.counts(
            exact, moved, (products @ error @ error).clamp(min=0).sqrt()
        )
        at = moved.nonzero().flatten()
        mean = weighted_sum(
            errors[picking(at, exact.device)], (counts / counts.sum())[at].to(exact)
        )
        if not bool(torch.isfinite(mean).all()):
            return None
        return Errors(mean, float(counts.sum()), length, float(gains[moved].min()))

    def _of_errors(self) -> Tensor:
        """Return how much of each of the vectors of `Observed.products` is in an error, (4,)."""
        beta, gamma = self._beta, self._gamma
        return torch.tensor([1, -beta, -gamma, beta * gamma], dtype=torch.float64)

    def _move(
        self, record: RoundRecord, exact: Tensor, weights: Tensor, rows: Tensor, gains: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Move averages of updates; return the products of `Observed`, and errors, (k, d)."""
        products = torch.zeros(len(rows), 4, 4, dtype=torch.float64)
        error, errors = self._of_errors().to(exact), exact.new_empty(exact.shape)
        zeros = vectors = exact.new_empty(0)
        for x, y, group in self._changes(record, weights, rows):
            clients, here = rows[group], picking(group, exact.device)
            at, k = picking(clients, exact.device), len(group)
            if len(vectors) < k:
                zeros, vectors = exact.new_zeros(k, len(x)), exact.new_zeros(k, 4, len(x))
            block = vectors[:k]
            torch.sub(exact[here], self._anchors[at], out=block[:, 0])
            torch.sub(record.updates[here], self._recorded[at], out=block[:, 1])
            if self._pairs is not None:
                block[:, 2] = self._pairs.estimate(zeros[:k], x, clients).updates
                block[:, 3] = self._pairs.estimate(zeros[:k], y, clients).updates
            products[group] = torch.stack([one @ one.mT for one in block]).cpu().double()
            errors[here] = error @ block
        at, weight = picking(rows, exact.device), gains.to(exact)[:, None]
        # Where the gain is 1, this is the new value, bit by bit.
        for averages, new in ((self._anchors, exact), (self._recorded, record.updates)):
            averages[at] = torch.lerp(averages[at], new, weight)
        return products, errors

    def _compiled_move(
        self, record: RoundRecord, exact: Tensor, weights: Tensor, rows: Tensor, gains: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do what `_move` does in one pass that is compiled by numba."""
        from fedrec.functional.kernels import _numba_anchors

        assert self._pairs is not None
        known, which = self._known_groups(rows)
        changes = weights.new_empty(len(known), 2, len(weights))
        for (x, y), group in zip(changes, known, strict=True):
            now, then = self._models[group]
            torch.sub(weights, now, out=x)
            torch.sub(record.global_weights, then, out=y)
        vectors, which = changes.flatten(0, 1), 2 * which[:, None] + torch.arange(2)
        sigma, p, _ = self._pairs.coefficients(vectors, which, rows)
        p, s, errors = -p.float(), self.buffer_size, exact.new_empty(exact.shape)
        products = _numba_anchors.move(
            exact=exact.contiguous().numpy(),
            updates=record.updates.contiguous().numpy(),
            anchors=self._anchors.numpy(),
            recorded=self._recorded.numpy(),
            clients=rows.numpy(),
            vectors=vectors.numpy(),
            which=which.numpy(),
            sigma=sigma.float().numpy(),
            pool=self._pairs.pool.numpy(),
            slots=self._pairs.slot[rows].numpy(),
            of_pool=p[:, :, s:].contiguous().numpy(),
            delta_g=self._pairs.delta_g.numpy(),
            own=p[:, :, :s].contiguous().numpy(),
            beta=self._beta,
            gamma=self._gamma,
            gains=gains.numpy(),
            errors=errors.numpy(),
            num_threads=torch.get_num_threads(),
        )
        return torch.from_numpy(products), errors

    def pool(self, statistics: Sequence[Observed]) -> None:
        """Regress weights over this round and those before; move averages by the mean error."""
        self._regress(torch.cat([one.products for one in statistics]))
        errors = [one.errors for one in statistics if one.errors is not None]
        self._common.follow(errors, self._anchors)
        self._without_history = None

    def _regress(self, of_all: Tensor) -> None:
        """Set the weights that are `"pooled"`."""
        # Without clients of which a product overflowed.
        found = of_all[torch.isfinite(of_all).all(dim=2).all(dim=1)].sum(dim=0)
        products = torch.zeros(5, dtype=torch.float64)
        if self.curvature_weight == "pooled":
            now, then = found[[0, 0, 2], [0, 2, 2]], found[[1, 1, 3], [1, 3, 3]]
            products[:3] = now + then
            lacking, explained, size = (self._products[1:, :3].sum(dim=0) + products[:3]).tolist()
            if size > 0:
                self._gamma = min(max(explained / size, 0.0), 1.0)
            if explained**2 < LEAST * size * lacking:
                self._gamma = 0.0
        if self.history_weight == "pooled":
            # Of what curvature leaves of the changes.
            left = torch.tensor(
                [[1, 0, -self._gamma, 0], [0, 1, 0, -self._gamma]], dtype=torch.float64
            )
            products[3:] = (left @ found @ left.mT)[:, 1]
        self._products = torch.cat([self._products[1:], products[None]])
        explained, size = self._products[:, 3:].sum(dim=0).tolist()
        if size > 0:
            self._beta = min(max(explained / size, 0.0), 1.0)

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Estimate from the averages; a client that was never asked has no estimate."""
        rows = rows_of(record, self._rows)
        usable = self._round[rows] >= 0
        if not bool(usable.any()):
            return Estimates(record.updates, largest_magnitudes(record.updates), usable)
        beta, gamma = self._beta, self._gamma
        if self._compiles(len(rows)):
            assert self._pairs is not None
            sources, which = self._sources(record, global_weights, rows)
            anchors = self._origins(), beta
            found = self._pairs.combined(record.updates, sources.vectors(), which, rows, anchors)
            return found._replace(usable=usable)
        updates, device = torch.empty_like(record.updates), global_weights.device
        largest = torch.full((len(rows),), float("nan"))
        for x, y, group in self._changes(record, global_weights, rows):
            clients, here = rows[group], picking(group, device)
            at = picking(clients, device)
            part = torch.add(self._anchors[at], record.updates[here], alpha=beta)
            part.sub_(self._recorded[at], alpha=beta)
            if self._pairs is not None and gamma > 0:
                found = self._pairs.estimate(part, gamma * (x - beta * y), clients)
                updates[here], largest[group] = found.updates, found.largest.cpu()
            else:
                updates[here], largest[group] = part, largest_magnitudes(part).cpu()
        return Estimates(updates, largest, usable)

    def aggregate(
        self, record: RoundRecord, global_weights: Tensor, rule: ColumnRule
    ) -> AggregatedEstimates | None:
        """Estimate and aggregate in one pass, where that is compiled."""
        rows = rows_of(record, self._rows)
        usable = self._round[rows] >= 0
        if not bool(usable.all()) or not self._compiles(len(rows)):
            return None
        assert self._pairs is not None
        sources, which = self._sources(record, global_weights, rows)
        anchors = self._origins(), self._beta
        found = self._pairs.aggregated(record, sources, which, rows, rule, anchors)
        return found._replace(usable=usable)

    def _origins(self) -> Tensor:
        """Return the averages without beta times the recorded ones."""
        if self._without_history is None:
            self._without_history = torch.sub(self._anchors, self._recorded, alpha=self._beta)
        return self._without_history

    def _known_groups(self, rows: Tensor) -> tuple[list[int], Tensor]:
        """Return whose averages of models differ, and which are whose, any for one without."""
        groups = self._group[rows].tolist()
        known = _distinct(groups)
        place = {group: i for i, group in enumerate(known)}
        return known, torch.tensor([place.get(group, 0) for group in groups], dtype=torch.int64)

    def _sources(
        self, record: RoundRecord, weights: Tensor, rows: Tensor
    ) -> tuple[Sources, Tensor]:
        """Return what vectors are computed from, and which of them is whose.

        Where no product is added, they are computed from no models, and there are none.
        """
        known, which = self._known_groups(rows)
        if self._gamma == 0:
            now = then = weights.new_empty(0, len(weights))
        elif len(known) == 1:
            now, then = (one[None] for one in self._models[known[0]])
        else:
            now, then = map(torch.stack, zip(*(self._models[g] for g in known), strict=True))
        sources = Sources(weights, record.global_weights, now, then, self._beta, self._gamma)
        return sources, which

    def _compiles(self, num_rows: int) -> bool:
        return isinstance(self._pairs, ClientPairs) and self._pairs.compiles(num_rows)

    def _changes(
        self, record: RoundRecord, weights: Tensor, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield how far both models are from their averages, and places in `rows` with these.

        On a CPU there are so many places that their updates stay in the cache.
        """
        groups, size = self._group[rows], len(rows)
        if weights.device.type == "cpu":
            size = max(BLOCK_BYTES // (weights.numel() * weights.element_size()), 1)
        for one in _distinct(groups.tolist()):
            now, then = self._models[one]
            x, y = weights - now, record.global_weights - then
            for group in (groups == one).nonzero().flatten().split(size):
                yield x, y, group

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of averages, pairs, estimates, and the mean error.

        Where clients are not all asked together, there are up to two averages of models for each.
        """
        rows = num_clients * (self.buffer_size + 4) + self.buffer_size + 4
        return rows * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return clients, averages, pairs and what was learnt."""
        return {
            "remaining": list(self._rows),
            "weights": [self._beta, self._gamma],
            **{name: getattr(self, f"_{name}") for name in _TENSORS},
            "model_groups": list(self._models),
            "models": [list(models) for models in self._models.values()],
            "common": self._common.state_dict(),
            "pairs": None if self._pairs is None else self._pairs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rows = {c: i for i, c in enumerate(state["remaining"])}
        self._begin()
        if state["models"]:
            self._allocate(state["models"][0][0])
        self._beta, self._gamma = state["weights"]
        for name in _TENSORS:
            setattr(self, f"_{name}", state[name].to(getattr(self, f"_{name}").device))
        models = [(now, then) for now, then in state["models"]]
        self._models = dict(zip(state["model_groups"], models, strict=True))
        self._common.load_state_dict(state["common"])
        if self._pairs is not None:
            self._pairs.load_state_dict(state["pairs"])

    def diagnostics(self) -> dict[str, float]:
        """Return the last weights and common gain, and how many pairs were skipped."""
        return {
            "history_weight": self._beta,
            "curvature_weight": self._gamma,
            "common_gain": self._common.value,
            "skipped_pairs": 0.0 if self._pairs is None else float(self._pairs.skipped),
        }


_TENSORS = ("products", "round", "group", "anchors", "recorded")


def _distinct(groups: list[int]) -> list[int]:
    """Return each of these once, in order, without those that stand for none."""
    return sorted(group for group in set(groups) if group >= 0)
