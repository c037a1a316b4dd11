"""Shards of clients, their owners, and updates that are spread over them."""

from __future__ import annotations

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from fedrec.aggregators import (
    ARC,
    CAF,
    FLAME,
    RLR,
    AggregationContext,
    Bucketing,
    Bulyan,
    CenteredClipping,
    DnC,
    FedAvg,
    FedAvgM,
    FLTrust,
    GeometricMedian,
    Krum,
    Median,
    NearestNeighborMixing,
    NormClipping,
    TrimmedMean,
)
from fedrec.aggregators.shards import aggregate_shards
from fedrec.aggregators.wrapper import needs_of
from fedrec.attacks import AttackContext, TrimAttack
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates, gram_of
from fedrec.exceptions import ConfigurationError
from fedrec.functional import coordinate_median, use_kernel
from fedrec.loop import FederatedLoop
from fedrec.loop.crafting import crafted
from fedrec.parameters import ParameterVector
from fedrec.types import CohortUpdates

CLIENTS = tuple(f"client-{i}" for i in range(10))
# Columns enough to be sent in four blocks.
WIDTH = 1500


@pytest.mark.parametrize(
    ("num_shards", "size"), [(1, 1), (3, 1), (3, 2), (3, 3), (4, 3), (10, 1), (10, 3)]
)
def test_every_client_is_in_one_shard_of_one_rank_whatever_the_number_of_ranks(num_shards, size):
    ranks = [
        Sharding(client_ids=CLIENTS, num_shards=num_shards, rank=rank, size=size)
        for rank in range(size)
    ]
    assert [c for rank in ranks for c in rank.owned(CLIENTS)] == list(CLIENTS)
    shards = [ranks[0].shard_of(c) for c in CLIENTS]
    assert all([rank.shard_of(c) for c in CLIENTS] == shards for rank in ranks)
    assert sorted(set(shards)) == list(range(num_shards))
    sizes = [shards.count(shard) for shard in range(num_shards)]
    assert max(sizes) - min(sizes) <= 1
    assert [v for rank in ranks for v in rank.own] == list(range(num_shards))
    assert ranks[0].counts(CLIENTS) == [len(rank.owned(CLIENTS)) for rank in ranks]


@pytest.mark.parametrize(("num_shards", "size"), [(1, 2), (11, 1), (0, 1)])
def test_shards_are_no_fewer_than_ranks_and_no_more_than_clients(num_shards, size):
    message = f"Expected `num_shards` to be from {size}, the number of ranks, to 10, that of cli"
    with pytest.raises(ConfigurationError, match=message):
        Sharding(client_ids=CLIENTS, num_shards=num_shards, size=size)


