"""Every partitioner of fedrec keeps the contract."""

from __future__ import annotations

from fedrec.data import (
    ByUser,
    DegreeOfNonIID,
    Dirichlet,
    IIDPartitioner,
    Partitioner,
    QuantitySkew,
    Shards,
)
from fedrec.testing.partitioners import PartitionerContract


class TestIID(PartitionerContract):
    def make(self) -> Partitioner:
        return IIDPartitioner()


class TestDegreeOfNonIID(PartitionerContract):
    def make(self) -> Partitioner:
        return DegreeOfNonIID(q=0.5)


class TestFullyNonIID(PartitionerContract):
    def make(self) -> Partitioner:
        return DegreeOfNonIID(q=1.0)


class TestNothingAtHome(PartitionerContract):
    def make(self) -> Partitioner:
        return DegreeOfNonIID(q=0.0)


class TestDirichlet(PartitionerContract):
    def make(self) -> Partitioner:
        return Dirichlet(alpha=0.3)


class TestBalancedDirichlet(PartitionerContract):
    def make(self) -> Partitioner:
        return Dirichlet(alpha=0.1, balanced=True)


class TestShards(PartitionerContract):
    def make(self) -> Partitioner:
        return Shards(shards_per_client=3)


class TestQuantitySkew(PartitionerContract):
    def make(self) -> Partitioner:
        return QuantitySkew(alpha=0.8)


class TestPowerLaw(PartitionerContract):
    def make(self) -> Partitioner:
        return QuantitySkew(law="power", alpha=1.5)


class TestByUser(PartitionerContract):
    def make(self) -> Partitioner:
        return ByUser(users=[i % 17 for i in range(self.num_samples)])
