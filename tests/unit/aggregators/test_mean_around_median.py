from __future__ import annotations

import numpy as np
import pytest
import torch

from fedrec.aggregators import MeanAroundMedian
from fedrec.exceptions import AggregationError
from fedrec.functional import coordinate_median, mean_around_median, use_kernel


def test_by_hand() -> None:
    # Around 4: 4, 3, 5 and 1. Around 0: 0, 1, -2 and 3.
    x = torch.tensor([[1.0, 0.0], [3.0, 1.0], [4.0, -2.0], [5.0, 3.0], [90.0, -90.0]])
    assert MeanAroundMedian(num_byzantine=1)(x).tolist() == [13 / 4, 2 / 4]


def test_equally_near_values_count_half() -> None:
    # Around 2: 1 and 3, then 0 and 4 are equally near: one of them belongs to the three.
    x = torch.tensor([[0.0], [1.0], [3.0], [4.0]])
    assert MeanAroundMedian(num_byzantine=1)(x).tolist() == [(1 + 3 + 0 / 2 + 4 / 2) / 3]
    assert MeanAroundMedian(num_byzantine=1)(-x).tolist() == [-2.0]


def nearest_by_definition(x: np.ndarray, k: int) -> np.ndarray:
    """Take all that are nearer than the k-th, and an equal share of those that are as near."""
    out = []
    for column in x.T:
        distance = np.abs(column - np.median(column))
        bound = np.sort(distance)[k - 1]
        sure, tied = column[distance < bound], column[distance == bound]
        out.append((sure.sum() + (k - len(sure)) * tied.mean()) / k)
    return np.array(out)


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 23])
def test_any_number_of_nearest(m: int, kernel: str) -> None:
    x = np.random.default_rng(m).standard_normal((m, 100)).astype(np.float32).astype(np.float64)
    x[:, ::2] = 0.0  # all tied
    with use_kernel(kernel):
        for k in range(1, m + 1):
            got = mean_around_median(torch.from_numpy(x), k)
            np.testing.assert_allclose(got, nearest_by_definition(x, k), rtol=1e-12, atol=1e-14)


def test_from_the_median_to_the_mean() -> None:
    for m in (6, 7):
        x = torch.randn(m, 50, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
        torch.testing.assert_close(mean_around_median(x, 1), coordinate_median(x))
        torch.testing.assert_close(mean_around_median(x, m), x.mean(dim=0))


def test_a_huge_value_leaves_no_trace() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [3e38], [-3e38]])
    assert MeanAroundMedian(num_byzantine=2)(x).tolist() == [2.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0], [3.0], [4.0], [5.0], [90.0]], dtype=dtype)
    result = MeanAroundMedian(num_byzantine=1)(x)
    assert result.dtype == dtype
    assert result.tolist() == [3.25]


@pytest.mark.parametrize("k", [0, -1, 4])
def test_a_number_that_cannot_be_kept(k: int) -> None:
    with pytest.raises(AggregationError, match=f"Cannot keep {k} of m=3 updates. HINT"):
        mean_around_median(torch.zeros(3, 1), k)


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
def test_some_rows_are_as_a_copy_of_them(kernel: str) -> None:
    x = torch.randn(9, 20_000, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, 3, 4, 8])
    with use_kernel(kernel):
        assert torch.equal(mean_around_median(x, 3, rows), mean_around_median(x[rows], 3))
