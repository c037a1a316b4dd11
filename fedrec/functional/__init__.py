"""Pure tensor functions behind the components."""

from fedrec.functional.backdoor import every_kth_feature, pixel_pattern
from fedrec.functional.distances import pairwise_squared_distances
from fedrec.functional.fldetector import consistency_scores, gap_statistic
from fedrec.functional.lbfgs import lbfgs_hvp
from fedrec.functional.means import weighted_mean
from fedrec.functional.order_statistics import (
    choose_kernel,
    coordinate_median,
    trimmed_mean,
    use_kernel,
)
from fedrec.functional.trim import trim_attack

__all__ = [
    "choose_kernel",
    "consistency_scores",
    "coordinate_median",
    "every_kth_feature",
    "gap_statistic",
    "lbfgs_hvp",
    "pairwise_squared_distances",
    "pixel_pattern",
    "trim_attack",
    "trimmed_mean",
    "use_kernel",
    "weighted_mean",
]
