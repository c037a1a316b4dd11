"""Pure tensor functions behind the components."""

from fedrec.functional.aggregation.alignment import principal_sign_alignment
from fedrec.functional.aggregation.clipping import (
    adaptive_clipping,
    centered_clipping,
    norm_clipping,
)
from fedrec.functional.aggregation.clustering import largest_mode, majority_cluster
from fedrec.functional.aggregation.foolsgold import foolsgold_weights
from fedrec.functional.aggregation.geometric_median import geometric_median
from fedrec.functional.aggregation.inspection import (
    cluster_distances,
    density_clusters,
    division_differences,
    threshold_exceedings,
    update_energies,
)
from fedrec.functional.aggregation.krum import bulyan_selection, krum_scores
from fedrec.functional.aggregation.mean_around_median import mean_around_median
from fedrec.functional.aggregation.means import weighted_mean
from fedrec.functional.aggregation.median_z_scores import median_z_scores
from fedrec.functional.aggregation.mixing import bucket_means, nearest_neighbor_mixing
from fedrec.functional.aggregation.order_statistics import (
    choose_kernel,
    coordinate_median,
    trimmed_mean,
    use_kernel,
)
from fedrec.functional.aggregation.plane_clusters import gap_clusters
from fedrec.functional.aggregation.server_optimizers import adaptive_server_step
from fedrec.functional.aggregation.signs import sign_votes
from fedrec.functional.aggregation.sparsification import keep_largest, positive_purity
from fedrec.functional.aggregation.spectral import covariance_bound_agnostic_filter, spectral_scores
from fedrec.functional.aggregation.trust import trust_scores
from fedrec.functional.aggregation.whitening import whitened_scores
from fedrec.functional.attack.alie import alie, alie_quantile
from fedrec.functional.attack.backdoor import (
    blended,
    every_kth_feature,
    part_of_trigger,
    pixel_pattern,
    square_pattern,
)
from fedrec.functional.attack.krum_attack import krum_attack, krum_attack_partial
from fedrec.functional.attack.mimic import mimic_direction
from fedrec.functional.attack.min_max import min_max, min_sum, perturbation
from fedrec.functional.attack.neurotoxin import outside_top
from fedrec.functional.attack.poisonedfl import consistent_update, is_aligned
from fedrec.functional.attack.trim import trim_attack, trim_attack_partial
from fedrec.functional.consistency import row_cosines, sign_agreement
from fedrec.functional.cosine import cosine_similarities
from fedrec.functional.detection.fldetector import consistency_scores, gap_statistic
from fedrec.functional.detection.outliers import (
    modified_z_scores,
    principal_coordinates,
    robust_distances,
)
from fedrec.functional.detection.two_means import two_means
from fedrec.functional.distances import gram_matrix, pairwise_squared_distances
from fedrec.functional.recovery.ascent import (
    distance_to_random_models,
    project_onto_ball,
    reference_weights,
)
from fedrec.functional.recovery.calibration import calibrate
from fedrec.functional.recovery.crab import loss_windows, softmax_divergence
from fedrec.functional.recovery.distillation import distillation_loss
from fedrec.functional.recovery.lbfgs import lbfgs_hvp
from fedrec.functional.recovery.relative_errors import relative_errors
from fedrec.functional.recovery.sensitivity import certified_sensitivity, removal_effect
from fedrec.functional.recovery.theorem import recovery_bound

__all__ = [
    "adaptive_clipping",
    "adaptive_server_step",
    "alie",
    "alie_quantile",
    "blended",
    "bucket_means",
    "bulyan_selection",
    "calibrate",
    "centered_clipping",
    "certified_sensitivity",
    "choose_kernel",
    "cluster_distances",
    "consistency_scores",
    "consistent_update",
    "coordinate_median",
    "cosine_similarities",
    "covariance_bound_agnostic_filter",
    "density_clusters",
    "distance_to_random_models",
    "distillation_loss",
    "division_differences",
    "every_kth_feature",
    "foolsgold_weights",
    "gap_clusters",
    "gap_statistic",
    "geometric_median",
    "gram_matrix",
    "is_aligned",
    "keep_largest",
    "krum_attack",
    "krum_attack_partial",
    "krum_scores",
    "largest_mode",
    "lbfgs_hvp",
    "loss_windows",
    "majority_cluster",
    "mean_around_median",
    "median_z_scores",
    "mimic_direction",
    "min_max",
    "min_sum",
    "modified_z_scores",
    "nearest_neighbor_mixing",
    "norm_clipping",
    "outside_top",
    "pairwise_squared_distances",
    "part_of_trigger",
    "perturbation",
    "pixel_pattern",
    "positive_purity",
    "principal_coordinates",
    "principal_sign_alignment",
    "project_onto_ball",
    "recovery_bound",
    "reference_weights",
    "relative_errors",
    "removal_effect",
    "robust_distances",
    "row_cosines",
    "sign_agreement",
    "sign_votes",
    "softmax_divergence",
    "spectral_scores",
    "square_pattern",
    "threshold_exceedings",
    "trim_attack",
    "trim_attack_partial",
    "trimmed_mean",
    "trust_scores",
    "two_means",
    "update_energies",
    "use_kernel",
    "weighted_mean",
    "whitened_scores",
]
