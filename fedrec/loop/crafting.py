"""What malicious clients send, made where their updates are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fedrec._guard import left_alone, returned
from fedrec.attacks.base import Attack, AttackContext
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import UpdateError
from fedrec.types import CohortUpdates, rows_of

__all__ = ["crafted"]

MakeContext = Callable[[Sequence[str], "slice | None"], AttackContext]


def crafted(
    attack: Attack,
    sent: CohortUpdates,
    malicious: Collection[str],
    make_context: MakeContext,
    *,
    keep: bool = False,
) -> CohortUpdates:
    """Return what clients send under an attack, given what they computed.

    Of updates in shards, no process is given more than the attack looks at:

    - nothing of other shards, if each malicious client is on its own;
    - columns of all updates that the attack looks at, if it works column by column;
    - else all these updates: those of malicious clients, or with full knowledge of everybody. So
      it is with a memory, too, which has to be the same in every process.

    Args:
        attack: The attack.
        sent: What they computed, malicious clients among them.
        malicious: All malicious clients.
        make_context: Makes the attack's context, of the clients whose updates it is shown, and the
            columns if not all; new for each call, so that random draws begin anew.
        keep: Whether columns that an attack was shown, of updates of all ranks, are kept for a rule
            that looks at columns, too.

    Raises:
        UpdateError: If the attack returns another shape or dtype than it was given, or changes what
            it was given.
    """

    def craft(updates: Tensor, client_ids: Sequence[str], columns: slice | None = None) -> Tensor:
        mask = torch.tensor([c in malicious for c in client_ids], device=updates.device)
        method, ctx = f"{type(attack).__name__}.craft", make_context(client_ids, columns)
        weights = ctx.global_weights
        with left_alone(method, UpdateError, updates=updates, global_weights=weights):
            found = attack.craft(updates, mask, ctx)
        return returned(method, found, updates.shape, updates.dtype, UpdateError)

    def craft_whole(sent: CohortUpdates) -> Tensor:
        """Craft; rows of benign clients stay as they were computed, whatever the attack says."""
        found, updates = craft(sent.updates, sent.client_ids), sent.updates
        own = [i for i, c in enumerate(sent.client_ids) if c in malicious]
        benign = set(range(len(updates))).difference(own)
        # To compare them takes a fraction of a copy of all, but would wait for a GPU.
        on_host = updates.device == torch.device("cpu")
        if on_host and all(torch.equal(found[i], updates[i]) for i in benign):
            return found
        rows = torch.tensor(own, device=updates.device)
        return updates.index_copy(0, rows, found[rows])

    if not isinstance(sent, ShardedUpdates):
        return dataclasses.replace(sent, updates=craft_whole(sent))
    kept: list[Tensor] = []
    own = sent.select([c for c in sent.client_ids if c in malicious])
    shown = sent if attack.full_knowledge else own
    if not (attack.full_knowledge or attack.colludes or attack.has_memory):
        parts = own.shards().values()
        own = own.with_rows([craft(part.updates, part.client_ids) for part in parts])
    elif attack.crafts_by_columns:
        ids = sent.sharding.in_order(shown.client_ids)
        rows = [i for i, c in enumerate(ids) if c in malicious]
        keep = keep and shown is sent and sent.ranks.size > 1

        def craft_block(columns: slice, block: Tensor) -> Tensor:
            crafted = craft(block, ids, columns)[rows]
            if keep:
                block[rows] = crafted
                kept.append(block)
            return crafted

        own = shown.rows_by_columns(craft_block, own.client_ids)
    else:
        whole = dataclasses.replace(shown, updates=craft_whole(shown))
        made = ShardedUpdates.of(whole, sent.sharding, sent.ranks)
        if attack.full_knowledge:
            return made
        own = made
    parts_of = [(sent.own_ids, sent.part), (own.own_ids, own.part)]
    made = sent.with_rows([rows_of(parts_of, sent.own_ids)])
    if kept:
        made.keep(kept)
    return made
