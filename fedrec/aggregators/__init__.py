"""Aggregation rules: how the server turns client updates into one."""

from fedrec.aggregators.alignins import AlignIns
from fedrec.aggregators.arc import ARC
from fedrec.aggregators.base import AggregationContext, Aggregator, ColumnRule
from fedrec.aggregators.bucketing import Bucketing
from fedrec.aggregators.bulyan import Bulyan
from fedrec.aggregators.caf import CAF
from fedrec.aggregators.centered_clipping import CenteredClipping
from fedrec.aggregators.deepsight import DeepSight
from fedrec.aggregators.dnc import DnC
from fedrec.aggregators.fedadam import FedAdam
from fedrec.aggregators.fedavg import FedAvg
from fedrec.aggregators.fedavgm import FedAvgM
from fedrec.aggregators.fedyogi import FedYogi
from fedrec.aggregators.flame import FLAME
from fedrec.aggregators.fltrust import FLTrust
from fedrec.aggregators.foolsgold import FoolsGold
from fedrec.aggregators.geometric_median import GeometricMedian
from fedrec.aggregators.krum import Krum
from fedrec.aggregators.lasa import LASA
from fedrec.aggregators.mean_around_median import MeanAroundMedian
from fedrec.aggregators.median import Median
from fedrec.aggregators.multi_krum import MultiKrum
from fedrec.aggregators.multi_metrics import MultiMetrics
from fedrec.aggregators.nearest_neighbor_mixing import NearestNeighborMixing
from fedrec.aggregators.norm_clipping import NormClipping
from fedrec.aggregators.rflbat import RFLBAT
from fedrec.aggregators.rlr import RLR
from fedrec.aggregators.server_optimizer import ServerOptimizer
from fedrec.aggregators.signguard import SignGuard
from fedrec.aggregators.trimmed_mean import TrimmedMean
from fedrec.aggregators.wrapper import RuleWrapper, ServerStep

__all__ = [
    "ARC",
    "CAF",
    "FLAME",
    "LASA",
    "RFLBAT",
    "RLR",
    "AggregationContext",
    "Aggregator",
    "AlignIns",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "ColumnRule",
    "DeepSight",
    "DnC",
    "FLTrust",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "FoolsGold",
    "GeometricMedian",
    "Krum",
    "MeanAroundMedian",
    "Median",
    "MultiKrum",
    "MultiMetrics",
    "NearestNeighborMixing",
    "NormClipping",
    "RuleWrapper",
    "ServerOptimizer",
    "ServerStep",
    "SignGuard",
    "TrimmedMean",
]
