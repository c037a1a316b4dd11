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
    return [_generator(ctx, ctx.client_ids[i]) for i in malicious.nonzero().flatten().tolist()]


def uniform_rows(malicious: Tensor, ctx: AttackContext, width: int) -> Tensor:
    """Draw numbers in [0, 1) for each malicious row, the same for a column whichever are shown.

    Blocks of columns that follow each other go on with the generators of the block before.

    Args:
        malicious: Shape $(m,)$, bool, $f$ of them true.
        ctx: The round; of its `columns`, if it has any, the draws are returned.
        width: Number of columns, $c$.

    Returns:
        Shape $(f, c)$, on the CPU.
    """
    ids = [ctx.client_ids[i] for i in malicious.nonzero().flatten().tolist()]
    start = 0 if ctx.columns is None else ctx.columns.start
    rows = torch.empty(len(ids), width)
    for row, client_id in zip(rows, ids, strict=True):
        generator, drawn = ctx.streams.get(client_id, (None, 0))
        if generator is None or drawn > start:
            generator, drawn = _generator(ctx, client_id), 0
        if drawn < start:  # of columns that another process has
            torch.empty(start - drawn).uniform_(generator=generator)
        row.uniform_(generator=generator)
        ctx.streams[client_id] = (generator, start + width)
    return rows


def _generator(ctx: AttackContext, client_id: str) -> torch.Generator:
    return torch_generator(ctx.seed, ctx.purpose, ctx.round, client_id)
