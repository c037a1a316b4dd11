"""Every aggregation rule of fedrec keeps the contract."""

from __future__ import annotations

import importlib
import pkgutil

import fedrec.aggregators
from fedrec.aggregators import Aggregator, FedAvg, Median, TrimmedMean
from fedrec.component import subclasses
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


def test_no_aggregation_rule_is_missed() -> None:
    for module in pkgutil.iter_modules(fedrec.aggregators.__path__, "fedrec.aggregators."):
        importlib.import_module(module.name)
    cases = [case for case in AggregatorContract.__subclasses__() if case.__module__ == __name__]
    ours = {
        cls
        for path, cls in subclasses(Aggregator).items()
        if path.startswith("fedrec.")
        # A class out of a doctest bears its module's name, but is not in it.
        and getattr(importlib.import_module(cls.__module__), cls.__name__, None) is cls
    }
    assert {type(case().make()) for case in cases} == ours
