"""Every partitioner of fedrec keeps the contract."""

from __future__ import annotations

from fedrec.data import DegreeOfNonIID, IIDPartitioner, Partitioner
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
