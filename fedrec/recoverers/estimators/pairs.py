"""The L-BFGS pairs of each client, and the estimates made from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrec.aggregators.base import ColumnRule
from fedrec.functional.aggregation.order_statistics import choose_kernel
from fedrec.functional.recovery.lbfgs import condition_number, middle_inverse
from fedrec.history.undecoded import stored_rows
from fedrec.recoverers.estimators._rows import picking
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates
from fedrec.recoverers.threshold import largest_magnitudes
from fedrec.types import RoundRecord

__all__ = ["ClientPairs", "Sources", "compiled_dots"]

# A pair with s.y <= CURVATURE |s|^2, or |s.y| where negative ones are taken, is not used.
CURVATURE = 1e-8
# Beyond this condition number, infinity included, the oldest pair is left out.
MAX_CONDITION = 1e10
# Pairs that a CPU works on at a time: what was just written is read again while in its cache.
BLOCK_BYTES = 1 << 23


class Sources(NamedTuple):
    r"""What the vectors that estimates multiply with are computed from.

    $$v_g = \gamma \left[ (\hat w - \hat w_g) - \beta (\bar w - \bar w_g) \right]$$

    Attributes:
        weights: $\hat w$, shape $(d,)$.
        recorded: $\bar w$, shape $(d,)$.
        now: $\hat w_g$, shape $(g, d)$.
        then: $\bar w_g$, shape $(g, d)$.
        beta: $\beta$.
        gamma: $\gamma$.
    """

    weights: Tensor
    recorded: Tensor
    now: Tensor
    then: Tensor
    beta: float
    gamma: float

    def vectors(self) -> Tensor:
        """Return all $v_g$, shape $(g, d)$, compiled by numba."""
        from fedrec.functional.kernels import _numba_estimates

        found = _numba_estimates.vectors_of(
            self.weights.numpy(),
            self.recorded.numpy(),
            self.now.numpy(),
            self.then.numpy(),
            self.beta,
            self.gamma,
        )
        return torch.from_numpy(found)


class _Systems(NamedTuple):
    """What the coefficients of some clients, k of them, are made of.

    Attributes:
        sigma: Shape (k,).
        inverse: Transposed, shape (k, 2s, 2s).
        used: Which pairs are used, update differences first, shape (k, 2s).
        usable: Who has a pair, shape (k,).
        slot: Which model differences of the pool are theirs, shape (k, s).
    """

    sigma: Tensor
    inverse: Tensor
    used: Tensor
    usable: Tensor
    slot: Tensor


class ClientPairs:
    r"""The last $s$ usable pairs $(\Delta w_t, \Delta g_t^i)$ of each client.

    Both halves of a pair come from the same round, so the secant equation holds for the newest one.
    A pair without positive curvature is not taken, unless `negative` or `alone` says otherwise,
    and pairs whose dot products overflow are not used together. Dot products between pairs are
    computed once, at the push; the $2s \times 2s$ systems are inverted once per change. An estimate
    of all clients is then one product of the pairs with a vector, and one pass that adds the pairs
    to the historical updates.

    Args:
        num_clients: $c$.
        buffer_size: $s$.
        num_parameters: $d$.
        device: Where all is kept: $c s d$ floats of update differences, $c d$ of estimates, and
            $d$ for every round that a pair comes from ($s$ of them if all clients push together).
        negative: Whether pairs of negative curvature are taken, too.
    """

    def __init__(
        self,
        num_clients: int,
        buffer_size: int,
        num_parameters: int,
        device: torch.device,
        *,
        negative: bool = False,
    ) -> None:
        c, s, d = num_clients, buffer_size, num_parameters
        self.delta_g = torch.zeros(c, s, d, device=device)
        # Clients that push in the same round share one row here.
        self.pool = torch.zeros(1, d, device=device)
        self.slot = torch.zeros(c, s, dtype=torch.int64)
        self.stamp = torch.full((c, s), -1, dtype=torch.int64)
        self.sy = torch.zeros(c, s, s, dtype=torch.float64)
        self.gram = torch.zeros(1, 1, dtype=torch.float64)
        self.negative = negative
        self.skipped = 0
        self._solved: tuple[Tensor, Tensor, Tensor] | None = None
        # Of the clients that were asked for last, and that they are.
        self._chosen: tuple[tuple[Tensor, Tensor, Tensor], Tensor, _Systems] | None = None
        self._estimates: Tensor | None = None
        # Vectors of the next round, if it goes as expected, whose they are, and clients; products
        # with the clients' pairs, and with the pool.
        self._ahead: tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def push(
        self,
        rows: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        round: int,
        alone: bool,
    ) -> None:
        """Add one pair to each of these clients, in place of its oldest.

        Args:
            rows: Clients, each once, shape $(k,)$.
            delta_w: Global-model difference at the start of the round, shape $(d,)$.
            exact: What they sent, shape $(k, d)$.
            historical: What they had sent in the recording, shape $(k, d)$.
            round: Round the pair comes from; increases from call to call.
            alone: Whether they were asked on their own account, and not in a round for all: the
                pair takes the place of all others of its client, and may have negative curvature.
        """
        self._ahead = None
        ww = self._square(delta_w, len(rows))
        if not 0 < ww < float("inf"):
            self.skipped += len(rows)
            return
        column = self.stamp[rows].argmin(dim=1)
        found = self._compiled_differences if self.compiles(len(rows)) else self._differences
        negative = self.negative or alone
        with_own, with_new, keep = found(
            rows, column, delta_w, exact, historical, CURVATURE * ww, negative
        )
        self.skipped += int((~keep).sum())
        if not bool(keep.any()):
            return
        rows, column = rows[keep], column[keep]
        if alone:
            self.stamp[rows] = -1
        self.stamp[rows, column] = -1
        self.slot[rows, column] = self._place(delta_w, ww, rows)
        self.stamp[rows, column] = round
        # New row and new column of S^T Y; every other entry is as before.
        self.sy[rows, :, column] = with_own[keep]
        self.sy[rows, column, :] = with_new[keep]
        self._solved = None

    def _differences(
        self,
        rows: Tensor,
        column: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        least: float,
        negative: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put the new update differences in their places, where the curvature exceeds `least`.

        With `negative`, that is its size.

        Returns:
            Their products with the client's model differences, and those of the client's update
            differences with the new model difference, the new ones in their column, each of shape
            (k, s); and who got one, shape (k,).
        """
        s, d = self.delta_g.shape[1:]
        keep = torch.zeros(len(rows), dtype=torch.bool)
        with_own, with_new = torch.zeros(2, len(rows), s, dtype=torch.float64)
        scratch = None
        for block, clients in self._blocks(rows):
            if scratch is None:  # the first block is the longest
                scratch = torch.empty_like(exact[block])
            k = block.stop - block.start
            delta_g = torch.sub(exact[block], historical[block], out=scratch[:k])
            curvature = (delta_g @ delta_w).cpu().double()
            with_pool = (delta_g @ self.pool.mT).cpu().double()
            with_own[block] = with_pool.gather(1, self.slot[rows[block]])
            with_own[block].scatter_(1, column[block, None], curvature[:, None])
            size = curvature.abs() if negative else curvature
            kept = (size > least) & torch.isfinite(curvature)
            keep[block] = kept
            if not bool(kept.all()):
                delta_g = delta_g[kept.to(delta_g.device)]
            at = rows[block][kept].to(delta_g.device), column[block][kept].to(delta_g.device)
            self.delta_g[at] = delta_g
            products = self.delta_g[clients].reshape(-1, d) @ delta_w
            with_new[block] = products.cpu().double().view(-1, s)
        return with_own, with_new, keep

    def _compiled_differences(
        self,
        rows: Tensor,
        column: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        least: float,
        negative: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `_differences` does, client by client in the processor's cache."""
        from fedrec.functional.kernels import _numba_pairs

        with_own, with_new, keep = _numba_pairs.push(
            exact.contiguous().numpy(),
            historical.contiguous().numpy(),
            delta_w.contiguous().numpy(),
            self.pool.numpy(),
            torch.where(self.stamp[rows] >= 0, self.slot[rows], -1).numpy(),
            least,
            negative,
            self.delta_g.numpy(),
            rows.numpy(),
            column.numpy(),
            torch.get_num_threads(),
        )
        return torch.from_numpy(with_own), torch.from_numpy(with_new), torch.from_numpy(keep)

    def compiles(self, num_rows: int) -> bool:
        """Whether the work for so many clients is done by numba."""
        return choose_kernel(self.delta_g.device, num_rows, self.delta_g.shape[2]) == "numba"

    def _square(self, delta_w: Tensor, num_rows: int) -> float:
        if self.compiles(num_rows):  # the bits of torch's product depend on its threads
            first = torch.zeros(1, 1, dtype=torch.int64)
            return float(compiled_dots(delta_w[None], first[0], delta_w[None], first))
        return float(delta_w @ delta_w)

    def _place(self, delta_w: Tensor, ww: float, rows: Tensor) -> int:
        """Put the model difference of these clients into a row of the pool that is free."""
        used = set(self.slot[self.stamp >= 0].tolist())
        free = next((i for i in range(len(self.pool)) if i not in used), len(self.pool))
        if free == len(self.pool):
            self.pool = torch.cat([self.pool, delta_w[None]])
            self.gram = torch.nn.functional.pad(self.gram, (0, 1, 0, 1))
        self.pool[free] = delta_w
        # Products with what no client has besides are never asked for.
        first = torch.zeros(len(rows), 1, dtype=torch.int64)
        products = self._with_models(delta_w[None], first, self.slot[rows])[0]
        products[free] = ww
        self.gram[free] = self.gram[:, free] = products
        return free

    def _with_models(self, vectors: Tensor, which: Tensor, slots: Tensor) -> Tensor:
        """Return products (g, b) of vectors with model differences, at least where one has both.

        Args:
            vectors: Shape (g, d).
            which: Vectors of each client, shape (k, q).
            slots: Model differences of each client, shape (k, s).
        """
        products = torch.zeros(len(vectors), len(self.pool), dtype=torch.float64)
        if self.compiles(len(which)):
            asked = torch.zeros(products.shape, dtype=torch.bool)
            asked[which[:, :, None], slots[:, None]] = True
            mine, theirs = asked.nonzero(as_tuple=True)
            products[mine, theirs] = compiled_dots(self.pool, theirs, vectors, mine[:, None])[:, 0]
        else:
            products = (vectors @ self.pool.mT).cpu().double()
        return products

    def _blocks(self, rows: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
        """Split `rows`; yield places in it and the clients there, a slice if they are in order."""
        s, d = self.delta_g.shape[1:]
        size = len(rows)
        if self.delta_g.device.type == "cpu":
            size = max(BLOCK_BYTES // (s * d * self.delta_g.element_size()), 1)
        for start in range(0, len(rows), size):
            block = slice(start, min(start + size, len(rows)))
            yield block, picking(rows[block], self.delta_g.device)

    def _solve(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sigma (c,), and in storage order the inverse (c, 2s, 2s) and used pairs (c, s)."""
        if self._solved is not None:
            return self._solved
        c, s = self.stamp.shape
        order = self.stamp.argsort(dim=1, stable=True)
        client = torch.arange(c)[:, None, None]
        sy = self.sy[client, order[:, :, None], order[:, None, :]]
        slot = self.slot.gather(1, order)
        valid = self.stamp.gather(1, order) >= 0
        ss = self.gram[slot[:, :, None], slot[:, None, :]]
        while True:
            bad = condition_number(sy, ss, valid) > MAX_CONDITION  # without a pair it is 1
            if not bool(bad.any()):
                break
            oldest = valid.int().argmax(dim=1)
            valid[bad, oldest[bad]] = False
        sigma, inverse = middle_inverse(sy, ss, valid)
        both = torch.cat([order, order + s], dim=1)
        stored = torch.empty_like(inverse)
        stored[client, both[:, :, None], both[:, None, :]] = inverse
        used = torch.empty_like(valid).scatter_(1, order, valid)
        self._solved = sigma, stored, used
        return self._solved

    def _systems(self, rows: Tensor) -> _Systems:
        """Return what these clients' coefficients are made of; once, while nothing is pushed."""
        solved, chosen = self._solve(), self._chosen
        if chosen is None or chosen[0] is not solved or not torch.equal(chosen[1], rows):
            sigma, inverse, used = (of_all[rows] for of_all in solved)
            usable, slot = used.any(dim=1), self.slot[rows]
            systems = _Systems(sigma, inverse.mT, used.repeat(1, 2), usable, slot)
            self._chosen = chosen = solved, rows, systems
        return chosen[2]

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> Estimates:
        r"""Return $\bar g^i + \tilde H^i v$ for these clients.

        Args:
            updates: Historical updates, shape $(k, d)$; they are not changed.
            v: $\hat w_t - \bar w_t$, shape $(d,)$.
            rows: Clients, each once, shape $(k,)$.

        Returns:
            Estimates, in memory that the next call writes to again. A client without a pair has
            none, and gets its historical update.
        """
        if self.compiles(len(rows)):
            return self.combined(updates, v[None], torch.zeros_like(rows), rows)
        s = self.delta_g.shape[1]
        sigma, p, usable = self.coefficients(v[None], torch.zeros_like(rows)[:, None], rows)
        p, estimates = p[:, 0], self._memory(updates)
        # One coefficient for v and one per distinct model difference: a single matrix product.
        shared = torch.zeros(len(rows), 1 + len(self.pool), dtype=torch.float64)
        shared[:, 0] = sigma
        shared[:, 1:].scatter_add_(1, self.slot[rows], -p[:, s:])
        basis = torch.cat([v[None], self.pool])
        shared = shared.to(updates.dtype).to(updates.device)
        own = (-p[:, None, :s]).to(updates.dtype).to(updates.device)
        parts = []
        for block, clients in self._blocks(rows):
            part = torch.addmm(updates[block], shared[block], basis, out=estimates[block])
            part[:, None].baddbmm_(own[block], self.delta_g[clients])
            parts.append(largest_magnitudes(part))
        return Estimates(estimates, torch.cat(parts), usable)

    def combined(
        self,
        updates: Tensor,
        vectors: Tensor,
        which: Tensor,
        rows: Tensor,
        anchors: tuple[Tensor, float] | None = None,
    ) -> Estimates:
        """Do what `estimate` does, with a vector for each client, in one pass compiled by numba.

        Args:
            updates: As in `estimate`.
            vectors: Vectors that clients share, shape $(g, d)$; none if no product is added to the
                anchors.
            which: The one of each of these clients, shape $(k,)$.
            rows: As in `estimate`.
            anchors: As in `fedrec.functional.kernels._numba_estimates.combine`.
        """
        from fedrec.functional.kernels import _numba_estimates

        estimates = self._memory(updates)
        arrays, usable = self._arrays(vectors, which, rows, anchors)
        largest = _numba_estimates.combine(
            updates=updates.contiguous().numpy(), **arrays, out=estimates.numpy()
        )
        return Estimates(estimates, torch.from_numpy(largest), usable)

    def aggregated(
        self,
        record: RoundRecord,
        sources: Sources,
        which: Tensor,
        rows: Tensor,
        rule: ColumnRule,
        anchors: tuple[Tensor, float] | None = None,
    ) -> AggregatedEstimates:
        """Aggregate what `combined` returns, and multiply for the next round in the same pass.

        They are used if the next vectors are those that this rule's step leads to, in a recovery
        whose recording took steps of the same size.

        Args:
            record: The recorded round of these clients.
            sources: What the vectors that clients share are computed from, now and in the next
                round.
            which: As in `combined`, like `rows` and `anchors`.
            rows: Shape $(k,)$.
            rule: The aggregation rule.
            anchors: Where estimates start.
        """
        from fedrec.functional.kernels import _numba_estimates

        vectors = sources.vectors()
        arrays, usable = self._arrays(vectors, which, rows, anchors)
        found = _numba_estimates.reduce(
            updates=stored_rows(record.sent),
            **arrays,
            factors=(torch.empty(0) if rule.factors is None else rule.factors).numpy(),
            num_trim=rule.num_trim,
            following=_numba_estimates.Following(
                weights=sources.weights.numpy(),
                server_lr=rule.server_lr,
                recorded=record.global_weights.numpy(),
                recorded_aggregate=record.aggregate.numpy(),
                now=sources.now.numpy(),
                then=sources.then.numpy(),
                beta=sources.beta,
                gamma=sources.gamma,
            ),
        )
        if len(vectors):
            asked = torch.from_numpy(found.vectors), which[:, None], rows
            products = torch.from_numpy(found.products)[:, None], torch.from_numpy(found.of_pool)
            self._ahead = asked, products
        aggregate, largest = torch.from_numpy(found.aggregate), torch.from_numpy(found.largest)
        return AggregatedEstimates(aggregate, largest, usable)

    def _arrays(
        self,
        vectors: Tensor,
        which: Tensor,
        rows: Tensor,
        anchors: tuple[Tensor, float] | None,
    ) -> tuple[dict[str, Any], Tensor]:
        """Return what a compiled pass over these clients needs, and who has a pair."""
        k, s = len(rows), self.delta_g.shape[1]
        if len(vectors):
            sigma, p, usable = self.coefficients(vectors, which[:, None], rows)
        else:
            s, sigma, p = 0, torch.empty(0), torch.empty(k, 1, 0)
            usable = torch.ones(k, dtype=torch.bool)
        p, start = -p[:, 0].float(), None
        if anchors is not None:
            start = anchors[0].numpy(), anchors[1]
        arrays = {
            "vectors": vectors.contiguous().numpy(),
            "which": which.numpy(),
            "sigma": sigma.float().numpy(),
            "pool": self.pool.numpy(),
            "slots": self.slot[rows, :s].numpy(),
            "of_pool": p[:, s:].contiguous().numpy(),
            "delta_g": self.delta_g[:, :s].numpy(),
            "clients": rows.numpy(),
            "own": p[:, :s].contiguous().numpy(),
            "anchors": start,
            "num_threads": torch.get_num_threads(),
        }
        return arrays, usable

    def _memory(self, updates: Tensor) -> Tensor:
        """Return the memory of the estimates that start from these updates."""
        if self._estimates is None:
            self._estimates = updates.new_empty(len(self.delta_g), updates.shape[1])
        return self._estimates[: len(updates)]

    def coefficients(
        self, vectors: Tensor, which: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return what products $\tilde H^i v = \sigma v - [Y, S] p$ consist of.

        Args:
            vectors: Vectors $v$ that clients share, shape $(g, d)$.
            which: Those of each of these clients, shape $(k, q)$.
            rows: Clients, each once, shape $(k,)$.

        Returns:
            $\sigma$, shape $(k,)$; $p$, update differences first, shape $(k, q, 2s)$; and who has
            a pair, shape $(k,)$.
        """
        of_rows = self._systems(rows)
        asked = vectors, which, rows
        if self._ahead is not None and all(map(torch.equal, asked, self._ahead[0])):
            gv, with_models = self._ahead[1]
        else:
            gv = self._products(*asked)
            with_models = self._with_models(vectors, which, of_rows.slot)
        sv = with_models[which[:, :, None], of_rows.slot[:, None]]
        # Products with pairs left out may overflow, and a coefficient of 0 makes NaN of infinity.
        right = torch.where(of_rows.used[:, None], torch.cat([gv, sv], dim=2), 0.0)
        return of_rows.sigma, right @ of_rows.inverse, of_rows.usable

    def _products(self, vectors: Tensor, which: Tensor, rows: Tensor) -> Tensor:
        """Return the products of these clients' update differences with vectors, (k, q, s)."""
        s, d = self.delta_g.shape[1:]
        if self.compiles(len(rows)):
            pairs = (rows[:, None] * s + torch.arange(s)).flatten()
            theirs = which.repeat_interleave(s, dim=0)
            gv = compiled_dots(self.delta_g.view(-1, d), pairs, vectors, theirs)
            return gv.view(len(rows), s, -1).mT
        parts = [self.delta_g[clients] @ vectors.mT for _, clients in self._blocks(rows)]
        gv = torch.cat(parts).cpu().double().mT
        return gv.gather(1, which[:, :, None].expand(-1, -1, s))

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        names = ("delta_g", "pool", "slot", "stamp", "sy", "gram", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device) if isinstance(value, Tensor) else value)
        self._solved = self._ahead = None


def compiled_dots(matrix: Tensor, rows: Tensor, vectors: Tensor, which: Tensor) -> Tensor:
    """Return the products of these rows (k,) with vectors (k, q), summed in float64."""
    from fedrec.functional.kernels import _numba_pairs

    found = _numba_pairs.dots(
        matrix.contiguous().numpy(),
        rows.contiguous().numpy(),
        vectors.contiguous().numpy(),
        which.contiguous().numpy(),
        torch.get_num_threads(),
    )
    return torch.from_numpy(found)
