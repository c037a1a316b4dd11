"""Every partitioner of fedrec keeps the contract."""

from __future__ import annotations

import sys

from fedrec.component import subclasses
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


def test_no_partitioner_is_missed() -> None:
    cases = [case for case in PartitionerContract.__subclasses__() if case.__module__ == __name__]
    ours = {
        cls
        for path, cls in subclasses(Partitioner).items()
        if path.startswith("fedrec.")
        # A class out of a doctest bears its module's name, but is not in it.
        and getattr(sys.modules[cls.__module__], cls.__name__, None) is cls
    }
    assert {type(case().make()) for case in cases} == ours
