"""Buffers of L-BFGS pairs, one per client, and the estimates made from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedrec.functional.lbfgs import condition_number, lbfgs_hvp, middle_inverse
from fedrec.functional.order_statistics import choose_kernel
from fedrec.recoverers.threshold import largest_magnitudes

__all__ = ["PairedBuffer", "PaperBuffer"]

# A pair with s.y <= CURVATURE |s|^2 says nothing about a positive definite Hessian.
CURVATURE = 1e-8
# Beyond this condition number, infinity included, the oldest pair is left out.
MAX_CONDITION = 1e10
# Pairs that a CPU works on at a time: what was just written is read again while in its cache.
BLOCK_BYTES = 1 << 23


class PairedBuffer:
    r"""The last $s$ usable pairs $(\Delta w_t, \Delta g_t^i)$ of each client.

    Both halves of a pair come from the same round, so the secant equation holds for the newest one.
    A pair without positive curvature is not taken, and pairs whose dot products overflow are not
    used together. Dot products between pairs are computed once, at the push; the
    $2s \times 2s$ systems are inverted once per change. An estimate of all clients is then one
    product of the pairs with a vector, and one pass that adds the pairs to the historical updates.

    Args:
        num_clients: $c$.
        buffer_size: $s$.
        num_parameters: $d$.
        device: Where all is kept: $c s d$ floats of update differences, $c d$ of estimates, and
            $d$ for every round that a pair comes from ($s$ of them if all clients push together).
    """

    def __init__(
        self, num_clients: int, buffer_size: int, num_parameters: int, device: torch.device
    ) -> None:
        c, s, d = num_clients, buffer_size, num_parameters
        self.delta_g = torch.zeros(c, s, d, device=device)
        # Clients that push in the same round share one row here.
        self.pool = torch.zeros(0, d, device=device)
        self.slot = torch.zeros(c, s, dtype=torch.int64)
        self.stamp = torch.full((c, s), -1, dtype=torch.int64)
        self.sy = torch.zeros(c, s, s, dtype=torch.float64)
        self.gram = torch.zeros(0, 0, dtype=torch.float64)
        self.skipped = 0
        self._solved: tuple[Tensor, Tensor, Tensor] | None = None
        self._estimates: Tensor | None = None

    def push(
        self,
        rows: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        round: int,
        everyone: bool,
    ) -> None:
        """Add one pair to each of these clients, in place of its oldest.

        Args:
            rows: Clients, each once, shape $(k,)$.
            delta_w: Global-model difference at the start of the round, shape $(d,)$.
            exact: What they sent, shape $(k, d)$.
            historical: What they had sent in the recording, shape $(k, d)$.
            round: Round the pair comes from; increases from call to call.
            everyone: Whether all clients of the round push (of no importance here).
        """
        # Not joined into one matrix: the pool may be as large as many clients' pairs.
        with_models = torch.cat([(delta_w @ delta_w)[None], self.pool @ delta_w]).cpu().double()
        ww = float(with_models[0])
        if not 0 < ww < float("inf"):
            self.skipped += len(rows)
            return
        s, d = self.delta_g.shape[1:]
        column = self.stamp[rows].argmin(dim=1)
        keep = torch.zeros(len(rows), dtype=torch.bool)
        # Of the new update differences with all models, and of all pairs with the new model.
        new_row = torch.zeros(len(rows), 1 + len(self.pool), dtype=torch.float64)
        new_column = torch.zeros(len(rows), s, dtype=torch.float64)
        scratch = None
        for block, clients in self._blocks(rows):
            if scratch is None:  # the first block is the longest
                scratch = torch.empty_like(exact[block])
            k = block.stop - block.start
            delta_g = torch.sub(exact[block], historical[block], out=scratch[:k])
            products = torch.cat([(delta_g @ delta_w)[:, None], delta_g @ self.pool.mT], dim=1)
            products = products.cpu().double()
            new_row[block] = products
            curvature = products[:, 0]
            kept = (curvature > CURVATURE * ww) & torch.isfinite(curvature)
            keep[block] = kept
            if not bool(kept.all()):
                delta_g = delta_g[kept.to(delta_g.device)]
            at = rows[block][kept].to(delta_g.device), column[block][kept].to(delta_g.device)
            self.delta_g[at] = delta_g
            new_column[block] = (
                (self.delta_g[clients].reshape(-1, d) @ delta_w).cpu().double().view(-1, s)
            )
        self.skipped += int((~keep).sum())
        if not bool(keep.any()):
            return
        rows, column, new_row = rows[keep], column[keep], new_row[keep]
        self.stamp[rows, column] = -1
        place = self._place(delta_w, with_models)
        self.slot[rows, column] = place
        self.stamp[rows, column] = round
        # New row and new column of S^T Y; every other entry is as before.
        with_pool = torch.zeros(len(rows), len(self.pool), dtype=torch.float64)
        with_pool[:, : new_row.shape[1] - 1] = new_row[:, 1:]
        with_pool[:, place] = new_row[:, 0]
        self.sy[rows, :, column] = with_pool.gather(1, self.slot[rows])
        self.sy[rows, column, :] = new_column[keep]
        self._solved = None

    def _place(self, delta_w: Tensor, with_models: Tensor) -> int:
        """Put the model difference into a row of the pool that no pair uses; return which."""
        used = set(self.slot[self.stamp >= 0].tolist())
        free = next((i for i in range(len(self.pool)) if i not in used), len(self.pool))
        old = len(self.pool)
        if free == old:
            self.pool = torch.cat([self.pool, delta_w[None]])
            self.gram = torch.nn.functional.pad(self.gram, (0, 1, 0, 1))
        self.pool[free] = delta_w
        self.gram[free, :old] = with_models[1:]
        self.gram[:old, free] = with_models[1:]
        self.gram[free, free] = with_models[0]
        return free

    def _blocks(self, rows: Tensor) -> Iterator[tuple[slice, slice | Tensor]]:
        """Split `rows`; yield places in it and the clients there, a slice if they are in order."""
        s, d = self.delta_g.shape[1:]
        size = len(rows)
        if self.delta_g.device.type == "cpu":
            size = max(BLOCK_BYTES // (s * d * self.delta_g.element_size()), 1)
        for start in range(0, len(rows), size):
            block = slice(start, min(start + size, len(rows)))
            clients = rows[block]
            if bool((clients.diff() == 1).all()):
                yield block, slice(int(clients[0]), int(clients[-1]) + 1)
            else:
                yield block, clients.to(self.delta_g.device)

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
        ss = torch.zeros(c, s, s, dtype=torch.float64)
        if len(self.pool):
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

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return $\bar g^i + \tilde H^i v$ for these clients.

        Args:
            updates: Historical updates, shape $(k, d)$; they are not changed.
            v: $\hat w_t - \bar w_t$, shape $(d,)$.
            rows: Clients, each once, shape $(k,)$.

        Returns:
            Estimated updates, shape $(k, d)$, in memory that the next call writes to again; the
            largest magnitude in each, shape $(k,)$; and who has a pair at all, shape $(k,)$, bool.
            A client without one gets its historical update.
        """
        sigma, inverse, used = self._solve()
        c, s, d = self.delta_g.shape
        if self._estimates is None:
            self._estimates = updates.new_empty(c, d)
        estimates = self._estimates[: len(rows)]
        blocks = list(self._blocks(rows))
        products = [self.delta_g[clients].reshape(-1, d) @ v for _, clients in blocks]
        gv = torch.cat(products).cpu().double().view(-1, s)
        slot, used = self.slot[rows], used[rows]
        sv = (self.pool @ v).cpu().double()[slot] if len(self.pool) else torch.zeros_like(gv)
        # Products with pairs left out may overflow, and a coefficient of 0 makes NaN of infinity.
        right = torch.where(used.repeat(1, 2), torch.cat([gv, sv], dim=1), 0.0)
        p = (inverse[rows] @ right[:, :, None])[:, :, 0]
        if len(self.pool) and choose_kernel(updates.device, len(rows), d) == "numba":
            largest = self._combine(updates, v, rows, sigma[rows], p, estimates)
            return estimates, largest, used.any(dim=1)
        # One coefficient for v and one per distinct model difference: a single matrix product.
        shared = torch.zeros(len(rows), 1 + len(self.pool), dtype=torch.float64)
        shared[:, 0] = sigma[rows]
        if len(self.pool):
            shared[:, 1:].scatter_add_(1, slot, -p[:, s:])
        basis = torch.cat([v[None], self.pool])
        shared = shared.to(updates.dtype).to(updates.device)
        own = (-p[:, None, :s]).to(updates.dtype).to(updates.device)
        parts = []
        for block, clients in blocks:
            part = torch.addmm(updates[block], shared[block], basis, out=estimates[block])
            part[:, None].baddbmm_(own[block], self.delta_g[clients])
            parts.append(largest_magnitudes(part))
        return estimates, torch.cat(parts), used.any(dim=1)

    def _combine(
        self, updates: Tensor, v: Tensor, rows: Tensor, sigma: Tensor, p: Tensor, estimates: Tensor
    ) -> Tensor:
        """Do in one compiled pass what `estimate` does in blocks; return the largest magnitudes."""
        from fedrec.functional._numba_estimates import combine

        s = self.delta_g.shape[1]
        largest = combine(
            updates.contiguous().numpy(),
            v.contiguous().numpy(),
            sigma.float().numpy(),
            self.pool.numpy(),
            self.slot[rows].numpy(),
            (-p[:, s:]).float().contiguous().numpy(),
            self.delta_g.numpy(),
            rows.numpy(),
            (-p[:, :s]).float().contiguous().numpy(),
            estimates.numpy(),
            torch.get_num_threads(),
        )
        return torch.from_numpy(largest)

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        names = ("delta_g", "pool", "slot", "stamp", "sy", "gram", "skipped")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device) if isinstance(value, Tensor) else value)
        self._solved = None


