"""Estimators: how FedRecover gets from a recorded update to the one of today."""

from fedrec.recoverers.estimators.anchored import AnchoredLBFGS
from fedrec.recoverers.estimators.base import AggregatedEstimates, Estimates, Estimator
from fedrec.recoverers.estimators.historical_update import HistoricalUpdate
from fedrec.recoverers.estimators.lbfgs import PairedLBFGS, PaperLBFGS
from fedrec.recoverers.estimators.moving_average import MovingAverage

__all__ = [
    "AggregatedEstimates",
    "AnchoredLBFGS",
    "Estimates",
    "Estimator",
    "HistoricalUpdate",
    "MovingAverage",
    "PairedLBFGS",
    "PaperLBFGS",
]
