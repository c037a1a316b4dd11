"""Pure tensor functions behind the components."""

from fedrec.functional.backdoor import every_kth_feature, pixel_pattern
from fedrec.functional.fldetector import consistency_scores, gap_statistic
from fedrec.functional.lbfgs import lbfgs_hvp
from fedrec.functional.means import weighted_mean
from fedrec.functional.order_statistics import coordinate_median, trimmed_mean
from fedrec.functional.trim import trim_attack

__all__ = [
    "consistency_scores",
    "coordinate_median",
    "every_kth_feature",
    "gap_statistic",
    "lbfgs_hvp",
    "pixel_pattern",
    "trim_attack",
    "trimmed_mean",
    "weighted_mean",
]
