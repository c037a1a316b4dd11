"""Every aggregation rule of fedrec keeps the contract."""

from __future__ import annotations

from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.testing import AggregatorContract


class TestFedAvg(AggregatorContract):
    def make(self) -> Aggregator:
        return FedAvg()


class TestPlainMean(AggregatorContract):
    def make(self) -> Aggregator:
        return FedAvg(weighted=False)


class TestMedian(AggregatorContract):
    def make(self) -> Aggregator:
        return Median()


class TestTrimmedMeanCount(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=3)


class TestTrimmedMeanFraction(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=0.49)


class TestTrimmedMeanOfNothing(AggregatorContract):
    def make(self) -> Aggregator:
        return TrimmedMean(trim=0)