class PaperBuffer:
    r"""The paper's literal reading of the buffers, for comparison with `PairedBuffer`.

    One buffer $\Delta W$ is filled only in rounds in which all clients were asked, and one buffer
    $\Delta G^i$ per client whenever it was asked. After an abnormality fix the two no longer
    describe the same rounds. No pair is ever skipped. Arguments and methods are those of
    `PairedBuffer`.

    Args:
        num_clients: $c$.
        buffer_size: $s$.
        num_parameters: $d$.
        device: Where the buffers are kept.
    """

    def __init__(
        self, num_clients: int, buffer_size: int, num_parameters: int, device: torch.device
    ) -> None:
        c, s, d = num_clients, buffer_size, num_parameters
        self.delta_w = torch.zeros(s, d, device=device)
        self.delta_g = torch.zeros(c, s, d, device=device)
        self.count_w = 0
        self.count_g = torch.zeros(c, dtype=torch.int64)
        self.skipped = 0

    def push(
        self,
        rows: Tensor,
        delta_w: Tensor,
        exact: Tensor,
        historical: Tensor,
        round: int,
        everyone: bool,
    ) -> None:
        """Add the newest differences; see `PairedBuffer.push`."""
        if everyone:
            self.delta_w = torch.cat([self.delta_w[1:], delta_w[None]])
            self.count_w += 1
        at = rows.to(exact.device)
        newest = (exact - historical)[:, None]
        self.delta_g[at] = torch.cat([self.delta_g[at, 1:], newest], dim=1)
        self.count_g[rows] += 1

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate as `PairedBuffer.estimate` does; a singular system gives NaN."""
        s = len(self.delta_w)
        filled = torch.minimum(self.count_g[rows], torch.tensor(self.count_w))
        valid = torch.arange(s)[None] >= s - filled[:, None]
        at = rows.to(updates.device)
        estimates = updates + lbfgs_hvp(self.delta_w, self.delta_g[at], v, valid)
        return estimates, largest_magnitudes(estimates), filled > 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device) if isinstance(value, Tensor) else value)
