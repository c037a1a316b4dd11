"""Estimators: how FedRecover gets from a recorded update to the one of today."""

from fedrec.recoverers.estimators.anchored import AnchoredSecant
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates, Estimator
from fedrec.recoverers.estimators.historical_update import HistoricalUpdate
from fedrec.recoverers.estimators.lbfgs import PairedLBFGS, PaperLBFGS

__all__ = [
    "AggregatedEstimates",
    "AnchoredSecant",
    "Estimates",
    "Estimator",
    "HistoricalUpdate",
    "PairedLBFGS",
    "PaperLBFGS",
]
