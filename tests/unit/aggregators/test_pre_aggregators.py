"""What is done to updates before a rule gets them: mixing, clipping, buckets."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedrec.aggregators import (
    ARC,
    Aggregator,
    Bucketing,
    CenteredClipping,
    FedAdam,
    FedAvg,
    FoolsGold,
    Median,
    NearestNeighborMixing,
    TrimmedMean,
)
from fedrec.component import build
from fedrec.exceptions import AggregationError, ConfigurationError
from fedrec.recipe.classes import ClassFinder
from fedrec.recipe.instantiate import Instantiator


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numel = max([self.numel, *(t.numel() for t in tensors)])
        return result


class Shown(Aggregator):
    """Returns the mean of what it is given, and keeps it."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []
        self.client_weights: list[object] = []

    def aggregate(self, updates, client_weights=None, ctx=None):
        self.rows.append(updates)
        self.client_weights.append(client_weights)
        return updates.mean(dim=0)


@pytest.mark.parametrize("cls", [ARC, NearestNeighborMixing])
def test_bounds_that_do_not_hold_are_errors(cls: type) -> None:
    with pytest.raises(ConfigurationError, match="Expected `num_byzantine`"):
        cls(Median(), num_byzantine=0.5)
    with pytest.raises(AggregationError, match=f"{cls.__name__} needs m >= 2f"):
        cls(Median(), num_byzantine=3)(torch.ones(6, 1))
    with pytest.raises(AggregationError, match="Cannot trim"):
        cls(TrimmedMean(trim=3), num_byzantine=0.1)(torch.ones(6, 1))
    assert cls(FedAvg(), num_byzantine=0.2)(torch.ones(11, 1)).item() == pytest.approx(1.0)


def test_buckets_are_counted_for_the_rule() -> None:
    rule = Bucketing(TrimmedMean(trim=2), bucket_size=2)
    rule.check_cohort(9)
    with pytest.raises(AggregationError, match="Cannot trim 2\\*2=4 of m=4 updates"):
        rule(torch.ones(8, 1))
    assert rule.max_byzantine(9) == 2
    with pytest.raises(ConfigurationError, match="Expected `bucket_size`"):
        Bucketing(Median(), bucket_size=0)


def test_a_rule_that_knows_clients_by_their_ids_gets_no_buckets() -> None:
    for rule in (FoolsGold(), ARC(FoolsGold(), num_byzantine=1)):
        with pytest.raises(ConfigurationError, match="Expected `rule` to be a rule that works"):
            Bucketing(rule)


def test_clients_count_the_same_in_a_mix_and_keep_their_weights_when_clipped() -> None:
    x, weights = torch.ones(4, 2), torch.arange(1.0, 5.0)
    for rule in (
        NearestNeighborMixing(Shown(), num_byzantine=1),
        Bucketing(Shown(), bucket_size=2),
        ARC(Shown(), num_byzantine=1),
    ):
        rule(x, weights)
        passed_on = rule.rule.client_weights[0]
        assert passed_on is (weights if isinstance(rule, ARC) else None)


def test_mixing_makes_no_tensor_larger_than_the_updates() -> None:
    # Gathering the neighbours of each client takes m - f times the memory.
    x = torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        NearestNeighborMixing(FedAvg(), num_byzantine=5)(x)
    assert largest.numel == x.numel()


def test_an_update_is_among_its_own_neighbours() -> None:
    rule = NearestNeighborMixing(Shown(), num_byzantine=2)
    x = torch.tensor([[0.0], [1.0], [10.0], [12.0], [100.0]])
    rule(x)
    expected = [11 / 3, 11 / 3, 23 / 3, 23 / 3, 122 / 3]
    assert rule.rule.rows[0].flatten().tolist() == pytest.approx(expected)


def test_arc_by_hand() -> None:
    # 2 * 2 * (5 - 2) // 5 = 2 of 5 are clipped, to the third largest norm.
    rule = ARC(Shown(), num_byzantine=2)
    rule(torch.tensor([[8.0], [-9.0], [1.0], [3.0], [0.0]]))
    assert rule.rule.rows[0].flatten().tolist() == [3.0, -3.0, 1.0, 3.0, 0.0]


def test_buckets_hold_every_client_once_and_change_with_the_round() -> None:
    from fedrec.aggregators import AggregationContext
    from fedrec.parameters import ParameterVector

    def rows(t: int, seed: int = 0) -> list[float]:
        rule = Bucketing(Shown(), bucket_size=2)
        ctx = AggregationContext(
            round=t,
            phase="record",
            client_ids=tuple("abcde"),
            global_weights=torch.zeros(1),
            layout=ParameterVector(torch.nn.Linear(1, 1, bias=False)),
            seed=seed,
        )
        rule(torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]]), None, ctx)
        return rule.rule.rows[0].flatten().tolist()

    first, *last = rows(0)[:2], rows(0)[2]
    assert 2 * sum(first) + last[0] == 31.0  # two of two, and one that is divided by one
    assert rows(0) == rows(0)
    assert len({tuple(rows(t)) for t in range(5)}) > 1
    assert rows(0, seed=1) != rows(0) or rows(1, seed=1) != rows(1)


def test_wrapped_memory_is_carried_along() -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for wrap in (
        lambda r: ARC(r, num_byzantine=1),
        lambda r: NearestNeighborMixing(r, num_byzantine=1),
        Bucketing,
    ):
        rule, other = wrap(CenteredClipping(tau=0.5)), wrap(CenteredClipping(tau=0.5))
        assert rule.has_memory
        assert not wrap(Median()).has_memory
        rule(x)
        other.load_state_dict(rule.state_dict())
        assert torch.equal(other(x), rule(x))


def test_recipes_and_manifests_nest_rules() -> None:
    trimmed = {"class_path": "TrimmedMean", "init_args": {"trim": 0.2}}
    mixing = {"rule": trimmed, "num_byzantine": 0.2}
    node = {
        "class_path": "FedAdam",
        "init_args": {"rule": {"class_path": "NearestNeighborMixing", "init_args": mixing}},
    }
    instantiator = Instantiator(ClassFinder())
    rule = instantiator.component(node, "aggregator", [Aggregator])
    assert instantiator.errors == []
    expected = FedAdam(NearestNeighborMixing(TrimmedMean(trim=0.2), num_byzantine=0.2))
    assert repr(rule) == repr(expected)
    assert repr(build(rule.spec(), Aggregator, "aggregator")) == repr(expected)
