"""The Krum attack: the farthest malicious update that Krum still picks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedrec.functional.aggregation.krum import krum_scores
from fedrec.functional.distances import pairwise_squared_distances, squared_norms
from fedrec.functional.kernels._columns import inner_products

__all__ = ["krum_attack", "krum_attack_partial"]

# Halvings tried at most: 2 ** -64 of any start is nothing.
_HALVINGS = 64


def krum_attack(updates: Tensor, malicious: Tensor, threshold: float = 1e-5) -> Tensor:
    r"""Compute what all malicious clients send so that Krum picks it, full knowledge.

    $$\tilde g = -\lambda\, s, \qquad s = \mathrm{sign}\bigl(\mathrm{Krum}(g_1, \dots, g_m)\bigr)$$

    with the largest $\lambda$ out of $\lambda_0, \lambda_0 / 2, \lambda_0 / 4, \dots$, not below
    the threshold, for which Krum picks $\tilde g$ out of the benign updates and $f$ copies of it;
    the smallest of them if it never does. The start is what no picked one can exceed:

    $$\lambda_0 = \sqrt{\frac{\min_i \sum_{j \in N_i} \lVert g_i - g_j \rVert^2}{(m - 2f - 1)\, d}}
    + \frac{\max_i \lVert g_i \rVert}{\sqrt d}$$

    over the benign clients $i$ and their $m - f - 2$ nearest benign neighbours $N_i$.

    Args:
        updates: Honest updates of all clients, shape $(m, d)$.
        malicious: Shape $(m,)$, bool, $f$ of them true.
        threshold: Smallest $\lambda$ to try.

    Returns:
        Shape $(d,)$.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> honest = torch.tensor([[-1.0], [-0.5], [0.5], [1.0], [0.6]])
        >>> krum_attack(honest, torch.tensor([False, False, False, False, True]))
        tensor([-0.8953])
    """
    num_malicious = int(malicious.sum())
    distances = pairwise_squared_distances(updates)
    direction = -updates[_scores(distances, num_malicious).argmin()].sign()
    if num_malicious in (0, len(updates)):
        return direction * threshold
    benign = ~malicious
    picked, lambdas = _tried(
        distances[benign][:, benign],
        squared_norms(updates)[benign],
        inner_products(updates, direction)[benign],
        direction,
        num_malicious,
        threshold,
    )
    return direction * _first(picked, lambdas).to(direction)


def krum_attack_partial(own: Tensor, threshold: float = 1e-5) -> Tensor:
    r"""Compute what all malicious clients send so that Krum picks it, partial knowledge.

    The attackers know their own honest updates $g_1, \dots, g_f$. The direction is the sign of
    their mean, and they stand in for the benign clients: $\lambda$ is the largest for which Krum
    picks $\tilde g$ out of them and one copy of it; if there is none, out of them and two copies,
    and so on up to $f$.

    Args:
        own: Honest updates of the malicious clients, shape $(f, d)$.
        threshold: Smallest $\lambda$ to try.

    Returns:
        Shape $(d,)$.

    References:
        - Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated Learning,
          USENIX Security 2020.

    Examples:
        >>> krum_attack_partial(torch.tensor([[1.0], [2.0], [3.0]]))
        tensor([-4.])
    """
    direction = -own.mean(dim=0).sign()
    known = (
        pairwise_squared_distances(own),
        squared_norms(own),
        inner_products(own, direction),
        direction,
    )
    tried = [_tried(*known, copies, threshold) for copies in range(1, len(own) + 1)]
    picked, lambdas = (torch.cat(parts) for parts in zip(*tried, strict=True))
    return direction * _first(picked, lambdas).to(direction)


def _scores(distances: Tensor, num_byzantine: int) -> Tensor:
    """Return Krum's scores, with one neighbour where the attackers are too many for the rule."""
    return krum_scores(distances, min(num_byzantine, len(distances) - 3))


def _tried(
    distances: Tensor,
    norms: Tensor,
    inner: Tensor,
    direction: Tensor,
    copies: int,
    threshold: float,
) -> tuple[Tensor, Tensor]:
    """Say for each lambda whether Krum picks one of the copies, and give the lambdas.

    Krum sees rows and copies of `lambda * direction`, which count as its Byzantine clients. Of the
    rows only squared distances (r, r) and norms (r,) are needed and their inner products (r,) with
    the direction: the distance of a row from a copy is quadratic in lambda.
    """
    num_rows, d = len(distances), len(direction)
    neighbours = max(num_rows - 2, 1)
    square = squared_norms(direction[None])[0]
    others = distances.clone().fill_diagonal_(math.inf)
    among = others.sort(dim=1).values[:, :-1].contiguous()
    nearest = among[:, :neighbours].sum(dim=1).amin()
    start = (nearest / (max(num_rows - copies - 1, 1) * d)).sqrt() + (norms.amax() / d).sqrt()
    lambdas = start * 0.5 ** torch.arange(_HALVINGS, dtype=norms.dtype, device=norms.device)
    away = norms - 2 * lambdas[:, None] * inner + lambdas[:, None] ** 2 * square
    away = away.clamp(min=0)
    # The other copies are at distance 0 of a copy.
    crafted = away.sort(dim=1).values[:, : max(neighbours - (copies - 1), 0)].sum(dim=1)
    # Of a row's neighbours, those that are copies take the places of the rows behind them.
    closer = torch.searchsorted(among, away.mT.contiguous())
    taken = (neighbours - closer).clamp(0, copies)
    # Sums of the first rows of each, by a product: `cumsum` is not deterministic on a GPU.
    sums = among @ among.new_ones(num_rows - 1, num_rows).triu(diagonal=1)
    best = (sums.gather(1, neighbours - taken) + taken * away.mT).amin(dim=0)
    allowed = lambdas >= threshold
    allowed[0] = True
    return allowed & (crafted < best), lambdas.where(allowed, math.inf)


def _first(picked: Tensor, lambdas: Tensor) -> Tensor:
    """Return the first lambda with which a copy was picked, else the smallest."""
    index = picked.to(torch.int8).argmax()
    return torch.where(picked.any(), lambdas[index], lambdas.amin())
