"""What attacks share: which rows an attacker sees, what it draws."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrec.attacks.base import AttackContext
from fedrec.random import torch_generator

__all__ = ["counts", "generators", "reference", "replaced", "uniform_rows"]


def reference(updates: Tensor, malicious: Tensor, full_knowledge: bool) -> Tensor:
    """Return the honest updates that an attacker takes statistics of, shape $(r, d)$.

    With full knowledge those of the benign clients, else the attackers' own. Where there are no
    such rows, all that there are.
    """
    rows = updates[~malicious if full_knowledge else malicious]
    return rows if len(rows) else updates


def replaced(updates: Tensor, malicious: Tensor, rows: Tensor, crafted: Tensor) -> Tensor:
    """Return crafted updates with other malicious rows.

    Args:
        updates: What nothing may be written to, shape $(m, d)$.
        malicious: Shape $(m,)$, bool, $f$ of them true.
        rows: The new rows, shape $(f, d)$.
        crafted: What has the benign rows: the updates themselves, or what an attack made of them,
            which is written to.
    """
    crafted = updates.clone() if crafted is updates else crafted
    crafted[malicious] = rows
    return crafted


def counts(malicious: Tensor, ctx: AttackContext) -> tuple[int, int]:
    """Return how many clients the cohort has, and how many of them are malicious.

    A context that was made by hand may not say; then all clients are rows.
    """
    if ctx.cohort_size:
        return ctx.cohort_size, ctx.cohort_malicious
    return len(malicious), int(malicious.sum())


def generators(malicious: Tensor, ctx: AttackContext) -> list[torch.Generator]:
    """Return one CPU generator per malicious row: a function of (seed, round, client) alone."""
    return [
        torch_generator(ctx.seed, ctx.purpose, ctx.round, ctx.client_ids[i])
        for i in malicious.nonzero().flatten().tolist()
    ]


def uniform_rows(malicious: Tensor, ctx: AttackContext, width: int) -> Tensor:
    """Draw numbers in [0, 1) for each malicious row, the same for a column whichever are shown.

    Args:
        malicious: Shape $(m,)$, bool, $f$ of them true.
        ctx: The round; of its `columns`, if it has any, the draws are returned.
        width: Number of columns, $c$.

    Returns:
        Shape $(f, c)$, on the CPU.
    """
    drawn = generators(malicious, ctx)
    rows = torch.empty(len(drawn), width)
    for row, generator in zip(rows, drawn, strict=True):
        if ctx.columns is None:
            row.uniform_(generator=generator)
        else:
            whole = torch.empty(ctx.global_weights.numel())
            row.copy_(whole.uniform_(generator=generator)[ctx.columns])
    return rows
