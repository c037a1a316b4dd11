"""Trials with one client before round 0: which buffers training changes, whether data repeat."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedrec.clients.batches import is_plain
from fedrec.clients.generators import random_numbers
from fedrec.clients.lightning import LightningClient
from fedrec.clients.state import state_of
from fedrec.exceptions import ConfigurationError
from fedrec.loop.round import Engine
from fedrec.parameters import ParameterVector, averageable_buffers

__all__ = ["buffers_that_change", "check_repeatable"]


def buffers_that_change(engine: Engine, global_weights: Tensor) -> list[str]:
    """Return the buffers that one client's local training changes in the first two rounds.

    Two rounds, since a buffer that is computed from the weights changes only after they have. The
    module is left as it was. Running statistics are returned without a trial.

    Args:
        engine: Computes the rounds.
        global_weights: The initial weights, shape $(d,)$.
    """
    federation = engine.federation
    module, layout = federation.module, ParameterVector(federation.module)
    statistics, names = set(layout.buffer_names), averageable_buffers(module)
    client = next((c for c in federation.clients if isinstance(c, LightningClient)), None)
    if client is None or statistics.issuperset(names):
        return list(layout.buffer_names)
    layout.select_buffers(module, names)
    before = layout.buffers(module)
    changed, weights = statistics, global_weights
    with _on_trial(client):
        for t in (0, 1):
            ctx = engine.context(t, federation.client_ids, weights)
            ctx = dataclasses.replace(ctx, layout=layout, buffers=before)
            sent = client.local_update(weights, ctx)
            if sent.buffers is not None:
                changed = changed.union(layout.changed_buffers(before, sent.buffers))
            weights = engine.apply(weights, sent.update)
    return [name for name in names if name in changed]


def check_repeatable(engine: Engine, global_weights: Tensor) -> None:
    """Refuse data if one client's first batch differs when it is read again with the same seeds.

    Args:
        engine: Computes the rounds.
        global_weights: The initial weights, shape $(d,)$.

    Raises:
        ConfigurationError: If the batch differs each time it is read.
    """
    clients = [c for c in engine.federation.clients if isinstance(c, LightningClient)]
    client = next((c for c in clients if not is_plain(c.dataset, c.collate_fn)), None)
    if client is None:
        return
    ctx = engine.context(0, engine.federation.client_ids, global_weights)
    indices, batches = client.batches(ctx)[0], list[Any]()
    for _ in range(3):  # the first reading may differ: it may make generators that are kept
        with random_numbers(ctx, client.client_id, client.generators()):
            batches.append(client.read(indices, torch.device("cpu")))
        if len(batches) > 1 and _are_equal(*batches[-2:]):
            return
    raise ConfigurationError(
        f"Client {client.client_id!r} gives another batch each time the same samples are read, "
        "with the same seeds, so that no recovery can replay its training. HINT: draw from "
        "torch, NumPy's global generator, Python's `random`, or generators that the data set "
        "or its transforms hold, and keep no count of samples read."
    )


@contextmanager
def _on_trial(client: LightningClient) -> Iterator[None]:
    """Restore a client's module on exit, and name the client in an error."""
    state = state_of(client.module)
    try:
        yield
    except Exception as error:
        error.add_note(f"while client {client.client_id!r} trained, before round 0")
        raise
    finally:
        state.restore()


def _are_equal(first: Any, second: Any) -> bool:
    """Whether the tensors of two batches have the same values."""
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    return all(
        a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        for a, b in pairs
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.layout == torch.strided
    )
