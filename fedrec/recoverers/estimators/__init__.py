"""Estimators: how FedRecover gets from a recorded update to the one of today."""

from fedrec.recoverers.estimators.base import Estimates, Estimator
from fedrec.recoverers.estimators.historical_update import HistoricalUpdate
from fedrec.recoverers.estimators.lbfgs import PairedLBFGS, PaperLBFGS

__all__ = ["Estimates", "Estimator", "HistoricalUpdate", "PairedLBFGS", "PaperLBFGS"]
