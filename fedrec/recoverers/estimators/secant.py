"""Anchored estimates with one curvature for all clients, and a gain for what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrec._checks import check_fraction, check_int
from fedrec.aggregators.base import ColumnRule
from fedrec.functional.aggregation.means import weighted_mean
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.history.undecoded import stored_rows
from fedrec.recoverers.estimators._anchors import WINDOW, Anchored, picking
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates
from fedrec.recoverers.estimators.pairs import compiled_dots
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

__all__ = ["AnchoredSecant"]

# Added to the squares of how far the model went, as a multiple of their mean.
RIDGE = 0.1
# The gain of what clients have in common, until something is known.
COMMON_GAIN = 0.5


class Changes(NamedTuple):
    r"""What has changed since clients were asked last, as means over some of them.

    Attributes:
        errors: Exact minus estimated updates, shape $(d,)$.
        exact: Exact updates, now minus then, shape $(d,)$.
        recorded: Recorded updates, shape $(d,)$.
        model: $\hat w$, shape $(d,)$.
        recorded_model: $\bar w$, shape $(d,)$.
        weight: How many clients these are, where one that sent a long update counts for less.
        length: The median length of their exact updates.
        gain: The smallest of their own gains.
    """

    errors: Tensor
    exact: Tensor
    recorded: Tensor
    model: Tensor
    recorded_model: Tensor
    weight: float
    length: float
    gain: float


class AnchoredSecant(Anchored):
    r"""Estimates from the exact update that a client sent last, and not from the recorded one.

    $$\hat g_t = a + \beta (\bar g_t - \bar g_0)
    + \gamma B \left[ (\hat w_t - \hat w_0) - \beta (\bar w_t - \bar w_0) \right]$$

    for each client. Round 0 is the round in which the client was asked last, at the weights
    $\hat w_0$. Bars are what the server stored. `PairedLBFGS` has to bridge $\hat w_t - \bar w_t$,
    the whole distance between the recovered and the recorded model. This estimator bridges what has
    changed since the client was asked, so it also recovers if the recorded model is far away.

    The anchor $a$ is the prediction of round 0, moved towards the exact update: by a fraction $K$
    (`gain`) of what is the client's own, and by a fraction $K_c$ (`common_gain`) of the mean over
    all clients. The noise of mini-batches is in the former, and averages out over periodic
    corrections. The latter hardly has noise, and how the model is going to move depends on it.

    $B$ is the same for all clients: the multisecant matrix
    $Y (S^\top S + \lambda I)^{-1} S^\top$ of the last $m + 1$ corrections. Columns of $S$ are how
    far the recovered model had gone since the first of them, and columns of $Y$ how the mean update
    had changed, both without their mean over the corrections; $\lambda$ is a tenth of the mean
    square of how far. So $B$ is the ridge regression of the mean update on the weights, along the
    way that the model went.

    Weights that are `"pooled"` are regressed in the last three rounds in which all clients were
    asked, on means over clients: first the changes of updates on the changes that $B$ predicts
    ($\gamma$), then the rest of the exact changes on the rest of the recorded changes ($\beta$).
    $K_c$ grows if errors of successive corrections have the same direction, and falls if they have
    opposite ones.

    In all means, a client whose update is longer than the median counts for less, in proportion, so
    that no client says more than half of them.

    On dense networks that are trained for many rounds it ends closer to training from scratch than
    `AnchoredLBFGS`; in short recoveries and on convolutional networks it is worse.

    Args:
        gain: $K$ in (0, 1], or `"spacing"` for $2 / (n + 1)$ if the client was asked $n$ rounds
            ago. An anchor is used $n$ times, and so is its noise; with this gain, the noise adds up
            to that of $n$ exact updates.
        common_gain: $K_c$ in (0, 1], or `"adaptive"`: from $2 / (n + 1)$ to 1.
        history_weight: $\beta$ in [0, 1], how much a recorded change tells about the exact change;
            or `"pooled"`.
        curvature_weight: $\gamma$ in [0, 1], how much of what $B$ predicts is added; or `"pooled"`.
        num_secants: $m$, at least 1.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Cao et al., FedRecover, IEEE S&P 2023 (the schedule; the estimate is not the paper's).
        - Fang and Saad, Two classes of multisecant methods for nonlinear acceleration, Numerical
          Linear Algebra with Applications 2009.

    Examples:
        >>> AnchoredSecant().gain
        'spacing'
    """

    def __init__(
        self,
        *,
        gain: float | str = "spacing",
        common_gain: float | str = "adaptive",
        history_weight: float | str = "pooled",
        curvature_weight: float | str = "pooled",
        num_secants: int = 5,
    ) -> None:
        super().__init__(gain, history_weight, curvature_weight)
        self.common_gain = check_fraction("common_gain", common_gain, ("adaptive",), positive=True)
        self.num_secants = check_int("num_secants", num_secants, minimum=1)
        self._begin()

    def _begin(self) -> None:
        """Forget what was observed."""
        super()._begin()
        common = self.common_gain
        self._common_gain = COMMON_GAIN if isinstance(common, str) else common
        # The mean error of the last correction, and products with the one before.
        self._errors: Tensor | None = None
        self._successive = torch.zeros(WINDOW, 2, dtype=torch.float64)
        # Longer updates count for less.
        self._length = float("inf")
        # By how much the model moved and the mean update turned, from correction to correction.
        self._moves = self._turns = torch.empty(0)
        self._inverse = torch.empty(0, dtype=torch.float64)
        # Rows whose anchors are going to move by the mean error, and their own gains.
        self._moving = torch.empty(0, dtype=torch.int64), torch.empty(0)
        self._estimates: Tensor | None = None

    def observe(
        self, record: RoundRecord, exact: Tensor, global_weights: Tensor, reason: str
    ) -> Changes | None:
        """Move the anchors of these clients to this round.

        Returns:
            If all were asked, what has changed, if anything is known of these clients.
        """
        if not len(self._anchors):
            self._allocate(global_weights)
        rows = self._rows_of(record)
        at, known = picking(rows, exact.device), self._round[rows] >= 0
        changes = None
        if reason in ("warmup", "correction") and bool(known.any()):
            gains = torch.ones(len(rows), dtype=torch.float64)
            if reason == "correction":
                ages = record.round - self._round[rows].double()
                own = 2 / (ages + 1) if isinstance(self.gain, str) else gains * self.gain
                gains[known] = own[known]
            estimates = self.estimate(record, global_weights).updates
            errors = torch.sub(exact, estimates, out=estimates)
            errors[picking((~known).nonzero().flatten(), exact.device)] = 0
            changes = self._changes(record, exact, errors, global_weights, rows, gains)
            # Where the gain is 1, this is the exact update, bit by bit.
            self._anchors[at] = errors.mul_((gains - 1).to(errors)[:, None]).add_(exact)
            self._moving = rows, gains
        else:
            self._anchors[at] = exact
        self._exact[at], self._recorded[at] = exact, record.updates
        self._moved_to(record, global_weights, rows)
        return changes

    def _changes(
        self,
        record: RoundRecord,
        exact: Tensor,
        errors: Tensor,
        weights: Tensor,
        rows: Tensor,
        gains: Tensor,
    ) -> Changes:
        """Return the means over those of these clients that have an anchor."""
        rounds, at = self._round[rows], picking(rows, exact.device)
        lengths = torch.linalg.vector_norm(exact, dim=1).cpu().double()
        counts = torch.where(lengths > self._length, self._length / lengths, 1.0)
        counts[rounds < 0] = 0
        total = float(counts.sum())
        model, recorded_model = torch.zeros_like(weights), torch.zeros_like(weights)
        for t, (now, then) in self._models.items():
            share = float(counts[rounds == t].sum()) / total
            model.add_(weights - now, alpha=share)
            recorded_model.add_(record.global_weights - then, alpha=share)

        def mean_change(new: Tensor, old: Tensor) -> Tensor:
            return weighted_mean(new, counts) - weighted_mean(old[at], counts)

        return Changes(
            errors=weighted_mean(errors, counts),
            exact=mean_change(exact, self._exact),
            recorded=mean_change(record.updates, self._recorded),
            model=model,
            recorded_model=recorded_model,
            weight=total,
            length=float(lengths[rounds >= 0].median()),
            gain=float(gains[rounds >= 0].min()),
        )

    def pool(self, statistics: Sequence[Changes]) -> None:
        """Learn weights, $K_c$ and $B$ from the changes of all clients; move their anchors."""
        total = sum(one.weight for one in statistics)

        def mean(parts: list[Tensor]) -> Tensor:
            shares = [one.weight / total for one in statistics]
            return torch.stack([x * w for x, w in zip(parts, shares, strict=True)]).sum(dim=0)

        errors = mean([one.errors for one in statistics])
        exact = mean([one.exact for one in statistics])
        recorded = mean([one.recorded for one in statistics])
        model = mean([one.model for one in statistics])
        recorded_model = mean([one.recorded_model for one in statistics])
        lengths = torch.tensor([one.length for one in statistics], dtype=torch.float64)
        # Where half of them sent nothing, it says nothing.
        self._length = float(lengths.median()) or float("inf")
        predicted = self._times_curvature(torch.stack([model, recorded_model]))
        changes = torch.stack([exact, recorded, *predicted])
        self._regress(_dots(changes, changes))
        self._move(errors, min(one.gain for one in statistics))
        self._moves = _newest(self._moves, model, self.num_secants)
        self._turns = _newest(self._turns, exact, self.num_secants)
        self._inverse = _inverse(_dots(self._moves, self._moves))

    def _move(self, errors: Tensor, least: float) -> None:
        """Move anchors by the mean error, as far as their own gains have not."""
        if least < 1 and self.common_gain == "adaptive":
            if self._errors is not None:
                both = _dots(torch.stack([errors, self._errors]), self._errors[None])[:, 0]
                self._successive = torch.cat([self._successive[1:], both[None]])
                along, size = self._successive.sum(dim=0).tolist()
                if size > 0:
                    self._common_gain *= 1 + along / size / 2
                self._common_gain = min(max(self._common_gain, least), 1.0)
            self._errors = errors
        else:
            self._errors = None
        rows, gains = self._moving
        for gain in gains.unique().tolist():
            if gain < self._common_gain:
                at = picking(rows[gains == gain], errors.device)
                self._anchors[at] += errors * (self._common_gain - gain)
        self._moving = torch.empty(0, dtype=torch.int64), torch.empty(0)

    def _times_curvature(self, vectors: Tensor) -> Tensor:
        """Return what B makes of vectors, shape (g, d)."""
        if not len(self._inverse):
            return torch.zeros_like(vectors)
        coefficients = _dots(vectors, self._moves) @ self._inverse
        return coefficients.to(vectors) @ self._turns

    def estimate(self, record: RoundRecord, global_weights: Tensor) -> Estimates:
        """Estimate from the anchors; a client that was never asked has no estimate."""
        rows = self._rows_of(record)
        usable = self._round[rows] >= 0
        if not bool(usable.any()):
            return Estimates(record.updates, largest_magnitudes(record.updates), usable)
        vectors, which = self._vectors(record, global_weights, rows)
        if self._estimates is None:
            self._estimates = torch.empty_like(self._anchors)
        estimates = self._estimates[: len(rows)]
        if self._compiles(len(rows)):
            from fedrec.functional.kernels import _numba_estimates

            largest = _numba_estimates.combine(
                updates=record.updates.contiguous().numpy(),
                **self._arrays(vectors, which, rows),
                out=estimates.numpy(),
            )
            return Estimates(estimates, torch.from_numpy(largest), usable)
        at = picking(rows, global_weights.device)
        torch.add(self._origins()[at], record.updates, alpha=self._beta, out=estimates)
        for number, vector in enumerate(vectors):
            estimates[picking((which == number).nonzero().flatten(), vector.device)] += vector
        return Estimates(estimates, largest_magnitudes(estimates), usable)

    def aggregate(
        self, record: RoundRecord, global_weights: Tensor, rule: ColumnRule
    ) -> AggregatedEstimates | None:
        """Estimate and aggregate in one pass, where that is compiled."""
        rows = self._rows_of(record)
        usable = self._round[rows] >= 0
        if not bool(usable.all()) or not self._compiles(len(rows)):
            return None
        from fedrec.functional.kernels import _numba_estimates

        weights = global_weights.numpy()
        found = _numba_estimates.reduce(
            updates=stored_rows(record.sent),
            **self._arrays(*self._vectors(record, global_weights, rows), rows),
            factors=(torch.empty(0) if rule.factors is None else rule.factors).numpy(),
            num_trim=rule.num_trim,
            # There are no pairs to be multiplied for the next round.
            following=_numba_estimates.Following(
                weights, 0.0, weights, weights, weights[None], weights[None], 0.0, 0.0
            ),
        )
        aggregate, largest = torch.from_numpy(found.aggregate), torch.from_numpy(found.largest)
        return AggregatedEstimates(aggregate, largest, usable)

    def _arrays(self, vectors: Tensor, which: Tensor, rows: Tensor) -> dict[str, Any]:
        """Return what a compiled pass over these clients needs; none has pairs of its own."""
        k, d = len(rows), vectors.shape[1]
        none = torch.empty(k, 0).numpy()
        return {
            "vectors": vectors.numpy(),
            "which": which.numpy(),
            "sigma": torch.ones(k).numpy(),
            "pool": torch.empty(0, d).numpy(),
            "slots": torch.empty(k, 0, dtype=torch.int64).numpy(),
            "of_pool": none,
            "delta_g": torch.empty(len(self._rows), 0, d).numpy(),
            "clients": rows.numpy(),
            "own": none,
            "anchors": (self._origins().numpy(), self._beta),
            "num_threads": torch.get_num_threads(),
        }

    def _compiles(self, num_rows: int) -> bool:
        return choose_kernel(self._anchors.device, num_rows, self._anchors.shape[1]) == "numba"

    def _vectors(self, record: RoundRecord, weights: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what B adds for each round of anchors, (g, d), and which of them is whose."""
        known, which = self._known_rounds(rows)
        ways = []
        for t in known:
            now, then = self._models[t]
            ways.append((weights - now).sub_(record.global_weights - then, alpha=self._beta))
        return self._times_curvature(torch.stack(ways)).mul_(self._gamma), which

    def kept_bytes(self, num_clients: int, num_parameters: int) -> int:
        """Return the bytes of anchors, estimates and what B is made of."""
        rows = 5 * num_clients + 2 * self.num_secants + 3
        return rows * num_parameters * torch.float32.itemsize

    def state_dict(self) -> dict[str, Any]:
        """Return clients, anchors and what was learnt."""
        return {
            "remaining": list(self._rows),
            "weights": [self._beta, self._gamma, self._common_gain, self._length],
            **{name: getattr(self, f"_{name}") for name in _TENSORS},
            "model_rounds": list(self._models),
            "models": [list(models) for models in self._models.values()],
            "errors": self._errors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._rows = {c: i for i, c in enumerate(state["remaining"])}
        self._begin()
        if state["models"]:
            self._allocate(state["models"][0][0])
        self._beta, self._gamma, self._common_gain, self._length = state["weights"]
        for name in _TENSORS:
            setattr(self, f"_{name}", state[name].to(getattr(self, f"_{name}").device))
        models = [(now, then) for now, then in state["models"]]
        self._models = dict(zip(state["model_rounds"], models, strict=True))
        self._errors = state["errors"]

    def diagnostics(self) -> dict[str, float]:
        """Return the last weights, and the gain of what clients have in common."""
        return {
            "history_weight": self._beta,
            "curvature_weight": self._gamma,
            "common_gain": self._common_gain,
        }


_TENSORS = (
    *("products", "successive", "round", "anchors", "exact", "recorded"),
    *("moves", "turns", "inverse"),
)


def _newest(vectors: Tensor, vector: Tensor, count: int) -> Tensor:
    """Return so many of the vectors, (m, d), with one more at the end."""
    return torch.cat([vectors.reshape(-1, len(vector)).to(vector), vector[None]])[-count:]


def _inverse(products: Tensor) -> Tensor:
    """Return what makes coefficients of turns from products of moves with a vector, (m, m).

    Points are sums of moves, the first of them 0, without their mean.

    Args:
        products: Of moves with each other, shape (m, m).
    """
    m = len(products)
    points = torch.ones(m + 1, m, dtype=torch.float64).tril(diagonal=-1)
    points -= points.mean(dim=0)
    squares = points @ products @ points.mT
    ridge = RIDGE * squares.diagonal().mean()
    if not 0 < float(ridge) < float("inf"):
        return torch.empty(0, dtype=torch.float64)
    eye = torch.eye(m + 1, dtype=torch.float64)
    of_points: Tensor = torch.linalg.solve(squares + ridge * eye, points)
    return points.mT @ of_points


def _dots(vectors: Tensor, others: Tensor) -> Tensor:
    """Return the products of vectors, (n, d) and (m, d), in float64 on the CPU, (n, m)."""
    n, m = len(vectors), len(others)
    if choose_kernel(vectors.device, n, vectors.shape[1]) == "numba":  # whatever the threads
        every = torch.arange(m).repeat(n, 1)
        return compiled_dots(vectors, torch.arange(n), others, every)
    return (vectors.double() @ others.double().mT).cpu()