def _sent(
    ids: tuple[str, ...], num_shards: int, width: int = 6
) -> tuple[torch.Tensor, ShardedUpdates]:
    """Return the updates of clients in the order of `ids`, and the same in shards."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(ids), width, generator=generator)
    sharding = Sharding(client_ids=CLIENTS, num_shards=num_shards)
    place = {c: i for i, c in enumerate(ids)}
    part = rows[[place[c] for c in sharding.in_order(ids)]]
    sizes = torch.arange(1, len(ids) + 1)
    return rows, ShardedUpdates(
        part=part, sharding=sharding, ranks=Ranks(), client_ids=ids, num_samples=sizes
    )


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_sharded_updates_are_the_rows_of_their_clients_in_any_order(num_shards):
    ids = ("client-7", "client-1", "client-9", "client-0", "client-4")
    rows, sent = _sent(ids, num_shards)
    assert torch.equal(sent.updates, rows)
    chosen = sent.select(["client-4", "client-7"])
    assert isinstance(chosen, ShardedUpdates)
    assert torch.equal(chosen.updates, rows[[4, 0]])
    assert chosen.num_samples.tolist() == [5, 1]
    coefficients = torch.linspace(0.1, 0.5, 5)
    expected = (coefficients.double()[:, None] * rows.double()).sum(dim=0)
    torch.testing.assert_close(sent.weighted_sum(coefficients).double(), expected)


@pytest.mark.parametrize("width", [6, 1300], ids=["rows are sent", "columns are sent"])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_what_is_made_of_columns_is_as_without_shards(num_shards, width):
    ids = ("client-7", "client-1", "client-9", "client-0", "client-4")
    rows, sent = _sent(ids, num_shards, width)
    assert torch.equal(sent.by_columns(coordinate_median), rows.median(dim=0).values)
    around = rows.double() - rows.median(dim=0).values.double()
    for center, expected in ((None, rows.double()), (coordinate_median, around)):
        products = expected @ expected.T
        torch.testing.assert_close(gram_of(sent, center), products, rtol=1e-12, atol=1e-12)
    chosen = ["client-7", "client-0"]
    by_shard, shown = sent.sharding.in_order(ids), []

    def negated(columns, block):
        shown.append((columns, block))
        return -block[[by_shard.index(c) for c in sent.sharding.in_order(chosen)]]

    made = sent.rows_by_columns(negated, chosen)
    assert torch.equal(made.updates, -rows[[0, 3]])
    assert [c for columns, _ in shown for c in range(width)[columns]] == list(range(width))
    assert all(torch.equal(block, rows[sent.places, columns]) for columns, block in shown)


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_clients_are_joined_and_asked_about_where_they_are(num_shards):
    rows, sent = _sent(CLIENTS, num_shards)
    assert [c for part in sent.shards().values() for c in part.client_ids] == list(CLIENTS)
    some, others = sent.select(CLIENTS[4:2:-1]), sent.select(CLIENTS[5:9])
    ids = ("client-8", "client-4", "client-5", "client-3")
    joined = some.joined(others, client_ids=ids)
    assert (joined.client_ids, joined.num_samples.tolist()) == (ids, [9, 5, 6, 4])
    assert torch.equal(joined.updates, rows[[8, 4, 5, 3]])
    twice = joined.with_rows([2 * part.updates for part in joined.shards().values()])
    assert torch.equal(twice.updates, 2 * rows[[8, 4, 5, 3]])
    firsts = joined.gathered([part.updates[:, 0] for part in joined.shards().values()])
    assert torch.equal(firsts, rows[[8, 4, 5, 3], 0])
    plain = CohortUpdates(client_ids=CLIENTS, updates=rows, num_samples=sent.num_samples)
    again = ShardedUpdates.of(plain, sent.sharding, sent.ranks)
    assert torch.equal(again.part, sent.part)
    assert torch.equal(plain.select(ids).updates, joined.updates)


def test_what_is_replaced_in_sharded_updates_is_plain():
    rows, sent = _sent(CLIENTS, 3)
    plain = dataclasses.replace(sent, refused={"x": "silent"})
    assert type(plain) is CohortUpdates
    assert torch.equal(plain.updates, rows)
    refusing = sent.refusing({"client-0": "silent"})
    assert refusing.client_ids == CLIENTS[1:]
    assert torch.equal(refusing.updates, rows[1:])


def test_what_a_rule_needs_goes_for_its_own_aggregate_and_for_the_rule_in_it():
    class Own(Median):
        def aggregate(self, updates, client_weights=None, ctx=None):
            return updates.norm(dim=1).mean() * updates.mean(dim=0)

    class Said(Own):
        needs = "columns"

    class Longest(FedAvgM):
        def aggregate(self, updates, client_weights=None, ctx=None):
            return updates[updates.norm(dim=1).argmax()]

    krum = Krum(num_byzantine=1)
    needs = {
        Median(): "columns",
        Own(): "rows",
        Said(): "columns",
        FedAvg(): "sums",
        FedAvgM(FedAvg()): "sums",
        FedAvgM(FedAvgM(krum)): "gram",
        FedAvgM(Own()): "rows",
        Longest(FedAvg()): "rows",
        RLR(FedAvg(), threshold=2): "columns",
        RLR(Median(), threshold=2): "columns",
        RLR(krum, threshold=2): "rows",
        RLR(FedAvgM(FedAvg()), threshold=2): "rows",  # it has a memory of all columns
        Bucketing(Median()): "rows",
        ARC(krum, num_byzantine=1): "parts",
        ARC(Own(), num_byzantine=1): "rows",
        NearestNeighborMixing(ARC(Median(), num_byzantine=1), num_byzantine=1): "parts",
        RLR(NormClipping(), threshold=2): "rows",
    }
    assert [needs_of(rule) for rule in needs] == list(needs.values())


class Together(Ranks):
    """Ranks that are threads of this process: what each says, all of them get."""

    def __init__(self, rank: int, size: int, said: list[object], barrier: Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._said, self._barrier = rank, size, said, barrier
        self.num_exchanges = 0

    def gather(self, value):
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found

    def rows(self, part, counts):
        found = self.gather(part)
        assert [len(rows) for rows in found] == list(counts)
        return torch.cat(found)

    def _exchange(self, leaving, arriving):
        self.num_exchanges += 1
        for r, sent in enumerate(self.gather(leaving)):
            for into, part in zip(arriving.get(r, ()), sent.get(self.rank, ()), strict=True):
                assert part.shape == into.shape
                assert part.is_contiguous()
                assert into.is_contiguous()
                into.copy_(part)


def _in_ranks(size, rows, num_shards, function):
    """Return what a function makes of the updates in each of so many ranks."""
    said, barrier = [None] * size, Barrier(size)

    def run(rank):
        sharding = Sharding(client_ids=CLIENTS, num_shards=num_shards, rank=rank, size=size)
        own = [CLIENTS.index(c) for c in sharding.owned(CLIENTS)]
        sent = ShardedUpdates(
            part=rows[own],
            sharding=sharding,
            ranks=Together(rank, size, said, barrier),
            client_ids=CLIENTS,
            num_samples=torch.arange(1, 11),
        )
        try:
            return function(sent)
        except BaseException:
            barrier.abort()
            raise

    # Threads, unlike processes, share the kernel in use, and may leave another than they found.
    with use_kernel("numpy"), ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def _no_rank_has_all(monkeypatch):
    """Let no rank gather rows, but for a few columns."""

    def gathered(sent):
        assert sent.part.shape[1] < WIDTH, "a rank has all rows"
        return gather(sent)

    # Without the lock that `cached_property` has, for which other threads would wait.
    gather = ShardedUpdates.updates.func
    monkeypatch.setattr(ShardedUpdates, "updates", property(gathered))


def _context(kind, **more):
    given = {
        "round": 3,
        "phase": "record",
        "client_ids": CLIENTS,
        "global_weights": torch.zeros(WIDTH),
        "layout": ParameterVector(nn.Linear(WIDTH, 1, bias=False)),
    }
    return kind(**{**given, **more})


RULES = [
    FedAvg(),
    Median(),
    TrimmedMean(trim=0.2),
    Krum(num_byzantine=2),
    GeometricMedian(),
    CAF(num_byzantine=2),
    RLR(FedAvg(), threshold=4),
    NormClipping(),
    NormClipping(max_norm=20.0, weighted=False),
    CenteredClipping(tau=10.0, iterations=3),
    Bulyan(num_byzantine=1),
    DnC(num_byzantine=2),
    DnC(num_byzantine=1, num_coordinates=100, iterations=3),
    DnC(num_byzantine=1, num_coordinates=1200),
    FLAME(),
    FLTrust(),
    ARC(TrimmedMean(trim=0.2), num_byzantine=2),
    ARC(FedAvgM(GeometricMedian()), num_byzantine=2),
    NearestNeighborMixing(Median(), num_byzantine=2),
    NearestNeighborMixing(ARC(Bulyan(num_byzantine=1), num_byzantine=2), num_byzantine=2),
]


@pytest.mark.usefixtures("_no_rank_has_all")
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_come_to_the_same_in_any_number_of_ranks_and_none_has_all_rows(rule):
    generator = torch.Generator().manual_seed(0)
    rows = 0.2 + torch.randn(10, WIDTH, generator=generator)
    rows[7] *= 3
    weights = torch.arange(1, 11) / 55
    ctx = _context(AggregationContext, server_update=torch.ones(WIDTH))

    def twice(sent):
        own = copy.deepcopy(rule)
        return [aggregate_shards(own, sent, weights, ctx) for _ in range(2)]

    one = _in_ranks(1, rows, 4, twice)[0]
    for size in (2, 3, 4):
        for found in _in_ranks(size, rows, 4, twice):
            assert all(map(torch.equal, found, one))
    alone = copy.deepcopy(rule)
    expected = [alone(rows, weights, ctx) for _ in range(2)]
    torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_no_rank_has_all")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("rule", [Median(), GeometricMedian()], ids=repr)
def test_columns_that_an_attack_was_shown_are_not_sent_again(rule, keep):
    rows = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(0))
    malicious, weights = CLIENTS[1:9:4], torch.ones(10) / 10

    def context(client_ids, columns):
        return _context(AttackContext, client_ids=client_ids, columns=columns)

    def step(sent):
        found = crafted(TrimAttack(), sent, malicious, context, keep=keep)
        ctx = _context(AggregationContext)
        result = aggregate_shards(rule, found, weights, ctx)
        again = aggregate_shards(rule, found, weights, ctx)
        assert torch.equal(result, again)  # they are sent where they are asked for again
        return found.part, result, sent.ranks.num_exchanges

    one = _in_ranks(1, rows, 4, step)[0]
    for size in (2, 3):
        ranks = _in_ranks(size, rows, 4, step)
        assert torch.equal(torch.cat([part for part, _, _ in ranks]), one[0])
        assert all(torch.equal(result, one[1]) for _, result, _ in ranks)
        # Of the attack: columns, and crafted rows on their way back.
        assert [count for _, _, count in ranks] == [3 if keep else 4] * size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "Expected `devices` to be an integer of at least 1"),
        ({"devices": "auto"}, "Expected `devices` to be an integer"),
        ({"num_nodes": 0}, "Expected `num_nodes` to be an integer of at least 1"),
        (
            {"strategy": "fsdp"},
            "Expected `strategy` to be a known choice, but got 'fsdp'. Known: auto, ddp.",
        ),
        ({"devices": 4, "num_shards": 2}, "Expected `num_shards` to be at least the 4 devices"),
        ({"timeout": 0}, "Expected `timeout` to be"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_of_the_loop_are_checked_before_a_process_is_started(arguments, message):
    with pytest.raises(ConfigurationError) as error:
        FederatedLoop(**arguments)
    assert message in str(error.value)


def test_devices_are_those_that_torchrun_has_started(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = r"Expected `devices` to be such that devices \* num_nodes is 2, but got 3"
    with pytest.raises(ConfigurationError, match=said):
        FederatedLoop(devices=3)
