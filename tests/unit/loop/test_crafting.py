"""What an attack is shown of updates that are spread over shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedrec.attacks import (
    ALIE,
    IPM,
    Attack,
    AttackContext,
    KrumAttack,
    ModelReplacement,
    Neurotoxin,
    PoisonedFL,
    Scheduled,
    SignFlip,
    TrimAttack,
)
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import UpdateError
from fedrec.loop.crafting import crafted
from fedrec.parameters import ParameterVector
from fedrec.types import CohortUpdates

CLIENTS = tuple("abcdefgh")  # two in each of four shards
MALICIOUS = ("b", "c", "d")
WIDTH = 1030


def _sent() -> CohortUpdates:
    updates = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    return CohortUpdates(client_ids=CLIENTS, updates=updates, num_samples=torch.ones(8).long())


def _in_shards(sent: CohortUpdates) -> ShardedUpdates:
    return ShardedUpdates.of(sent, Sharding(client_ids=CLIENTS, num_shards=4), Ranks())


def _context(client_ids, columns):
    return AttackContext(
        round=3,
        phase="record",
        client_ids=tuple(client_ids),
        global_weights=torch.zeros(WIDTH),
        layout=ParameterVector(nn.Linear(WIDTH, 1, bias=False)),
        last_aggregate=torch.linspace(-1, 1, WIDTH),
        num_malicious=3,
        num_malicious_total=3,
        cohort_size=8,
        cohort_malicious=3,
        columns=columns,
    )


class Watched(Attack):
    """Sends zeros; notes what it is shown."""

    by_columns = True

    def __init__(self, full_knowledge=False, colludes=False, by_columns=False, memory=None):
        self.full_knowledge, self.colludes = full_knowledge, colludes
        self.by_columns, self.memory, self.shown = by_columns, memory or {}, []

    def state_dict(self):
        return self.memory

    def craft(self, updates, malicious, ctx):
        self.shown.append((ctx.client_ids, updates.shape[1], malicious.tolist()))
        return torch.where(malicious[:, None], 0.0, updates)


ALONE = [(("b",), WIDTH, [True]), (("c", "d"), WIDTH, [True, True])]
TOGETHER = [(MALICIOUS, WIDTH, [True] * 3)]
ALL = [(CLIENTS, WIDTH, [c in MALICIOUS for c in CLIENTS])]
# 1,030 columns in four blocks.
BLOCKS = [(CLIENTS, width, ALL[0][2]) for width in (257, 258, 257, 258)]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({}, ALONE),
        ({"by_columns": True}, ALONE),
        ({"memory": {"a": 1}}, TOGETHER),
        ({"colludes": True}, TOGETHER),
        ({"full_knowledge": True}, ALL),
        ({"full_knowledge": True, "by_columns": True}, BLOCKS),
        ({"full_knowledge": True, "by_columns": True, "memory": {"a": 1}}, ALL),
        (
            {"colludes": True, "by_columns": True},
            [(MALICIOUS, w, [True] * 3) for _, w, _ in BLOCKS],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_attack_is_shown_what_it_looks_at_and_no_more(arguments, shown):
    attack, sent = Watched(**arguments), _sent()
    found = crafted(attack, _in_shards(sent), MALICIOUS, _context)
    assert attack.shown == shown
    expected = sent.updates.clone()
    expected[1:4] = 0
    assert torch.equal(found.updates, expected)


def test_a_subclass_that_crafts_otherwise_is_shown_whole_updates():
    class Longest(TrimAttack):
        def craft(self, updates, malicious, ctx):
            return torch.where(malicious[:, None], updates.norm(dim=1).max(), updates)

    class Said(Longest):
        by_columns = True

    attacks = [TrimAttack(), Longest(), Said(), Scheduled(TrimAttack()), Scheduled(Longest())]
    assert [attack.crafts_by_columns for attack in attacks] == [True, False, True, True, False]


@pytest.mark.parametrize(
    "attack",
    [
        TrimAttack(),
        TrimAttack(full_knowledge=False),
        ALIE(),
        ALIE(full_knowledge=True),
        IPM(),
        KrumAttack(),
        KrumAttack(full_knowledge=False),
        SignFlip(),
        PoisonedFL(),
        Scheduled(TrimAttack(), start=3),
        ModelReplacement(IPM()),
        Neurotoxin(IPM()),
    ],
    ids=repr,
)
def test_the_same_is_sent_as_without_shards(attack):
    sent = _sent()
    attack.reset(MALICIOUS)
    expected = crafted(attack, sent, MALICIOUS, _context)
    attack.reset(MALICIOUS)
    found = crafted(attack, _in_shards(sent), MALICIOUS, _context)
    torch.testing.assert_close(found.updates, expected.updates)
    assert not torch.equal(found.updates[1:4], sent.updates[1:4])


@pytest.mark.parametrize("kind", [_in_shards, lambda sent: sent], ids=["shards", "one piece"])
def test_another_shape_is_refused(kind):
    class Cut(Attack):
        def craft(self, updates, malicious, ctx):
            return updates[:, 1:]

    with pytest.raises(UpdateError, match=r"Expected Cut.craft to return shape \(\d, 1030\)"):
        crafted(Cut(), kind(_sent()), MALICIOUS, _context)
