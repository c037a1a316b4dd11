from __future__ import annotations

import pytest
import torch

from fedrec.exceptions import ShapeError
from fedrec.functional import consistency_scores, gap_statistic
from fedrec.functional.detection.fldetector import upper_cluster

TWO_GROUPS = torch.tensor([0.9, 1.0, 0.95, 1.02, 0.98, 0.93, 1.6, 1.62, 0.97, 1.58])


def test_perfect_predictions_are_all_alike() -> None:
    zeros = torch.zeros(4, 3)
    assert consistency_scores(zeros, zeros, torch.zeros(3)).tolist() == [0.25] * 4


def test_scores_do_not_depend_on_the_order_by_a_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 30, 501, generator=generator)
    hvp = torch.randn(501, generator=generator)
    order = torch.randperm(30, generator=generator)
    scores = consistency_scores(old, new, hvp)
    assert torch.equal(consistency_scores(old[order], new[order], hvp), scores[order])
    assert scores.sum().item() == pytest.approx(1)


def test_two_groups_are_found_whatever_their_scale() -> None:
    for scores in (TWO_GROUPS, 1e-7 * TWO_GROUPS, 100 + TWO_GROUPS.double(), TWO_GROUPS.flip(0)):
        assert gap_statistic(scores, standard_errors=3.0) == 2
    assert upper_cluster(TWO_GROUPS).nonzero().flatten().tolist() == [6, 7, 9]


def test_one_cluster_less_than_clients_is_tried() -> None:
    # Two clusters leave nothing, so their gap is infinite.
    assert gap_statistic(torch.tensor([0.0, 0.0, 1.0])) == 2


@pytest.mark.parametrize(
    "scores",
    [[], [1.0], [1.0, 2.0], [3.0] * 9, [0.0, 0.5, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
)
def test_no_structure_is_one_cluster(scores: list[float]) -> None:
    assert gap_statistic(torch.tensor(scores)) == 1


def test_scores_that_take_two_values_only() -> None:
    scores = torch.tensor([1.0] * 8 + [5.0] * 3)  # no spread within the clusters: log of zero
    assert gap_statistic(scores) == 2
    assert upper_cluster(scores).tolist() == [False] * 8 + [True] * 3


def test_references_depend_on_the_seed_alone() -> None:
    scores = torch.rand(12, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    first = [gap_statistic(scores, num_references=3, standard_errors=0.0, seed=s) for s in range(9)]
    torch.manual_seed(1)
    again = [gap_statistic(scores, num_references=3, standard_errors=0.0, seed=s) for s in range(9)]
    assert first == again


def test_more_standard_errors_mean_fewer_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        scores = torch.rand(15, generator=generator)
        found = [gap_statistic(scores, standard_errors=c) for c in (0.0, 1.0, 3.0, 1e6)]
        assert found == sorted(found, reverse=True)
        assert found[-1] == 1


def test_scores_that_are_no_numbers() -> None:
    with pytest.raises(ShapeError, match="finite"):
        gap_statistic(torch.tensor([0.0, float("nan"), 1.0]))
    with pytest.raises(ShapeError, match="one finite score"):
        gap_statistic(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("dtype", "large"),
    [(torch.float32, 1e25), (torch.float32, 3e38), (torch.float64, 1e200), (torch.float64, 1e308)],
)
def test_an_update_whose_norm_overflows_has_nearly_the_whole_score(
    dtype: torch.dtype, large: float
) -> None:
    old = torch.zeros(5, 4, dtype=dtype)
    new = torch.ones(5, 4, dtype=dtype)
    old[3], new[3] = -large, large
    scores = consistency_scores(old, new, torch.zeros(4, dtype=dtype))
    assert scores[3].item() == pytest.approx(1.0)
    # Distances are 2 for the others and 4 * large for this one.
    assert scores[0].item() == pytest.approx(0.5 / large)
    assert gap_statistic(scores, standard_errors=3.0) == 2


def test_two_updates_whose_norms_overflow_are_told_apart() -> None:
    new = torch.tensor([[1e25, 0.0], [0.0, 3e25], [1.0, 1.0]])
    scores = consistency_scores(torch.zeros(3, 2), new, torch.zeros(2))
    torch.testing.assert_close(scores, torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64))
