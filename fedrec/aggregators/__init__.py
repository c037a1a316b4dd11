"""Aggregation rules: how the server turns client updates into one."""

from fedrec.aggregators.base import Aggregator
from fedrec.aggregators.fedavg import FedAvg
from fedrec.aggregators.median import Median
from fedrec.aggregators.trimmed_mean import TrimmedMean

__all__ = ["Aggregator", "FedAvg", "Median", "TrimmedMean"]
