"""Recoverers: ways to get a clean model back."""

from fedrec.recoverers.base import Recoverer, ReplayRecoverer
from fedrec.recoverers.context import RecoveryContext
from fedrec.recoverers.crab import Crab
from fedrec.recoverers.estimators import (
    AggregatedEstimates,
    AnchoredLBFGS,
    Estimates,
    Estimator,
    HistoricalUpdate,
    MovingAverage,
    PairedLBFGS,
    PaperLBFGS,
)
from fedrec.recoverers.fed_eraser import FedEraser
from fedrec.recoverers.fedrecover import FedRecover
from fedrec.recoverers.fine_tune import FineTune
from fedrec.recoverers.gradient_ascent import GradientAscent
from fedrec.recoverers.historical_only import HistoricalOnly
from fedrec.recoverers.knowledge_distillation import KnowledgeDistillation
from fedrec.recoverers.rollback_retrain import RollbackRetrain
from fedrec.recoverers.train_from_scratch import TrainFromScratch
from fedrec.recoverers.update_filter import UpdateFilter
from fedrec.recoverers.weight_negation import WeightNegation

__all__ = [
    "AggregatedEstimates",
    "AnchoredLBFGS",
    "Crab",
    "Estimates",
    "Estimator",
    "FedEraser",
    "FedRecover",
    "FineTune",
    "GradientAscent",
    "HistoricalOnly",
    "HistoricalUpdate",
    "KnowledgeDistillation",
    "MovingAverage",
    "PairedLBFGS",
    "PaperLBFGS",
    "Recoverer",
    "RecoveryContext",
    "ReplayRecoverer",
    "RollbackRetrain",
    "TrainFromScratch",
    "UpdateFilter",
    "WeightNegation",
]
