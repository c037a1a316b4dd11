"""The contract of aggregation rules, as tests."""

from __future__ import annotations

from abc import abstractmethod

import pytest
import torch
from torch import Tensor, nn

from fedrec.aggregators.base import AggregationContext, Aggregator
from fedrec.aggregators.wrapper import ServerStep, needs_of
from fedrec.distributed.ranks import Ranks
from fedrec.distributed.sharding import Sharding
from fedrec.distributed.updates import ShardedUpdates
from fedrec.exceptions import AggregationError
from fedrec.functional.distances import gram_matrix
from fedrec.loop.checkpoint import check_state
from fedrec.parameters import ParameterVector
from fedrec.testing.component import ComponentContract
from fedrec.types import RoundContext

__all__ = ["AggregatorContract"]

_D = 7
# With so many columns, they are given to processes in blocks.
_WIDE = 1000


class AggregatorContract(ComponentContract):
    """Tests for an aggregation rule; subclass it in a test module and write `make`.

    Examples:
        >>> from fedrec.aggregators import TrimmedMean
        >>> class TestMyRule(AggregatorContract):
        ...     def make(self):
        ...         return TrimmedMean(trim=0.2)
    """

    base = Aggregator

    #: Clients of a round, at least as many as the rule needs.
    num_clients: int = 10

    #: Whether the rule returns an update that all clients send alike (norm clipping does not).
    unanimous: bool = True

    #: Whether the order of the clients makes no difference (with buckets, it does).
    permutation_invariant: bool = True

    @abstractmethod
    def make(self) -> Aggregator:
        """Return a new rule, the same each time."""

    def make_updates(self, num_clients: int, d: int = _D, seed: int = 0) -> Tensor:
        """Return updates of honest clients, shape (m, d): a common direction and some noise."""
        generator = torch.Generator().manual_seed(seed)
        return 1.0 + 0.3 * torch.randn(num_clients, d, generator=generator)

    def make_context(self, num_clients: int, d: int = _D) -> RoundContext:
        """Return the round's context, new each time."""
        return RoundContext(
            round=3,
            phase="record",
            client_ids=tuple(f"client-{i}" for i in range(num_clients)),
            global_weights=torch.zeros(d),
            layout=ParameterVector(nn.Linear(d, 1, bias=False)),
        )

    def run(self, updates: Tensor, client_weights: Tensor | None = None) -> Tensor:
        """Aggregate with a new rule."""
        return self.make()(updates, client_weights, self.make_context(*updates.shape))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_returns_one_vector(self, dtype: torch.dtype) -> None:
        """The result has one entry a coordinate, in the dtype and on the device of the input."""
        updates = self.make_updates(self.num_clients).to(dtype)
        result = self.run(updates)
        assert result.shape == (_D,)
        assert result.dtype == dtype
        assert result.device == updates.device
        assert result.is_contiguous()
        assert torch.isfinite(result).all()

    def test_does_not_change_its_input(self) -> None:
        """The updates are stored after they are aggregated."""
        updates = self.make_updates(self.num_clients)
        weights = torch.arange(1, self.num_clients + 1)
        before = updates.clone(), weights.clone()
        result = self.run(updates, weights)
        result.add_(1.0)
        assert torch.equal(updates, before[0])
        assert torch.equal(weights, before[1])

    def test_order_of_clients_does_not_matter(self) -> None:
        """Clients answer in any order."""
        if not self.permutation_invariant:
            pytest.skip("`permutation_invariant` is False")
        updates = self.make_updates(self.num_clients)
        weights = torch.arange(1, self.num_clients + 1)
        order = torch.randperm(self.num_clients, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(
            self.run(updates[order], weights[order]),
            self.run(updates, weights),
            rtol=1e-5,
            atol=1e-6,
        )

    def test_keeps_what_all_agree_on(self) -> None:
        """If all clients send the same, that is the result."""
        if not self.unanimous:
            pytest.skip("`unanimous` is False")
        update = self.make_updates(1)
        torch.testing.assert_close(
            self.run(update.repeat(self.num_clients, 1)), update[0], rtol=1e-5, atol=1e-6
        )

    def test_one_client(self) -> None:
        """A single client is either enough, or refused by `check_cohort` and by the call."""
        update = self.make_updates(1)
        try:
            self.make().check_cohort(1)
        except AggregationError:
            with pytest.raises(AggregationError):
                self.run(update)
        else:
            result = self.run(update)
            assert result.shape == (_D,)
            if self.unanimous:
                torch.testing.assert_close(result, update[0], rtol=1e-5, atol=1e-6)

    def test_one_coordinate(self) -> None:
        """A model of one parameter is a model."""
        assert self.run(self.make_updates(self.num_clients, d=1)).shape == (1,)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_refuses_what_is_not_finite(self, value: float) -> None:
        """The client that sent it is named."""
        updates = self.make_updates(self.num_clients)
        bad = self.num_clients - 1
        updates[bad, _D // 2] = value
        with pytest.raises(AggregationError, match=f"client-{bad}"):
            self.run(updates)

    def test_no_weights_are_equal_weights(self) -> None:
        """Weights of any scale are fine; equal ones change nothing."""
        updates = self.make_updates(self.num_clients)
        torch.testing.assert_close(
            self.run(updates, torch.full((self.num_clients,), 3)),
            self.run(updates),
            rtol=1e-5,
            atol=1e-6,
        )

    def test_does_what_it_says_of_every_column(self) -> None:
        """A rule with `trims` is the mean of the values between, one with `coefficients` a sum."""
        updates, rule = self.make_updates(self.num_clients), self.make()
        weights = torch.arange(1.0, self.num_clients + 1)
        trims, coefficients = rule.trims(self.num_clients), rule.coefficients(weights)
        if trims is not None:
            expected = updates.sort(dim=0).values[trims : self.num_clients - trims].mean(dim=0)
        elif coefficients is not None:
            expected = coefficients @ updates
        else:
            pytest.skip("it says nothing of columns")
        torch.testing.assert_close(self.run(updates, weights), expected, rtol=1e-5, atol=1e-6)

    def test_needs_no_more_than_it_says(self) -> None:
        """With `needs`, a part of the updates, or what is made of them, is enough."""
        updates, rule = self.make_updates(self.num_clients), self.make()
        weights = torch.arange(1.0, self.num_clients + 1)
        if isinstance(rule, ServerStep):
            pytest.skip("the wrapped rule says what it needs")
        needs = needs_of(rule)
        if needs == "columns":
            blocks = updates.split([3, _D - 3], dim=1)
            found = torch.cat([rule(block, weights) for block in blocks])
        elif needs == "gram":
            gram = gram_matrix(updates, rule.gram_center(updates))
            found = rule.gram_coefficients(gram, weights).to(updates) @ updates
        elif needs == "parts":
            updates = self.make_updates(self.num_clients, _WIDE)
            sent = _in_shards(updates)
            given = {"purpose": "aggregator", "client_ids": sent.client_ids}
            server = getattr(self.make_context(*updates.shape), "server_update", None)
            ctx = self.make_context(*updates.shape).extended(
                AggregationContext, server_update=server, **given
            )
            found = rule.aggregate_parts(sent, weights, ctx)
            assert "updates" not in vars(sent), "all rows were asked for"
        else:
            pytest.skip(f"`needs` of the rule is {needs}")
        torch.testing.assert_close(found, self.run(updates, weights), rtol=1e-5, atol=1e-6)

    def test_withstands_as_many_as_it_claims(self) -> None:
        """With at most `max_byzantine` malicious rows, the result is within the benign range."""
        for m in (self.num_clients, self.num_clients + 1):
            claimed = self.make().max_byzantine(m)
            if claimed is None:
                pytest.skip("`max_byzantine` of the rule returns None")
            for f in range(claimed + 1):
                honest = self.make_updates(m, seed=m + f)
                benign = honest[f:]
                for entry in (1e6, -1e6, 1.0 + 1e-3, -benign.max().item()):
                    updates = honest.clone()
                    updates[:f] = entry
                    result = self.run(updates)
                    assert (result >= benign.amin(dim=0) - 1e-5).all(), (m, f, entry)
                    assert (result <= benign.amax(dim=0) + 1e-5).all(), (m, f, entry)

    def test_state_carries_its_memory(self) -> None:
        """A rule that takes over another's state goes on as that one would."""
        first, second = (self.make_updates(self.num_clients, seed=seed) for seed in (0, 1))
        rule, successor = self.make(), self.make()
        rule(first, None, self.make_context(*first.shape))
        check_state({"aggregator": rule.state_dict()})
        successor.load_state_dict(rule.state_dict())
        assert torch.equal(
            successor(second, None, self.make_context(*second.shape)),
            rule(second, None, self.make_context(*second.shape)),
        )


def _in_shards(updates: Tensor) -> ShardedUpdates:
    """Return updates of clients in three shards."""
    ids = tuple(f"client-{i}" for i in range(len(updates)))
    return ShardedUpdates(
        part=updates,
        sharding=Sharding(client_ids=ids, num_shards=3),
        ranks=Ranks(),
        client_ids=ids,
        num_samples=torch.ones(len(ids), dtype=torch.int64),
    )
