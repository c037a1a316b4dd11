"""Recoverers: ways to get a clean model back."""

from fedrec.recoverers.base import Recoverer, ReplayRecoverer
from fedrec.recoverers.fedrecover import FedRecover
from fedrec.recoverers.historical_only import HistoricalOnly
from fedrec.recoverers.train_from_scratch import TrainFromScratch

__all__ = ["FedRecover", "HistoricalOnly", "Recoverer", "ReplayRecoverer", "TrainFromScratch"]
