"""Buffers of L-BFGS pairs, one per client, and the estimates made from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedrec.functional.lbfgs import condition_number, lbfgs_hvp, middle_inverse

__all__ = ["PairedBuffer", "PaperBuffer"]

# A pair with s.y <= CURVATURE |s|^2 says nothing about a positive definite Hessian.
CURVATURE = 1e-8
# Beyond this condition number, infinity included, the oldest pair is left out.
MAX_CONDITION = 1e10


class PairedBuffer:
    r"""The last $s$ usable pairs $(\Delta w_t, \Delta g_t^i)$ of each client.

    Both halves of a pair come from the same round, so the secant equation holds for the newest one.
    A pair without positive curvature is not taken, and pairs whose dot products overflow are not
    used together. Dot products between pairs are computed once, at
    the push; the $2s \times 2s$ systems are inverted once per change.

    Args:
        num_clients: $c$.
        buffer_size: $s$.
        num_parameters: $d$.
        device: Where pairs are kept: $c (s + 1) d$ floats at most when all clients push together.
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

    def push(
        self, rows: Tensor, delta_w: Tensor, delta_g: Tensor, round: int, everyone: bool
    ) -> None:
        """Add one pair to each of these clients, in place of its oldest.

        Args:
            rows: Clients, shape $(k,)$.
            delta_w: Global-model difference at the start of the round, shape $(d,)$.
            delta_g: Model-update differences, shape $(k, d)$.
            round: Round the pair comes from; increases from call to call.
            everyone: Whether all clients of the round push (of no importance here).
        """
        ww = float(delta_w @ delta_w)
        curvature = (delta_g @ delta_w).cpu().double()
        keep = (curvature > CURVATURE * ww) & bool(0 < ww < float("inf"))
        keep &= torch.isfinite(curvature)
        self.skipped += int((~keep).sum())
        if not bool(keep.any()):
            return
        rows, delta_g = rows[keep], delta_g[keep.to(delta_g.device)]
        rows, order = rows.sort()
        delta_g = delta_g[order.to(delta_g.device)]
        column = self.stamp[rows].argmin(dim=1)
        self.stamp[rows, column] = -1
        place = self._place(delta_w)
        self.delta_g[rows.to(delta_g.device), column.to(delta_g.device)] = delta_g
        self.slot[rows, column] = place
        self.stamp[rows, column] = round
        # New row and new column of S^T Y; every other entry is as before.
        with_pool = (delta_g @ self.pool.T).cpu().double()
        self.sy[rows, :, column] = with_pool.gather(1, self.slot[rows])
        at = rows.to(delta_g.device)
        theirs = self.delta_g if len(rows) == len(self.delta_g) else self.delta_g[at]
        self.sy[rows, column, :] = (theirs @ delta_w).cpu().double()
        self._solved = None

    def _place(self, delta_w: Tensor) -> int:
        used = set(self.slot[self.stamp >= 0].tolist())
        free = next((i for i in range(len(self.pool)) if i not in used), len(self.pool))
        if free == len(self.pool):
            self.pool = torch.cat([self.pool, delta_w[None]])
            self.gram = torch.nn.functional.pad(self.gram, (0, 1, 0, 1))
        self.pool[free] = delta_w
        products = (self.pool @ delta_w).cpu().double()
        self.gram[free, :] = products
        self.gram[:, free] = products
        return free

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

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return $\bar g^i + \tilde H^i v$ for these clients.

        Args:
            updates: Historical updates, shape $(k, d)$.
            v: $\hat w_t - \bar w_t$, shape $(d,)$.
            rows: Clients, shape $(k,)$.

        Returns:
            Estimated updates, shape $(k, d)$, and who has a pair at all, shape $(k,)$, bool. A
            client without one gets its historical update.
        """
        sigma, inverse, used = self._solve()
        c, s, d = self.delta_g.shape
        everyone = len(rows) == c and bool((rows == torch.arange(c)).all())
        delta_g = self.delta_g if everyone else self.delta_g[rows.to(self.delta_g.device)]
        gv = (delta_g.reshape(-1, d) @ v).reshape(-1, s).cpu().double()
        pool_v = (self.pool @ v).cpu().double()
        slot = self.slot[rows]
        sv = pool_v[slot] if len(pool_v) else torch.zeros_like(gv)
        # Products with pairs left out may overflow, and a coefficient of 0 makes NaN of infinity.
        right = torch.where(used[rows].repeat(1, 2), torch.cat([gv, sv], dim=1), 0.0)
        p = (inverse[rows] @ right[:, :, None])[:, :, 0]
        # One coefficient for v and one per distinct model difference: a single matrix product.
        shared = torch.zeros(len(rows), 1 + len(self.pool), dtype=torch.float64)
        shared[:, 0] = sigma[rows]
        if len(self.pool):
            shared[:, 1:].scatter_add_(1, slot, -p[:, s:])
        basis = torch.cat([v[None], self.pool])
        estimates = torch.addmm(updates, shared.to(updates.dtype).to(updates.device), basis)
        own = (-p[:, :s]).to(updates.dtype).to(updates.device)
        estimates[:, None].baddbmm_(own[:, None], delta_g)
        return estimates, used[rows].any(dim=1)

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
        self, rows: Tensor, delta_w: Tensor, delta_g: Tensor, round: int, everyone: bool
    ) -> None:
        """Add the newest differences; see `PairedBuffer.push`."""
        if everyone:
            self.delta_w = torch.cat([self.delta_w[1:], delta_w[None]])
            self.count_w += 1
        at = rows.to(delta_g.device)
        self.delta_g[at] = torch.cat([self.delta_g[at, 1:], delta_g[:, None]], dim=1)
        self.count_g[rows] += 1

    def estimate(self, updates: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate as `PairedBuffer.estimate` does; a singular system gives NaN."""
        s = len(self.delta_w)
        filled = torch.minimum(self.count_g[rows], torch.tensor(self.count_w))
        valid = torch.arange(s)[None] >= s - filled[:, None]
        at = rows.to(updates.device)
        product = lbfgs_hvp(self.delta_w, self.delta_g[at], v, valid)
        return updates + product, filled > 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device) if isinstance(value, Tensor) else value)
